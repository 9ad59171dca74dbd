"""A LoRA adapter is written as by peft, alone or beside the merged model, which is the one that peft's merge makes.

A model with adapters on some of its parts goes out merged and whole, as InternVL's must.
"""

import ast
import copy
import json
import operator
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.checks.compare import (
    assert_loads_clean,
    assert_same_folder_tensors,
    bytes_in,
    folder_tensors,
    splits_as_the_hub,
)
from tests.helpers.checks.config_fields import assert_same_config
from tests.helpers.models.adapted import (
    EXPERTS,
    KINDS,
    adapt,
    adapted,
    around,
    assert_rounded_once,
    can_be_made,
    is_known_to_peft,
    merged_by_peft,
    planned,
    refusal,
)
from tests.helpers.models.installed_peft import INITS, saves_resized_embeddings
from tests.helpers.models.remote_code import use_modules_cache
from tests.helpers.models.zoo import build
from tests.helpers.models.zoo.internvl import CODE, load_internvl
from tests.helpers.runs.engines import save_folder
from xhf_hooks import save_hf
from xhf_hooks.compat.transformers import set_rope_option
from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import HuggingFaceExporter, LoraExporter, NestedLoraExporter, exporter_for
from xhf_hooks.runs.telemetry import trained_of

BF16 = torch.bfloat16

#: With a head of their own, of which the config that peft's merged model saves says nothing before transformers 4.48.
UNTIED = ('conv2d', 'untied_by_modules_to_save')
#: If the installed peft has it.
DORA = {'use_dora': True} if can_be_made('llama', use_dora=True) else {}
#: Where peft adds up in another order in fp32: by a convolution, or along the other axis of a transposed weight.
OTHER_ORDER = ('conv', 'conv_dora', 'conv1d_weights_dora', 'embedding_dora')


def live(model: nn.Module) -> Any:
    """All that a save must not change: its configs, and which tensors of which values it has."""
    tensors = {name: (id(t), t.requires_grad, t.tolist()) for name, t in model.state_dict(keep_vars=True).items()}
    return model.config.to_dict(), model.peft_config['default'].to_dict(), tensors


@pytest.mark.parametrize('kind', filter(is_known_to_peft, KINDS))
def test_adapter_and_merged_model_are_pefts(kind, tmp_path):
    family, lora = KINDS[kind]
    model = adapted(family, **lora)
    model.save_pretrained(tmp_path / 'adapter')
    merged_by_peft(model, tmp_path / 'merged')
    before, modules = live(model), list(model.modules())
    _, committed = save_folder(around(llm=model), tmp_path / 'hf_model', lora='both')
    assert live(model) == before and all(map(operator.is_, model.modules(), modules))
    assert bytes_in(committed.path / 'adapter') == bytes_in(tmp_path / 'adapter')
    if kind in OTHER_ORDER:
        pefts = {name: tensor.double() for name, tensor in folder_tensors(tmp_path / 'merged').items()}
        assert_rounded_once(folder_tensors(committed.path), pefts)
    else:
        assert_same_folder_tensors(tmp_path / 'merged', committed.path)
    untied = {'tie_word_embeddings': False} if kind in UNTIED else {}
    assert_same_config(committed.path, tmp_path / 'merged', **untied)
    for path in (tmp_path / 'merged').glob('generation_config.json'):
        assert json.loads((committed.path / path.name).read_text()) == json.loads(path.read_text())
    assert_loads_clean(committed.path, type(model.get_base_model()))


@pytest.mark.parametrize('kind', filter(is_known_to_peft, KINDS))
def test_merge_in_bf16_is_rounded_once(kind, tmp_path):
    family, lora = KINDS[kind]
    model = adapt(build(family).to(BF16), **lora)  # the adapter in fp32, as peft leaves it
    save_folder(model, tmp_path / 'hf_model', lora='merge')
    copy.deepcopy(model).double().merge_and_unload().save_pretrained(tmp_path / 'exact')
    saved = folder_tensors(tmp_path / 'hf_model')
    assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} <= {BF16, torch.float32}
    assert_rounded_once(saved, folder_tensors(tmp_path / 'exact'))


