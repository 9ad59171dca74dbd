"""Which model is exported, under which names, and what is refused before anything is gathered."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import GatedRepoError
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from tests.helpers.models.adapted import around, planned
from tests.helpers.models.own_classes import CounterConfig, CounterModel
from tests.helpers.models.zoo import build
from xhf_hooks import save_hf
from xhf_hooks.errors import AgreedError, BaseModelError, ModelError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.assets.find_tokenizer import find_tokenizer
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.planning.types import ExportEntry


def entries_of(model: nn.Module, module: str | None = None, dtype: str | None = None) -> list[ExportEntry]:
    return [*planned(model, dtype, module).entries]


def saved_tensors(model: PreTrainedModel, folder) -> dict[str, tuple[tuple[int, ...], str]]:
    model.save_pretrained(folder)
    with safe_open(folder / 'model.safetensors', 'pt') as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    return {name: (tuple(t.shape), dtype_code(t.dtype)) for name, t in tensors.items()}


def kinds(entries: list[ExportEntry]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {entry.hf_name: (entry.shape, entry.dtype) for entry in entries}


def test_names_outside_are_not_cut_and_are_not_in_the_model(tmp_path):
    """XTuner's own hook strips four characters of every name. What is tied to a tensor outside is read there."""
    llm = build('llama')
    tied = nn.Embedding(*llm.model.embed_tokens.weight.shape)
    tied.weight = llm.model.embed_tokens.weight
    frozen = nn.Linear(3, 3).requires_grad_(False)
    model = around(a=tied, llm_extra=nn.Linear(3, 3), projector=nn.Linear(3, 3), llm=llm, llm_frozen=frozen)
    others = [entry for entry in entries_of(model) if entry.file_set.folder]
    assert [entry.hf_name for entry in others] == [
        'llm_extra.weight',
        'llm_extra.bias',
        'projector.weight',
        'projector.bias',
    ]
    entries = [entry for entry in entries_of(model) if not entry.file_set.folder]
    assert kinds(entries) == saved_tensors(llm, tmp_path)
    reads = {entry.hf_name: entry.reads for entry in entries}
    assert reads.pop('model.embed_tokens.weight') == ('a.weight',)
    assert reads == {name: (f'llm.{name}',) for name in reads}
    assert planned(model).left_out == ['llm_frozen.weight', 'llm_frozen.bias']


def test_undeclared_tie_is_written_under_both_names():
    model = build('llama')
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    reads = {entry.hf_name: entry.reads for entry in entries_of(model)}
    shared = ('model.layers.0.mlp.up_proj.weight',)
    assert reads['model.layers.0.mlp.up_proj.weight'] == reads['model.layers.1.mlp.up_proj.weight'] == shared


@pytest.mark.parametrize('dtype', [None, 'BF16', 'F32'])
def test_ignored_tensors_stay_out_and_floats_alone_are_cast(dtype, tmp_path):
    model = CounterModel(CounterConfig())
    saved = saved_tensors(model, tmp_path)
    assert saved.keys() == {'weight', 'mean', 'steps', 'mask'}
    expected = {n: (shape, (dtype or code) if code.startswith('F') else code) for n, (shape, code) in saved.items()}
    assert kinds(entries_of(model, dtype=dtype)) == expected


def extended(model: nn.Module) -> None:
    model.extra = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(9)])


def with_add_adapter(model: nn.Module) -> None:
    model.add_adapter(LoraConfig(r=2, target_modules=['q_proj']))


def injected(model: nn.Module) -> None:
    inject_adapter_in_model(LoraConfig(r=2, target_modules=['q_proj']), model)


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        (lambda m: setattr(m.model, 'norm', nn.Identity()), r"LlamaForCausalLM.*'llm'.*: 1 missing: model\.norm\.w"),
        (
            lambda m: m.model.layers[1].mlp.__setattr__('up_proj', nn.Linear(35, 9, bias=False)),
            r'weight \(9, 35\), expected',
        ),
        (extended, r'unexpected: extra\.0.*and 4 more'),
        (injected, 'train the PeftModel that get_peft_model makes'),
        (with_add_adapter, 'with add_adapter, save_pretrained of transformers writes the adapter alone'),
        (
            lambda m: setattr(m, 'quantization_method', 'bitsandbytes'),
            'LlamaForCausalLM is quantized .*xhf-convert WORK_DIR OUT --lora merge',
        ),
    ],
)
def test_a_model_that_would_not_load(change, said):
    model = build('llama')
    change(model)
    with pytest.raises(ModelError, match=said):
        entries_of(around(llm=model))


