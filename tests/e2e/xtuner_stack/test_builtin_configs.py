"""Every built-in config of XTuner: the exporter that is chosen for it, what goes out, and its chat template.

    python -m tests.e2e.xtuner_stack.test_builtin_configs >docs/xtuner_configs.md

writes the table anew, in XTuner's environment.
"""

import logging
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config

from tests.e2e.xtuner_stack.stand_ins import family_of, stand_ins
from tests.helpers.ranks.launch import REPO_ROOT
from xhf_hooks.errors import XhfError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import ExportRequest
from xhf_hooks.sources import WholeTensorsSource
from xhf_hooks.xtuner.chat_template import template_of_config

NOT_MMENGINE = 'none: transformers.Trainer trains it, without MMEngine hooks'
#: Options that choose an attention, a length, or weights to start from, and no other tensors.
SAME_TENSORS = ('use_varlen_attn', 'max_position_embeddings', 'pretrained_pth')

#: What XTuner says of DeepSeek-V2 with transformers 4.39 and of Mistral with 4.42, and peft 0.13 of 8 bits with
#: bitsandbytes 0.50; transformers 4.36 has no quantizers.
CANNOT_BE_BUILT = ('requires transformers version', 'memory_efficient_backward', 'max_seq_len_cached', 'quantizers')

PAGE = REPO_ROOT / 'docs' / 'xtuner_configs.md'


@dataclass(frozen=True)
class Found:
    """What the package makes of a model.

    Attributes:
        model: The name of XTuner's class.
        exporter: The name of the exporter's class, or why there is none.
        reads: The tensors that go out.
        trained: The tensors that the optimizer moves.
    """

    model: str = ''
    exporter: str = NOT_MMENGINE
    reads: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BuiltIn:
    """One built-in config; its name is its path below ``xtuner/configs``."""

    name: str
    text: str
    found: Found
    template: Mapping[str, Any] | None


def built_ins() -> list[BuiltIn]:
    """Every built-in config. Equal models are built once."""
    (xtuner,) = find_spec('xtuner').submodule_search_locations
    root = Path(xtuner, 'configs')
    logging.disable(logging.WARNING)
    known: dict[str, Found] = {}
    result = []
    try:
        with stand_ins(), warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'Could not find a config file')  # peft's, of the bases that are not here
            for file in sorted(root.rglob('*.py')):
                text = file.read_text()
                if '\nmodel = dict(' not in text:
                    continue  # a package's __init__, or one of XTuner's conversion scripts
                cfg = Config.fromfile(file)
                try:
                    found = Found() if 'training_args' in cfg else found_for(cfg, known)
                except (AssertionError, AttributeError, ImportError) as error:
                    if not any(said in str(error) for said in CANNOT_BE_BUILT):
                        raise
                    continue
                result.append(BuiltIn(str(file.relative_to(root)), text, found, template_of_config(cfg)))
    finally:
        logging.disable(logging.NOTSET)
    return result


def found_for(cfg: Config, known: dict[str, Found]) -> Found:
    from xtuner.registry import BUILDER

    model = {name: value for name, value in cfg._to_lazy_dict()['model'].items() if name not in SAME_TENSORS}
    key = re.sub(r"'[^' ]+/[^' ]+'", lambda base: family_of(base[0]), repr(model))  # by what stands in for the bases
    if key not in known:
        for option in SAME_TENSORS:
            cfg.model.pop(option, None)
        model = BUILDER.build(cfg.model)
        try:
            exporter = exporter_for(model, None)
            export = exporter.export(ExportRequest(WholeTensorsSource(model).specs()))
            entries, chosen = export.entries, type(exporter).__name__
        except XhfError as error:
            entries, chosen = [], f'none: {error}'.partition(',')[0]
        reads = frozenset(name for entry in entries for name in entry.reads)
        trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        known[key] = Found(type(model).__name__, chosen, reads, trained)
    return known[key]


def table(configs: list[BuiltIn]) -> str:
    """Markdown: config family, XTuner's model, exporter, how many, how many of them with a prompt template."""
    rows = Counter((c.name.partition('/')[0], c.found.model, c.found.exporter) for c in configs)
    with_template = Counter(
        (c.name.partition('/')[0], c.found.model, c.found.exporter) for c in configs if c.template is not None
    )
    lines = [
        '# XTuner 0.2.0: the exporter of each built-in config',
        '',
        'Found by `tests/e2e/xtuner_stack/test_builtin_configs.py` from the configs alone, with tiny stand-ins for the',
        'base models; `python -m tests.e2e.xtuner_stack.test_builtin_configs` writes this file.',
        '',
        "| configs | XTuner's model | exporter | how many | of them with a prompt template |",
        '|---|---|---|---|---|',
        *(f'| {" | ".join(row)} | {count} | {with_template[row]} |' for row, count in sorted(rows.items())),
        f'| all | | | {rows.total()} | {with_template.total()} |',
    ]
    return '\n'.join(lines) + '\n'


@pytest.fixture(scope='module')
def configs() -> list[BuiltIn]:
    return built_ins()


@pytest.fixture(scope='module')
def exported(configs) -> list[BuiltIn]:
    """But for those that transformers.Trainer trains, and InternVL with 4 bits."""
    return [config for config in configs if not config.found.exporter.startswith('none: ')]


def is_of_the_page() -> bool:
    """Tells whether the installed XTuner is that of the page, whose configs are counted."""
    return PAGE.read_text().startswith(f'# XTuner {version("xtuner")}:')


def test_the_table_is_the_one_in_docs(configs):
    """Which exporter each model of XTuner has; the page is of 0.2.0."""
    refused = [c.name for c in configs if c.found.model and c.found.exporter.startswith('none: ')]
    assert all(name.startswith('internvl/') and '_qlora_' in name for name in refused)
    if is_of_the_page():
        assert (len(configs), len(refused)) == (587, 7)
        assert PAGE.read_text() == table(configs)


def test_everything_trained_goes_out_and_an_adapter_alone(exported):
    lost = {c.name: sorted(c.found.trained - c.found.reads)[:3] for c in exported}
    assert {name: tensors for name, tensors in lost.items() if tensors} == {}
    adapters = [c for c in exported if c.found.exporter == 'LoraExporter']
    # With transformers 4.36, which has no quantizers, none of the configs with LoRA can be built: all quantize
    assert adapters or not any('\n    lora=dict(' in c.text for c in exported)
    assert [c.name for c in adapters if c.found.reads != c.found.trained] == []


def test_the_reference_model_stays_here_and_the_reward_head_goes_out(exported):
    dpo = [c.found.reads for c in exported if c.found.model == 'DPO']
    assert not any(name.startswith('ref_llm.') for reads in dpo for name in reads)
    reward = [c.found.reads for c in exported if c.name.startswith('reward_model/')]
    assert all('v_head.weight' in reads for reads in reward)
    assert not is_of_the_page() or (len(dpo), len(reward)) == (8, 7)


def test_the_prompt_template_is_found(configs):
    """The one that its text names. Preference pairs, rewards and InternVL do not go through a prompt template."""
    from xtuner.utils import PROMPT_TEMPLATE

    wrong = {}
    for config in configs:
        named = re.search(r'^prompt_template = PROMPT_TEMPLATE\.(\w+)$', config.text, flags=re.MULTILINE)
        own_format = 'type=build_preference_dataset' in config.text or config.name.startswith('internvl/')
        expected = None if named is None or own_format else PROMPT_TEMPLATE[named[1]]
        if config.template != expected:
            wrong[config.name] = (config.template, named and named[1])
    assert wrong == {}


if __name__ == '__main__':
    print(table(built_ins()), end='')
