"""A LoRA adapter goes out as peft writes it, alone or beside the merged model; the live model is only read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.adapted import KINDS, adapt, adapted, adapter_kinds, around, merged_by_peft, refusal
from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.engines import names_read, save_folder
from tests.helpers.zoo import build
from xhf_hooks.errors import AgreedError, ModelError
from xhf_hooks.exporters import HuggingFaceExporter, LoraExporter, exporter_for
from xhf_hooks.sources import source_for

MANIFEST = 'xhf_manifest.json'
BF16 = torch.bfloat16

#: Where peft saves base weights, too: it takes an adapted embedding for one that may have been resized.
PEFT_SAVES_EMBEDDINGS = ('embedding', 'embedding_dora')


def in_adapter(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# The adapter


@pytest.mark.parametrize('dtype', [None, BF16], ids=['fp32', 'bf16'])
@pytest.mark.parametrize('kind', adapter_kinds())
def test_adapter_is_the_folder_of_save_pretrained(kind, dtype, tmp_path):
    family, lora = KINDS[kind]
    model = adapted(family, dtype, **lora)
    model.save_pretrained(tmp_path / 'expected')
    plan, committed = save_folder(around(llm=model), tmp_path / 'hf_model')
    expected = {path.name: path.read_bytes() for path in (tmp_path / 'expected').iterdir()}
    found = {path.name: path.read_bytes() for path in committed.path.iterdir() if path.name != MANIFEST}
    assert found == expected
    of_base = names_read(plan) - {f'llm.{name}' for name in in_adapter(model)}
    assert all('embed' in name or 'lm_head' in name for name in of_base)
    assert bool(of_base) == (kind in PEFT_SAVES_EMBEDDINGS)
    assert len(names_read(plan)) == len(folder_tensors(committed.path))


def test_adapter_is_the_default(tmp_path):
    model = adapted('llama')
    plans = [save_folder(model, tmp_path / str(lora), lora=lora)[0] for lora in (None, 'adapter')]
    assert plans[0].digest == plans[1].digest


def test_adapter_loads_onto_its_base(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    build('llama').save_pretrained(tmp_path / 'base')
    model = adapt(AutoModelForCausalLM.from_pretrained(tmp_path / 'base'))
    _, committed = save_folder(model, tmp_path / 'hf_model')
    assert not committed.warnings
    assert json.loads((committed.path / 'adapter_config.json').read_text())['base_model_name_or_path'] == str(
        tmp_path / 'base'
    )
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / 'base'), committed.path)
    tokens = torch.tensor([[1, 5, 9]])
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


def test_resized_vocabulary_goes_with_the_adapter(tmp_path):
    from transformers import AutoModelForCausalLM

    build('llama').save_pretrained(tmp_path / 'base')
    base = AutoModelForCausalLM.from_pretrained(tmp_path / 'base')
    base.resize_token_embeddings(137)
    model = adapt(base)
    model.save_pretrained(tmp_path / 'expected')
    _, committed = save_folder(model, tmp_path / 'hf_model')
    names = folder_tensors(committed.path)
    assert {n for n in names if 'lora_' not in n} == {
        'base_model.model.model.embed_tokens.weight',
        'base_model.model.lm_head.weight',
    }
    assert_same_folder_tensors(tmp_path / 'expected', committed.path)
    save_folder(model, tmp_path / 'merged', lora='merge')
    assert_loads_clean(tmp_path / 'merged', type(base))
    assert json.loads((tmp_path / 'merged' / 'config.json').read_text())['vocab_size'] == 137


def test_adapter_of_another_name(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build('llama'), LoraConfig(target_modules=['q_proj']), adapter_name='mine')
    model.save_pretrained(tmp_path / 'expected')
    _, committed = save_folder(model, tmp_path / 'hf_model')
    assert_same_folder_tensors(tmp_path / 'expected' / 'mine', committed.path)
    save_folder(model, tmp_path / 'merged', lora='merge')
    merged_by_peft(model, tmp_path / 'expected_merged')
    assert_same_folder_tensors(tmp_path / 'expected_merged', tmp_path / 'merged')


def test_adapter_is_never_split(tmp_path):
    plan, _ = save_folder(adapted('llama'), tmp_path / 'hf_model', max_shard_size=100)
    assert [file.name for file in plan.files] == ['adapter_model.safetensors'] and plan.indexes == {}


def test_adapter_in_another_dtype(tmp_path):
    model = adapted('llama')
    save_folder(model, tmp_path / 'hf_model', dtype='bfloat16')
    model.save_pretrained(tmp_path / 'expected')
    found, trained = folder_tensors(tmp_path / 'hf_model'), folder_tensors(tmp_path / 'expected')
    assert all(torch.equal(found[name], tensor.to(BF16)) for name, tensor in trained.items())


def test_both(tmp_path):
    model = adapted('llama')
    model.save_pretrained(tmp_path / 'adapter')
    merged_by_peft(model, tmp_path / 'merged')
    plan, committed = save_folder(model, tmp_path / 'hf_model', lora='both', max_shard_size=20_000)
    assert_same_folder_tensors(tmp_path / 'merged', committed.path)
    assert_same_folder_tensors(tmp_path / 'adapter', committed.path / 'adapter')
    assert {path.name for path in (committed.path / 'adapter').iterdir()} == {
        path.name for path in (tmp_path / 'adapter').iterdir()
    }
    loaded = assert_loads_clean(committed.path, type(model.get_base_model()))
    assert not any('lora_' in name for name in loaded.state_dict())
    assert list(plan.indexes) == ['model.safetensors.index.json']


def test_tokenizer_goes_beside_the_weights_once(tmp_path):
    class Tokenizer:
        def save_pretrained(self, folder):
            (Path(folder) / 'tokenizer.json').touch()

    for lora in ('adapter', 'merge', 'both'):
        folder = tmp_path / lora
        folder.mkdir()
        exporter = exporter_for(adapted('llama'), None, lora=lora)
        exporter.entries(source_for(adapted('llama')).specs(), None)
        exporter.write_hf_assets(folder, Tokenizer(), ())
        assert [path.parent for path in folder.rglob('tokenizer.json')] == [folder]


# The live model is read-only


@pytest.mark.parametrize('lora', ['adapter', 'merge', 'both'])
def test_live_model_is_untouched(lora, tmp_path):
    model = adapted('qwen2', use_dora=True, modules_to_save=['lm_head'])
    model.peft_config['default'].base_model_name_or_path = None
    config, peft_config = model.config.to_dict(), model.peft_config['default'].to_dict()
    weights = {name: (t, t.clone(), t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()}
    modules = list(model.modules())
    save_folder(model, tmp_path / 'hf_model', lora=lora)
    assert model.config.to_dict() == config
    assert model.peft_config['default'].to_dict() == peft_config
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(weights)
    for name, (tensor, value, requires_grad) in weights.items():
        assert after[name] is tensor and torch.equal(tensor, value) and tensor.requires_grad == requires_grad
    assert all(now is before for now, before in zip(model.modules(), modules, strict=True))


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


def test_a_whole_llm_goes_before_an_adapter_elsewhere():
    model = around(visual=adapted('llama'), llm=build('llama'))
    assert type(exporter_for(model, None)) is HuggingFaceExporter
    assert type(exporter_for(model, 'visual')) is LoraExporter


def test_what_is_outside_is_left_out(tmp_path):
    model = around(llm=adapted('llama'), projector=nn.Linear(2, 2))
    for lora, n_left in [('adapter', 2 + len(build('llama').state_dict())), ('merge', 2), ('both', 2)]:
        exporter = exporter_for(model, None, lora=lora)
        exporter.entries(source_for(model).specs(), None)
        assert len(exporter.left_out) == n_left
        assert {'projector.weight', 'projector.bias'} <= set(exporter.left_out)


# What is refused


@pytest.mark.parametrize('lora', ['adapter', 'merge', 'both'])
def test_no_adapter(lora):
    assert 'option lora: expected None, because HuggingFaceExporter, which exports this LlamaForCausalLM' in refusal(
        build('llama'), lora
    )


@pytest.mark.parametrize('lora', ['adapter', 'merge', 'both'])
def test_nothing_trained(lora):
    assert "'default' at 'the root' has no trainable tensors" in refusal(adapted('llama').requires_grad_(False), lora)


def test_trained_outside_the_adapter(tmp_path):
    model = adapted('llama')
    model.get_base_model().lm_head.requires_grad_(True)
    found = refusal(model)
    assert "['base_model.model.lm_head.weight']" in found and 'modules_to_save' in found
    save_folder(model, tmp_path / 'hf_model', lora='merge')
    assert torch.equal(folder_tensors(tmp_path / 'hf_model')['lm_head.weight'], model.get_base_model().lm_head.weight)


def test_base_model_is_gone(tmp_path):
    model = adapted('llama')
    model.peft_config['default'].base_model_name_or_path = str(tmp_path / 'gone')
    assert f'the base model {tmp_path / "gone"} is missing' in refusal(model)


def test_base_model_has_another_vocabulary(tmp_path):
    """peft saves resized embeddings where the config tells of them; here it does not."""
    build('llama').save_pretrained(tmp_path / 'base')
    model = adapted('llama')
    model.peft_config['default'].base_model_name_or_path = str(tmp_path / 'base')
    save_folder(model, tmp_path / 'hf_model')
    model.get_base_model().model.embed_tokens = nn.Embedding(137, 35)
    model.get_base_model().model.embed_tokens.requires_grad_(False)
    found = refusal(model)
    assert 'has 131 tokens, but the trained model has embeddings for 137' in found and 'modules_to_save' in found


def test_base_model_is_not_recorded(tmp_path):
    _, committed = save_folder(adapted('llama'), tmp_path / 'hf_model')
    assert any('has no base_model_name_or_path' in warning for warning in committed.warnings)


def test_another_kind_of_adapter():
    from peft import IA3Config, get_peft_model

    config = IA3Config(target_modules=['k_proj', 'down_proj'], feedforward_modules=['down_proj'])
    assert "one adapter of type LORA, found {'default': 'IA3'}" in refusal(get_peft_model(build('llama'), config))


def test_two_adapters():
    from peft import LoraConfig

    model = adapted('llama')
    model.add_adapter('other', LoraConfig(target_modules=['q_proj']))
    assert "{'default': 'LORA', 'other': 'LORA'}" in refusal(model)


def test_errors_come_before_training(tmp_path):
    with pytest.raises(AgreedError, match=r"stage 'plan' failed on rank 0: OptionError: option lora"):
        save_folder(build('llama'), tmp_path / 'hf_model', lora='merge')
    assert not (tmp_path / 'hf_model').exists()