def test_resized_vocabulary_goes_with_the_adapter(tmp_path):
    build('llama').save_pretrained(tmp_path / 'base')
    base = AutoModelForCausalLM.from_pretrained(tmp_path / 'base')
    base.resize_token_embeddings(137)
    model = adapt(base)
    model.save_pretrained(tmp_path / 'expected')
    save_folder(model, tmp_path / 'both', lora='both')
    (tmp_path / 'told').mkdir()
    warnings = planned(model, lora='adapter').write_hf_assets(tmp_path / 'told', None, ())
    told = [line for line in warnings if 'from 131 to 137 rows, and peft does not' in line]
    assert len(told) == (not saves_resized_embeddings()), 'else new tokens would be lost without a word'
    if not told:
        assert {'base_model.model.model.embed_tokens.weight'} < set(folder_tensors(tmp_path / 'both' / 'adapter'))
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'both' / 'adapter')
    assert_loads_clean(tmp_path / 'both', type(base))
    assert json.loads((tmp_path / 'both' / 'config.json').read_text())['vocab_size'] == 137


def test_adapter_of_another_name_in_another_dtype(tmp_path):
    model = get_peft_model(build('llama'), LoraConfig(target_modules=['q_proj']), adapter_name='mine')
    model.save_pretrained(tmp_path / 'expected')
    save_folder(model, tmp_path / 'both', lora='both', dtype='bfloat16')
    expected = folder_tensors(tmp_path / 'expected' / 'mine')
    found = folder_tensors(tmp_path / 'both' / 'adapter')
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.to(BF16)) for name, tensor in expected.items())
    exact = copy.deepcopy(model).double().merge_and_unload().state_dict()
    assert_rounded_once(folder_tensors(tmp_path / 'both'), exact)


@pytest.mark.modern_only
@pytest.mark.skipif(not is_known_to_peft('expert_parameters'), reason='in transformers 4 experts are linear layers')
def test_memory_of_merged_experts(tmp_path):
    """Those of one layer are merged together; transformers copies gates and ups out of one tensor."""
    model = adapted('mixtral', target_modules=[], target_parameters=EXPERTS)
    plan, _ = save_folder(model, tmp_path / 'hf_model', lora='merge')
    exporter = planned(model, lora='merge')
    made = [group.placements for bucket in plan.buckets for group in bucket if len(group.reads) > 1]
    assert sorted(map(len, made)) == [5, 5, 10, 10]
    largest = 2 * sum(placement.nbytes for placement in max(made, key=len))
    assert largest < exporter.combine_nbytes < 1.2 * largest


def test_shards_are_those_of_the_merged_model_and_memory_is_that_of_one_weight(tmp_path):
    model = adapted('llama', target_modules='all-linear', **DORA)
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / 'expected', max_shard_size='20KB')
    plan, _ = save_folder(model, tmp_path / 'hf_model', lora='both', max_shard_size=20_000)
    assert [path.name for path in (tmp_path / 'hf_model/adapter').glob('*.s*')] == ['adapter_model.safetensors']
    found, expected = (bytes_in(tmp_path / name, 'model*') for name in ('hf_model', 'expected'))
    assert len(expected) > 3
    if splits_as_the_hub():
        assert found == expected
    else:  # lm_head, which is larger than a shard may be, gets its number when its predecessor is full
        found.pop('model.safetensors.index.json'), expected.pop('model.safetensors.index.json')
        assert sorted(found.values()) == sorted(expected.values())
    groups = [group for bucket in plan.buckets for group in bucket if len(group.reads) > 1]
    assert groups and all(len(group.placements) == 1 and len(group.reads) == 3 + len(DORA) for group in groups)


# Which model


def test_the_adapter_is_found():
    model = adapted('llama')
    for whole, module in [(model, None), (around(llm=model, visual=build('bert')), None), (around(m=model), None)]:
        assert type(exporter_for(whole, module)) is LoraExporter
    two = around(actor=model, critic=adapted('llama'))
    with pytest.raises(ModelError, match=r"\['actor\.base_model\.model', 'critic\.base_model\.model'\]"):
        exporter_for(two, None)
    for module in ('critic', 'critic.base_model.model'):
        assert type(exporter_for(two, module)) is LoraExporter
    beside = around(visual=adapted('llama'), llm=build('llama'))
    assert type(exporter_for(beside, None)) is HuggingFaceExporter
    assert type(exporter_for(beside, 'visual')) is LoraExporter


# What is refused


