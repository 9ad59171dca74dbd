"""Every kind of adapter: what xhf-convert makes of a checkpoint is what the hook wrote of the live model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.models.adapted import KINDS, adapt, is_known_to_peft
from tests.helpers.models.families import MODELS
from tests.helpers.models.model_folder import save_tokenizer
from tests.helpers.models.zoo import build
from xhf_hooks import save_hf
from xhf_hooks.cli.convert import main
from xhf_hooks.meta_model.frozen import dtype_of_frozen
from xhf_hooks.meta_model.run_config import RunConfig
from xhf_hooks.sources.stored_tensors import StoredTensor

INITS = ('pissa', 'olora', 'pissa_niter_2')


def run_of(root: Path, family: str, *, trained_alone: bool, dtype: Any = None, n_rows: int = 0, **lora: Any) -> Any:
    """A live model from ``root/base`` and, of it, ``root/run/iter_2.pth`` beside its adapter_config.json."""
    built = build(family, models=MODELS)
    built.save_pretrained(root / 'built')
    type(built).from_pretrained(root / 'built').save_pretrained(
        root / 'base'
    )  # with dtypes of its parts, as on the Hub
    save_tokenizer(root / 'base', 131)
    options = {} if dtype is None else {'torch_dtype': dtype}
    model = type(built).from_pretrained(root / 'base', **options)
    if n_rows:
        model.resize_token_embeddings(n_rows, mean_resizing=False)
    live = adapt(model, **lora)
    (root / 'run').mkdir()
    names = {n for n, p in live.named_parameters(remove_duplicate=False) if p.requires_grad or not trained_alone}
    names |= set() if trained_alone else set(live.state_dict())
    torch.save({'state_dict': {n: t for n, t in live.state_dict().items() if n in names}}, root / 'run' / 'iter_2.pth')
    live.peft_config['default'].save_pretrained(root / 'run')
    return live


def assert_as_the_hook(live: Any, root: Path, mode: str) -> None:
    try:
        save_hf(live, root / f'hook_{mode}', lora=mode)
    except Exception:  # what cannot be merged live cannot be merged later
        assert main([str(root / 'run' / 'iter_2.pth'), str(root / mode), '--lora', mode]) == 2
        return
    assert_same_files(convert(root / 'run' / 'iter_2.pth', root / mode, '--lora', mode), root / f'hook_{mode}')


@pytest.mark.parametrize('kind', KINDS)
def test_every_kind_of_adapter(kind, tmp_path):
    if not is_known_to_peft(kind):
        return
    family, lora = KINDS[kind]
    live = run_of(tmp_path, family, trained_alone=True, **lora)
    for mode in ('adapter', 'both'):
        assert_as_the_hook(live, tmp_path, mode)


@pytest.mark.parametrize('init', INITS)
def test_an_init_that_edits_the_base_is_not_merged_into_the_base_of_before(tmp_path, capsys, init):
    live = run_of(tmp_path, 'llama', trained_alone=True, init_lora_weights=init)
    checkpoint = str(tmp_path / 'run' / 'iter_2.pth')
    for mode in ('merge', 'both'):
        assert main([checkpoint, str(tmp_path / 'out'), '--lora', mode]) == 2
        assert f'init_lora_weights={init!r}' in (said := capsys.readouterr().err) and str(tmp_path / 'base') in said
        assert not (tmp_path / 'out').exists()
    assert_as_the_hook(live, tmp_path, 'adapter')
    assert f'{tmp_path / "base"} before training' in capsys.readouterr().err


def test_an_edited_base_in_the_checkpoint_is_merged(tmp_path):
    live = run_of(tmp_path, 'llama', trained_alone=False, init_lora_weights='pissa')
    for mode in ('adapter', 'both'):
        assert_as_the_hook(live, tmp_path, mode)


@pytest.mark.parametrize('family', ['llama', 'qwen2'])
def test_resized_embeddings_are_written_as_by_peft(tmp_path, family):
    live = run_of(tmp_path, family, trained_alone=False, n_rows=140)
    for mode in ('adapter', 'both'):
        assert_as_the_hook(live, tmp_path, mode)
    assert any('embed_tokens' in name for name in folder_tensors(tmp_path / 'adapter'))


@pytest.mark.parametrize('family', ['llama', 'qwen2'])
def test_resized_embeddings_that_only_the_adapter_file_has(tmp_path, family):
    """As Trainer leaves it: its rank files have nothing that is frozen."""
    live = run_of(tmp_path, family, trained_alone=True, n_rows=140)
    live.save_pretrained(tmp_path / 'run')
    for mode in ('adapter', 'both'):
        assert_as_the_hook(live, tmp_path, mode)


def test_a_merge_without_deepspeed_has_the_dtype_of_training(tmp_path, capsys):
    live = run_of(tmp_path, 'llama', trained_alone=True, dtype=torch.bfloat16)
    checkpoint = tmp_path / 'run' / 'iter_2.pth'
    # peft makes the adapter in fp32, so nothing tells
    convert(checkpoint, tmp_path / 'untold', '--lora', 'merge')
    assert 'nothing tells in which dtype training had the frozen weights' in capsys.readouterr().err
    state = torch.load(checkpoint)
    state['state_dict']['base_model.model.model.norm.weight'] = live.state_dict()['base_model.model.model.norm.weight']
    torch.save(state, checkpoint)
    assert_as_the_hook(live, tmp_path, 'merge')
    assert 'nothing tells' not in capsys.readouterr().err


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
    assert dtype_of_frozen(config, stored, []) == expected
