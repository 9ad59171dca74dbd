"""Every kind of adapter: what xhf-convert makes of a checkpoint is what the hook wrote of the live model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.converted import (
    assert_converted_as_by_the_hook,
    base_of,
    checkpoint_of,
    config_of,
    convert,
    refused,
)
from tests.helpers.models.adapted import KINDS, adapt, is_known_to_peft
from tests.helpers.models.families import MODELS
from tests.helpers.models.installed_peft import INITS, saves_resized_embeddings
from tests.helpers.models.model_folder import resize_embeddings, save_tokenizer
from tests.helpers.models.zoo import available
from tests.helpers.runs.made_checkpoint import MadeCheckpoint
from tests.helpers.tiers import split_tiers
from xhf_hooks import save_hf
from xhf_hooks.offline.model.freeze_modules import dtype_of_frozen
from xhf_hooks.offline.model.run_config import RunConfig
from xhf_hooks.sources.stored_tensors import StoredTensor

#: Whose base's files have other names than the model in memory, or fused experts.
FAMILIES = [name for name in ('qwen2_vl', 'gemma3', 'glm4_moe', 'ernie4_5_vl_moe') if available(name)]


def adapted_of(base: Path, family: str, *, n_rows: int = 0, dtype: Any = None, **lora: Any) -> Any:
    """A live model of a base that has a tokenizer."""
    save_tokenizer(base_of(family, base), 131)
    options = {} if dtype is None else {'torch_dtype': dtype}
    model = getattr(transformers, MODELS[family][0]).from_pretrained(base, **options)
    if n_rows:
        resize_embeddings(model, n_rows)
    return adapt(model, **lora)


@pytest.mark.parametrize('kind', split_tiers([*filter(is_known_to_peft, KINDS), *FAMILIES], 3))
def test_every_kind_of_adapter(kind, tmp_path):
    family, lora = KINDS.get(kind, (kind, {}))
    live = adapted_of(tmp_path / 'base', family, **lora)
    assert_converted_as_by_the_hook(checkpoint_of(live, tmp_path / 'run'), live, tmp_path, 'adapter', 'both')


@pytest.mark.parametrize('init', [init for init in INITS if init != 'gaussian'])
def test_an_init_that_edits_the_base_is_not_merged_into_the_base_of_before(tmp_path, capsys, init):
    live = adapted_of(tmp_path / 'base', 'llama', init_lora_weights=init)
    checkpoint = checkpoint_of(live, tmp_path / 'run')
    for mode in ('merge', 'both'):
        line = refused(capsys, checkpoint, tmp_path / 'out', '--lora', mode)
        assert f'init_lora_weights={init!r}' in line and str(tmp_path / 'base') in line
    assert_converted_as_by_the_hook(checkpoint, live, tmp_path, 'adapter')
    assert f'{tmp_path / "base"} before training' in capsys.readouterr().err


@pytest.mark.skipif('pissa' not in INITS, reason='this peft has no init that edits the base')
def test_an_edited_base_in_the_checkpoint_is_merged(tmp_path):
    live = adapted_of(tmp_path / 'base', 'llama', init_lora_weights='pissa')
    assert_converted_as_by_the_hook(
        checkpoint_of(live, tmp_path / 'run', whole=True), live, tmp_path, 'adapter', 'both'
    )


@pytest.mark.skipif(not saves_resized_embeddings(), reason='this peft does not save resized embeddings')
@pytest.mark.parametrize('whole', [True, False])
@pytest.mark.parametrize('family', ['llama', 'llama_tied'])
def test_resized_embeddings_are_written_as_by_peft(tmp_path, family, whole):
    """Trainer's rank files have nothing that is frozen: then only the adapter's file has them."""
    live = adapted_of(tmp_path / 'base', family, n_rows=140)
    checkpoint = checkpoint_of(live, tmp_path / 'run', whole=whole)
    if not whole:
        live.save_pretrained(tmp_path / 'run')
    assert_converted_as_by_the_hook(checkpoint, live, tmp_path, 'adapter', 'both')
    assert any('embed_tokens' in name for name in folder_tensors(tmp_path / 'adapter'))


def test_a_merge_without_deepspeed_has_the_dtype_of_training(tmp_path, capsys):
    live = adapted_of(tmp_path / 'base', 'llama', dtype=torch.bfloat16)
    for parameter in live.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    checkpoint = checkpoint_of(live, tmp_path / 'run')
    # the adapter is in fp32, as peft makes it since 0.12: so nothing shows it
    convert(checkpoint, tmp_path / 'untold', '--lora', 'merge')
    assert 'the dtype of the frozen weights during training is unknown' in capsys.readouterr().err
    state = torch.load(checkpoint)
    state['state_dict']['base_model.model.model.norm.weight'] = live.state_dict()['base_model.model.model.norm.weight']
    torch.save(state, checkpoint)
    assert_converted_as_by_the_hook(checkpoint, live, tmp_path, 'merge')
    assert 'is unknown' not in capsys.readouterr().err


@pytest.mark.parametrize(
    ('llm', 'adapter', 'expected'),
    [
        ({'torch_dtype': 'torch.float16'}, 'F32', 'F16'),
        ({'torch_dtype': 'auto'}, 'F32', None),
        ({}, 'BF16', 'BF16'),
        ({}, 'F32', None),
    ],
)
def test_the_dtype_of_frozen_weights_that_are_nowhere(llm, adapter, expected):
    stored = {'llm.lora_A.default.weight': StoredTensor('x', (1,), adapter, (torch.ones(1),))}
    config = RunConfig('run.py', {'model': {'type': 'xtuner.model.SupervisedFinetune', 'llm': llm}})
    adapted = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=['0']))
    assert dtype_of_frozen(adapted, config, stored, None) == expected


def _lisa(base: Path) -> Any:
    """A model with modules of its own, of which transformers knows nothing, as LISA's decoder of masks."""

    class OwnLlamaForCausalLM(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.mask_decoder = torch.nn.Linear(8, 3)
            self.model.text_hidden_fcs = torch.nn.ModuleList([torch.nn.Linear(config.hidden_size, 8)])

    return OwnLlamaForCausalLM.from_pretrained(base)


#: What is trained outside of the adapter, by parts of its names.
OUTSIDE = {'heads': ('lm_head', 'embed_tokens'), 'all': ('lm_head', 'embed_tokens', 'mask_decoder', 'text_hidden_fcs')}


@pytest.mark.parametrize('outside', OUTSIDE)
@pytest.mark.parametrize('layout', ['deepspeed', 'file'])
def test_what_is_trained_outside_of_the_adapter(outside, layout, tmp_path, capsys):
    """Merged as by the hook. The adapter alone would lose it, which the hook refuses; a file does not say so."""
    save_tokenizer(base_of('llama', tmp_path / 'base'), 131)
    live = adapt(_lisa(tmp_path / 'base'), dtype=torch.float16)
    for name, parameter in live.named_parameters():
        if any(part in name for part in OUTSIDE[outside]):
            parameter.requires_grad_(True).data += 0.5
    trained = {name for name, p in live.named_parameters() if p.requires_grad}
    save_hf(live, tmp_path / 'hook', lora='merge')
    state = live.state_dict()
    if layout == 'file':
        checkpoint = checkpoint_of(live, tmp_path / 'run', whole=True)
    else:
        masters = {name: tensor.float() for name, tensor in state.items() if name in trained}
        frozen = {name: tensor for name, tensor in state.items() if name not in trained}
        checkpoint = MadeCheckpoint(masters=masters, frozen=frozen, stage=2).write(tmp_path / 'run' / 'global_step5')
        live.peft_config['default'].save_pretrained(tmp_path / 'run')
    out = convert(checkpoint, tmp_path / 'out', '--lora', 'merge')
    assert_same_folder_tensors(out, tmp_path / 'hook')
    assert config_of(out) == config_of(tmp_path / 'hook')
    assert 'mask_decoder.weight' in capsys.readouterr().err
    if layout == 'deepspeed' or outside == 'all':
        line = refused(capsys, checkpoint, tmp_path / 'none', '--lora', 'adapter')
        assert 'trained tensors outside of the adapter would be lost' in line