def test_trained_outside_the_adapter(tmp_path):
    model = adapted('llama')
    model.get_base_model().lm_head.requires_grad_(True)
    found = refusal(model)
    assert "['base_model.model.lm_head.weight']" in found and 'modules_to_save' in found
    assert refusal(model, 'both') == found, 'the folder of the adapter is checked by itself'
    save_folder(model, tmp_path / 'hf_model', lora='merge')
    assert torch.equal(folder_tensors(tmp_path / 'hf_model')['lm_head.weight'], model.get_base_model().lm_head.weight)


def test_no_adapter_or_none_that_is_trained():
    found = refusal(build('llama'), 'merge')
    assert 'option lora: expected None: that needs a LoRA adapter' in found and "found 'merge'" in found
    frozen = adapted('llama').requires_grad_(False)
    assert "the adapters ['default'] of LlamaForCausalLM have no trainable tensors" in refusal(frozen)
    two = adapted('llama')
    two.add_adapter('other', LoraConfig(target_modules=['q_proj']))
    two.requires_grad_(True)
    said = "trainable adapters that are not active, and its outputs do not depend on them: ['other']"
    assert said in refusal(two, 'adapter') and said in refusal(two, 'merge')


def with_rope(base, scaling):
    """The base, loaded as XTuner does with ``max_position_embeddings``."""
    config = AutoConfig.from_pretrained(base)
    assert set_rope_option(config, 'rope_scaling', scaling)
    return AutoModelForCausalLM.from_pretrained(base, config=config)


def test_other_settings_than_the_bases_are_told(tmp_path, caplog):
    """Loaded onto the base with the settings that the message names, the adapter is what was trained."""
    build('llama').save_pretrained(tmp_path / 'base')
    trained = adapt(with_rope(tmp_path / 'base', {'type': 'linear', 'factor': 4.0}))
    save_hf(trained, tmp_path / 'adapter', lora='adapter')
    (told,) = [line for line in caplog.messages if 'the config of the trained model differs' in line]
    assert "lora='merge'" in told and str(tmp_path / 'base') in told
    (settings,) = re.findall(r'from_pretrained\(\.\.\., (\w+)=({.*?})\)', told)
    same = [{settings[0]: ast.literal_eval(settings[1])}, {}]
    ids = torch.arange(4, 36).view(2, 16)
    with torch.no_grad():
        expected = trained(input_ids=ids).logits
        for options in same:
            base = AutoModelForCausalLM.from_pretrained(tmp_path / 'base', **options)
            found = PeftModel.from_pretrained(base, tmp_path / 'adapter')(input_ids=ids).logits
            assert torch.allclose(found, expected, atol=1e-5) is bool(options)


def test_settings_that_change_no_output_are_not_told(tmp_path, caplog):
    build('llama').save_pretrained(tmp_path / 'base')
    model = with_rope(tmp_path / 'base', {'type': 'linear', 'factor': 1.0})  # XTuner's, if the context is not longer
    config = model.config
    config.use_cache, config.pad_token_id, config.attention_dropout = False, 1, 0.5
    config.quantization_config, config.of_a_trainer = {'load_in_4bit': True}, 'its own'
    save_hf(adapt(model), tmp_path / 'adapter', lora='adapter')
    assert not [line for line in caplog.messages if 'the config of the trained model differs' in line]


@pytest.mark.parametrize('init', INITS)
def test_a_base_that_the_init_has_changed_and_peft_cannot_change_again(init, tmp_path, caplog):
    """Loaded onto the base, an adapter is what was trained, or a warning says that it is not."""
    build('llama').save_pretrained(tmp_path / 'base')
    model, options = AutoModelForCausalLM.from_pretrained(tmp_path / 'base'), {}
    if init == 'lora_ga':
        from peft.tuners.lora import loraga
        from peft.tuners.lora.config import LoraGAConfig

        options = dict(lora_ga_config=LoraGAConfig())
        config = LoraConfig(target_modules=['q_proj'], init_lora_weights=init, **options)
        ids = torch.arange(4, 36).view(2, 16)
        loraga.preprocess_loraga(model, config, lambda: model(input_ids=ids, labels=ids).loss.backward())
    trained = get_peft_model(model, LoraConfig(target_modules=['q_proj'], init_lora_weights=init, **options))
    save_hf(trained, tmp_path / 'adapter', lora='adapter')
    told = [line for line in caplog.messages if 'changed the weights of' in line]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / 'base')
    ids = torch.arange(4, 36).view(2, 16)
    loaded = PeftModel.from_pretrained(base, tmp_path / 'adapter')
    with torch.no_grad():
        found, expected = (one(input_ids=ids).logits for one in (loaded, trained))
    if init in ('pissa', 'olora', 'gaussian'):
        assert not told and torch.allclose(found, expected, atol=1e-5)
        return
    assert not torch.allclose(found, expected, atol=1e-5)
    (line,) = told
    assert f'init_lora_weights={init!r} changed the weights of {tmp_path / "base"} before training' in line
    caplog.clear()
    save_hf(trained, tmp_path / 'merged', lora='merge')
    assert not [line for line in caplog.messages if 'changed the weights of' in line]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / 'merged')(input_ids=ids).logits
    assert torch.allclose(merged, expected, atol=1e-5)


