"""Every built-in config of XTuner: the exporter that is chosen for it, what goes out, and its chat template.

What is expected is said here by the configs' paths and texts alone, as a reader of their names would say it.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from tests.e2e.xtuner_stack.builtin_configs import NOT_MMENGINE, BuiltIn, built_ins, table
from tests.helpers.ranks import REPO_ROOT

N_CONFIGS = 587
TABLE = REPO_ROOT / 'docs' / 'xtuner_configs.md'
#: Named otherwise than they train: QLoRA in a file named full; LoRA, as the NPU knows no quantization.
MISNAMED = {'mistral_7b_full_finetune_custom_sft_e1': 'qlora', 'internlm2_5_chat_20b_alpaca_e3': 'full'}
#: Of whole models; with LoRA it is the second.
EXPORTERS = {
    'llava': ('LlavaExporter', 'LlavaExporter'),
    'internvl': ('HuggingFaceExporter', 'NestedLoraExporter'),
    'reward_model': ('RewardExporter', 'RewardExporter'),
}
QUANTIZED = 'none: InternVLChatModel is quantized (bitsandbytes)'
PLAIN = ('HuggingFaceExporter', 'LoraExporter')


@pytest.fixture(scope='module')
def configs() -> list[BuiltIn]:
    return built_ins()


def has_lora(name: str) -> bool:
    stem = PurePosixPath(name).stem
    return re.search(r'(?<![a-z])(q|int8_)?lora(?![a-z])', MISNAMED.get(stem, stem)) is not None


def is_quantized_internvl(name: str) -> bool:
    return name.startswith('internvl/') and '_qlora_' in name


def expected_exporter(name: str) -> str:
    if name.endswith('_hf.py'):
        return NOT_MMENGINE
    if '/deepseek_v2_' in name:
        return 'ShardedMoeExporter'
    if is_quantized_internvl(name):
        return QUANTIZED
    return EXPORTERS.get(name.partition('/')[0], PLAIN)[has_lora(name)]


def test_all_are_here(configs):
    """As many as `xtuner list-cfg` finds files for, but for its DeepSpeed configs and four kinds of scripts."""
    from xtuner.configs import cfgs_name_path

    stems = {PurePosixPath(config.name).stem for config in configs}
    others = {name for name, path in cfgs_name_path.items() if name not in stems and path.endswith('.py')}
    assert others == {
        'convert_to_official',
        'convert_phi_to_llama',
        'convert_xtuner_weights_to_hf',
        'convert_xtuner_weights_to_llava',
    }
    assert len(configs) == N_CONFIGS


def test_the_exporter_is_the_right_one(configs):
    wrong = {c.name: c.exporter for c in configs if c.exporter != expected_exporter(c.name)}
    assert wrong == {}


def test_none_that_trains_with_hooks_is_refused_but_quantized_internvl(configs):
    refused = [c.name for c in configs if c.exporter.startswith('none: ') and c.found]
    assert len(refused) == 7 and all(map(is_quantized_internvl, refused))


def test_everything_trained_goes_out(configs):
    exported = [c for c in configs if c.found and not is_quantized_internvl(c.name)]
    lost = {c.name: sorted(c.found.trained - c.found.reads)[:3] for c in exported}
    assert {name: tensors for name, tensors in lost.items() if tensors} == {}


def test_an_adapter_goes_out_alone(configs):
    with_base = [c.name for c in configs if c.exporter == 'LoraExporter' and c.found.reads != c.found.trained]
    assert with_base == []


def test_the_reference_model_stays_here(configs):
    dpo = [c for c in configs if c.found and c.found.model == 'DPO']
    assert len(dpo) == 8
    assert [c.name for c in dpo if any(name.startswith('ref_llm.') for name in c.found.reads)] == []


def test_the_reward_head_goes_out(configs):
    reward = [c for c in configs if c.name.startswith('reward_model/')]
    assert len(reward) == 7
    assert [c.name for c in reward if 'v_head.weight' not in c.found.reads] == []


def test_sharded_experts_go_out_one_by_one(configs):
    sharded = [c for c in configs if c.exporter == 'ShardedMoeExporter']
    assert len(sharded) == 3
    for config in sharded:
        experts = {n for n in config.found.names if re.search(r'experts\.\d+\.(gate|up|down)_proj\.weight$', n)}
        assert len(experts) == 40 * 3, config.name


def test_the_prompt_template_is_found(configs):
    """The one that its text names. Preference pairs, rewards and InternVL do not go through a prompt template."""
    from xtuner.utils import PROMPT_TEMPLATE

    wrong = {}
    for config in configs:
        named = re.search(r'^prompt_template = PROMPT_TEMPLATE\.(\w+)$', config.text, flags=re.MULTILINE)
        own_format = 'type=build_preference_dataset' in config.text or config.name.startswith('internvl/')
        expected = None if named is None or own_format else PROMPT_TEMPLATE[named[1]]
        found = config.template and PROMPT_TEMPLATE[config.template.removeprefix('PROMPT_TEMPLATE.')]
        if found != expected:
            wrong[config.name] = (config.template, named and named[1])
    assert wrong == {}


def test_the_table_is_the_one_in_docs(configs):
    print(table(configs))
    assert TABLE.read_text() == table(configs)