TWO = around(actor=build('llama'), critic=build('bert'))


@pytest.mark.parametrize(
    ('model', 'module', 'said'),
    [
        (TWO, None, r"2 Hugging Face models: \['actor', 'critic'\].* option module"),
        (around(head=nn.Linear(2, 2)), None, r"is no PreTrainedModel .*holds none.*\['head'\].*extending.md"),
        (TWO, 'nothing', r"option module.*'nothing'.*\['actor', 'critic'\]"),
        (TWO, 'actor.lm_head', 'Linear'),
    ],
)
def test_which_one_is_asked(model, module, said):
    with pytest.raises(ModelError, match=said):
        exporter_for(model, module)


def refused_by_the_hub(pretrained_model_name_or_path: str) -> None:
    """As ``from_pretrained`` raises it."""
    response = SimpleNamespace(headers={}, request=None, status_code=403, json=dict, text='')
    raise OSError('You are trying to access a gated repo.') from GatedRepoError(
        'Access is\nrestricted', response=response
    )


@pytest.mark.parametrize(
    ('name', 'kind', 'reason'),
    [
        ('path/of/the/base', 'transformers.AutoTokenizer.from_pretrained', ''),
        ('nobody/nothing', 'transformers.AutoTokenizer.from_pretrained', ' (LocalEntryNotFoundError: '),
        ('nobody/gated', refused_by_the_hub, ' (GatedRepoError: Access is restricted'),
    ],
)
def test_a_recipe_of_a_tokenizer_that_is_nowhere_is_one_line(name, kind, reason):
    exporter = exporter_for(build('llama'), None)
    with pytest.raises(BaseModelError) as told:
        find_tokenizer(None, dict(type=kind, pretrained_model_name_or_path=name), exporter)
    said = f"tokenizer of the config ('{name}'): no such folder and not in the cache; set it to the base model's folder"
    found = str(told.value)
    assert found.startswith(said + reason) and (reason or found == said) and '\n' not in found
    assert told.value.__cause__ is None and told.value.__suppress_context__


POOLER = ('pooler.dense.weight', 'pooler.dense.bias')


@pytest.mark.parametrize(
    ('name', 'arguments', 'told'),
    [
        ('Bert', dict(add_pooling_layer=False), f'initialised at random: {", ".join(POOLER)}'),
        ('XLMRoberta', dict(add_pooling_layer=False), f'initialised at random: {", ".join(POOLER)}'),
        ('ViT', dict(add_pooling_layer=False, use_mask_token=True), 'not loaded: embeddings.mask_token'),
    ],
)
def test_arguments_that_the_config_does_not_hold(name, arguments, told, tmp_path, caplog):
    """As text and image encoders are built for retrieval: the folder loads with the same arguments."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37)
    config = getattr(transformers, f'{name}Config')(vocab_size=131, image_size=8, patch_size=4, **sizes)
    kind = getattr(transformers, f'{name}Model')
    model = kind(config, **arguments)
    save_hf(model, tmp_path / 'found')
    given = ', '.join(f'{argument}={value}' for argument, value in arguments.items())
    warning = next(line for line in caplog.messages if 'which config.json does not hold' in line)
    assert f'{name}Model was built with {given}, which' in warning and told in warning
    assert f'from_pretrained(..., {given})' in warning
    assert saved_tensors(model, tmp_path / 'expected') == saved_tensors(
        kind.from_pretrained(tmp_path / 'found', **arguments), tmp_path / 'again'
    )
    _, problems = kind.from_pretrained(tmp_path / 'found', output_loading_info=True, **arguments)
    assert not problems['missing_keys'] and not problems['unexpected_keys']


def test_layers_that_are_offloaded_are_named(tmp_path):
    model = build('llama')
    model.model.layers[1].to('meta')
    with pytest.raises(AgreedError, match=r'9 tensors on the meta device, .*: model\.layers\.1\.self_attn.*device_map'):
        save_hf(model, tmp_path / 'saved')
    assert not (tmp_path / 'saved').exists()


@pytest.mark.parametrize('file', ['config', 'generation_config'])
def test_fields_that_json_does_not_have_are_named(file, tmp_path):
    model = build('llama')
    getattr(model, file).curve = np.arange(3)
    with pytest.raises(
        AgreedError, match=rf'{file}\.json cannot hold curve \(ndarray\) of the {file} of LlamaForCausalLM'
    ):
        save_hf(model, tmp_path / 'saved')