# Adapters of other kinds


def adapted_by(kind: str, options: dict[str, Any]) -> Any:
    """A model with an adapter of a class of peft, whose trained tensors are not those that it was made with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(build('llama'), getattr(peft, kind)(task_type='CAUSAL_LM', **options))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


#: Of which peft writes tensors of the model.
OTHER_KINDS = {
    'PromptTuningConfig': dict(num_virtual_tokens=5),
    'PrefixTuningConfig': dict(num_virtual_tokens=5),
    'IA3Config': dict(target_modules=['k_proj', 'down_proj'], feedforward_modules=['down_proj']),
    'VeraConfig': dict(r=4, target_modules=['q_proj']),
    'LoHaConfig': dict(r=4, target_modules=['q_proj']),
    'LoKrConfig': dict(r=4, target_modules=['q_proj']),
    'LNTuningConfig': dict(),
}
#: What peft writes of others.
COMPUTED = {
    'P_TUNING': ('PromptEncoderConfig', dict(num_virtual_tokens=5, encoder_hidden_size=16)),
    'PREFIX_TUNING': ('PrefixTuningConfig', dict(num_virtual_tokens=5, prefix_projection=True, encoder_hidden_size=16)),
    'CPT': ('CPTConfig', dict(cpt_token_ids=[0, 1], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])),
    'ADALORA': ('AdaLoraConfig', dict(init_r=4, target_r=2, total_step=9, target_modules=['q_proj'])),
    'SHIRA': ('ShiraConfig', dict(r=2, target_modules=['q_proj'])),
}


@pytest.mark.parametrize('kind', [kind for kind in OTHER_KINDS if hasattr(peft, kind)])
def test_an_adapter_of_another_kind_is_pefts(kind, tmp_path):
    model = adapted_by(kind, OTHER_KINDS[kind])
    model.save_pretrained(tmp_path / 'expected')
    _, committed = save_folder(around(llm=model), tmp_path / 'hf_model')
    assert bytes_in(tmp_path / 'expected').items() <= bytes_in(committed.path).items()
    exporter = planned(around(llm=model))
    assert trained_of(exporter.left_out, around(llm=model)) == []
    assert 'merging needs adapters of LoRA' in refusal(around(llm=model), 'merge')


@pytest.mark.parametrize('kind', [kind for kind, (name, _) in COMPUTED.items() if hasattr(peft, name)])
def test_an_adapter_that_peft_computes_is_refused(kind):
    found = refusal(adapted_by(*COMPUTED[kind]))
    assert f'for an adapter of type {kind}, peft writes' in found and "peft's own save_pretrained" in found


# Several adapters


def with_reference(model: Any, **lora: Any) -> Any:
    """As TRL's DPO makes it of a model with a trained adapter: a frozen copy of it beside it."""
    config = model.peft_config['default']
    model.add_adapter('ref', LoraConfig(**lora) if lora else config)
    for name, parameter in model.named_parameters():
        if '.default.' in name and not lora:
            model.get_parameter(name.replace('.default.', '.ref.')).data.copy_(parameter.data)
    for active in ('ref', 'default'):  # at each step: first the reference, then what is trained
        model.set_adapter(active)
    return model


OTHER_MODULES = dict(target_modules=['k_proj', 'q_proj'], modules_to_save=['embed_tokens'])


def may_save_other_modules() -> bool:
    """Whether each adapter may save modules of its own: peft 0.7 then cannot activate either."""
    try:
        with_reference(adapted('llama', modules_to_save=['lm_head']), **OTHER_MODULES)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize('others', [{}, *[OTHER_MODULES] * may_save_other_modules()])
def test_an_inactive_adapter_beside_the_trained_one(others, tmp_path):
    options = dict(modules_to_save=['lm_head'])
    model = adapted('llama', **options)
    model.save_pretrained(tmp_path / 'adapter')
    merged_by_peft(model, tmp_path / 'merged')
    both = with_reference(adapted('llama', **options), **others)
    whole = around(llm=both)
    if any(one.requires_grad for name, one in whole.named_parameters() if 'original_module' in name):  # peft 0.13
        assert 'outside of the adapter would be lost' in refusal(whole)
        return
    _, committed = save_folder(whole, tmp_path / 'hf_model', lora='both')
    assert bytes_in(committed.path / 'adapter') == bytes_in(tmp_path / 'adapter')
    assert_same_folder_tensors(tmp_path / 'merged', committed.path)
    exporter = planned(whole)
    assert exporter.notes == ("only what is active is saved, ['default'], without the inactive adapters ['ref']",)
    frozen = {name for name, _ in whole.named_parameters() if '.ref.' in name}
    assert frozen and frozen <= set(exporter.left_out)


def with_second(first: dict[str, Any], second: dict[str, Any]) -> Any:
    """A second adapter, which is trained on top of a frozen first one; both are active."""
    task = dict(r=3, lora_alpha=5, task_type='CAUSAL_LM')
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(build('llama'), LoraConfig(**task, **first), adapter_name='first')
        model.add_adapter('second', LoraConfig(**task, **second))
        model.base_model.set_adapter(['first', 'second'])
        for name, parameter in model.named_parameters():
            if 'lora_' in name:
                parameter.data += 0.1 * torch.randn(parameter.shape)
            parameter.requires_grad_('.second' in name)
    return model


@pytest.mark.parametrize('first', [['q_proj', 'embed_tokens'], ['k_proj']])
def test_all_active_adapters_are_merged_and_saved(first, tmp_path):
    """On the same layers or on others; each in the folder into which peft writes it."""
    model = with_second(dict(target_modules=first), dict(target_modules=['q_proj', 'embed_tokens']))
    model.save_pretrained(tmp_path / 'adapters')
    merged_by_peft(model, tmp_path / 'merged')
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        logits = model(tokens).logits
    _, committed = save_folder(around(llm=model), tmp_path / 'hf_model', lora='both')
    assert_same_folder_tensors(tmp_path / 'merged', committed.path)
    assert_loads_clean(committed.path, type(model.get_base_model()))
    with torch.no_grad():
        assert torch.allclose(AutoModelForCausalLM.from_pretrained(committed.path)(tokens).logits, logits, atol=1e-5)
    for name in ('first', 'second'):
        folder = committed.path / 'adapter' / name
        assert bytes_in(tmp_path / 'adapters' / name).items() <= bytes_in(folder).items()
    assert not (committed.path / 'adapter' / 'adapter_config.json').exists()


@pytest.mark.skipif(not DORA, reason='this peft has no DoRA')
def test_two_active_adapters_that_cannot_be_merged():
    both = with_second(dict(target_modules=['q_proj']), dict(target_modules=['q_proj'], use_dora=True))
    assert "DoRA beside another active adapter cannot be merged: ['first', 'second']" in refusal(both, 'merge')
    planned(both)


def test_a_base_that_nothing_can_be_merged_into():
    quantized, merged = adapted('llama'), adapted('llama')
    quantized.get_base_model().quantization_method = 'bitsandbytes'  # what HfQuantizer.preprocess_model sets
    merged.merge_adapter()
    assert 'quantized (bitsandbytes)' in refusal(quantized, 'merge')
    assert 'already merged into the live model' in refusal(merged, 'merge')
    planned(quantized)  # the adapter alone


#: Families and options that peft's own merge_and_unload has, or gets wrong: it changes tied weights twice, or both.
MORE_MERGED: dict[str, tuple[str, dict[str, Any]]] = {
    'tied_embeddings': ('qwen2', dict(target_modules=['embed_tokens', 'q_proj'])),
    'tied_head': ('qwen2', dict(target_modules=['lm_head', 'q_proj'])),
    'tied_and_both_adapted': ('qwen2', dict(target_modules=['embed_tokens', 'lm_head'])),
    'tied_parameter': ('qwen2', dict(target_modules=[], target_parameters=['embed_tokens.weight'])),
    'trainable_tokens': ('llama', dict(trainable_token_indices=[1, 9])),
    'trainable_tokens_tied': ('qwen2', dict(trainable_token_indices={'embed_tokens': [1, 9]})),
    'lora_bias': ('qwen2', dict(lora_bias=True, target_modules=['q_proj', 'v_proj'])),
}


@pytest.mark.parametrize('kind', [kind for kind, (family, lora) in MORE_MERGED.items() if can_be_made(family, **lora)])
def test_what_is_merged_computes_as_in_training(kind, tmp_path):
    family, lora = MORE_MERGED[kind]
    model = adapted(family, **lora).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        logits = model(tokens).logits
    _, committed = save_folder(model, tmp_path / 'hf_model', lora='merge')
    assert_loads_clean(committed.path, type(model.get_base_model()))
    loaded = AutoModelForCausalLM.from_pretrained(committed.path)
    with torch.no_grad():
        assert torch.allclose(loaded(tokens).logits, logits, atol=1e-5)
    is_tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert is_tied == (kind in ('trainable_tokens_tied', 'lora_bias'))
    if 'tied' not in kind:
        merged_by_peft(model, tmp_path / 'merged')
        assert_same_folder_tensors(tmp_path / 'merged', committed.path)


UNMERGEABLE = {'mica': (dict(init_lora_weights='mica'), 'Linear is not supported as configured')}
if DORA:
    UNMERGEABLE['lora_bias_dora'] = (dict(lora_bias=True, **DORA), 'Linear is not supported as configured')


@pytest.mark.modern_only  # peft in XTuner's set can make none of them
@pytest.mark.parametrize('kind', [kind for kind, (lora, _) in UNMERGEABLE.items() if can_be_made('qwen2', **lora)])
def test_unmergeable(kind, tmp_path):
    lora, reason = UNMERGEABLE[kind]
    model = adapted('qwen2', **lora)
    found = refusal(model, 'merge')
    assert reason in found and "set lora to 'adapter'" in found
    save_folder(model, tmp_path / 'hf_model')
    model.save_pretrained(tmp_path / 'expected')
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')


# Adapters on parts


ADAPTED = {
    'llm': dict(language_model=dict(target_modules='all-linear')),
    'both': dict(
        language_model=dict(target_modules=['q_proj'], modules_to_save=['lm_head'], **DORA),
        vision_model=dict(target_modules=['q_proj', 'patch_embedding'], task_type=None),
    ),
}


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Transformers' copies of the code go to tmp_path, too."""
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    return tmp_path / 'internvl'


def with_adapters(base: Path, kind: str | None) -> PreTrainedModel:
    model = load_internvl(base)
    for name, lora in ADAPTED.get(kind, {}).items():
        setattr(model, name, adapt(getattr(model, name), **lora))
    return model


@pytest.mark.parametrize('kind', [None, *ADAPTED])
def test_whole_model_as_xtuner_converts_it(kind, base, tmp_path):
    """By its convert_to_official.py."""
    model = with_adapters(base, kind)
    merged = copy.deepcopy(model)
    for name in ADAPTED.get(kind, {}):
        setattr(merged, name, getattr(merged, name).merge_and_unload())
    merged.save_pretrained(tmp_path / 'expected')
    wrapped = around(model=model)
    assert type(exporter_for(wrapped, None)) is (HuggingFaceExporter if kind is None else NestedLoraExporter)
    _, committed = save_folder(wrapped, tmp_path / 'hf_model')
    assert_same_folder_tensors(tmp_path / 'expected', committed.path)
    assert not any('lora_' in name or 'base_model' in name for name in folder_tensors(committed.path))
    assert set(CODE) <= {path.name for path in committed.path.iterdir()}

    shutil.rmtree(base)  # the new folder must be enough
    loaded, report = AutoModel.from_pretrained(committed.path, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values())
    assert type(loaded).__name__ == 'TinyInternVLModel'


def test_merge_is_all_that_there_is(base):
    model = around(model=with_adapters(base, 'both'))
    assert type(exporter_for(model, None, lora='merge')) is NestedLoraExporter
    for lora in ('adapter', 'both'):
        with pytest.raises(OptionError, match=r"None or 'merge', because TinyInternVLModel has adapters on") as caught:
            exporter_for(model, None, lora=lora)
        assert caught.value.option == 'lora'


def test_quantized_is_refused(base):
    model = around(model=with_adapters(base, 'llm'))
    model.model.quantization_method = 'bitsandbytes'
    with pytest.raises(ModelError, match=r'quantized \(bitsandbytes\).* set quantization_llm'):
        exporter_for(model, None)
