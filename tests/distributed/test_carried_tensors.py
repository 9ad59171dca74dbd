"""Tensors of the base that the trained class does not load go into saves and conversions, byte for byte."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.models.adapted import adapt
from tests.helpers.models.zoo import build
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import open_run, save_folder, train_one_step, zero_engine
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks import save_hf
from xhf_hooks.errors import XhfError
from xhf_hooks.offline.commands.verify import main as verify

#: As of DeepSeek-V3, whose extra layer is in 8 bits with scales, and of MiMo.
CARRIED = {
    'model.layers.61.mlp.weight': torch.linspace(-2, 2, 48).view(6, 8).to(torch.float8_e4m3fn),
    'model.layers.61.mlp.weight_scale_inv': torch.tensor([[0.125]]),
    'model.mtp_layers.0.proj.weight': torch.randn(1500, 1500, generator=torch.Generator().manual_seed(7)),
    'model.mtp_layers.0.norm.weight': torch.linspace(0, 1, 7).bfloat16(),
    'model.mtp_layers.0.empty': torch.empty(0, 3),
}
WAYS: dict[str, dict[str, Any]] = {
    'positional': dict(writer='positional'),
    'stream_in_background': dict(writer='stream', in_background=True),
    'gather': dict(writer='gather'),
}
IN_SHARDS: dict[str, dict[str, Any]] = {
    'positional_in_background_in_shards': dict(writer='positional', in_background=True, max_shard_size=20_000),
    'parallel_in_shards': dict(writer='parallel', max_shard_size=20_000),
    'gather_in_shards': dict(writer='gather', max_shard_size=20_000),
}


def make_base(folder: Path) -> None:
    model = build('llama').bfloat16()
    model.save_pretrained(folder, max_shard_size=30_000)
    save_file(CARRIED, folder / 'mtp.safetensors', {'format': 'pt'})
    path = folder / 'model.safetensors.index.json'
    index = json.loads(path.read_text())
    index['weight_map'].update(dict.fromkeys(CARRIED, 'mtp.safetensors'))
    path.write_text(json.dumps(index))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def save_all(root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / 'base', torch_dtype=torch.bfloat16)
    engine = zero_engine(model, stage=3)
    train_one_step(engine)
    save_folder(engine.module, root / 'without')
    for way, how in {**WAYS, **IN_SHARDS}.items():
        save_folder(engine.module, root / way, carry_base='all', verify='full', **how)
    engine.save_checkpoint(str(root / 'checkpoint'))
    engine.destroy()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('carried')
    make_base(root / 'base')
    return run_scenarios({'saves': partial(save_all, root)}, 2, root=root)


@pytest.mark.parametrize('way', [*WAYS, *IN_SHARDS])
def test_the_folder_has_the_bytes_of_the_base_and_of_the_trained_model(saved, way, capsys):
    check(saved, 'saves')
    folder = saved.root / way
    found, without = folder_tensors(folder), folder_tensors(saved.root / 'without')
    assert found.keys() == without.keys() | CARRIED.keys() and not CARRIED.keys() & without.keys()
    base = load_file(saved.root / 'base' / 'mtp.safetensors')
    for name, tensor in found.items():
        expected = base[name] if name in CARRIED else without[name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        assert raw(tensor) == raw(expected), name
    assert_same_files(folder, saved.root / ('gather_in_shards' if way in IN_SHARDS else 'gather'))
    assert verify([str(folder), '--load']) == 0, capsys.readouterr().out
    checkpoint = [str(saved.root / 'checkpoint'), '--base', str(saved.root / 'base')]
    assert verify(['--compare', str(folder), *checkpoint]) == 0, capsys.readouterr().out
    loaded, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told['missing_keys'] and set(told['unexpected_keys']) == CARRIED.keys()
    assert raw(loaded.state_dict()['model.norm.weight']) == raw(without['model.norm.weight'])


def test_a_conversion_is_the_same_folder(saved, tmp_path):
    check(saved, 'saves')
    options = ['--base', saved.root / 'base', '--carry-base', 'all', '--verify', 'full']
    out = convert(saved.root / 'checkpoint', tmp_path / 'out', *options, '--max-shard-size', '20KB')
    assert_same_files(out, saved.root / 'gather_in_shards')
    assert verify([str(out), '--load']) == 0


def test_what_is_missing_is_named(tmp_path, caplog):
    make_base(tmp_path / 'base')
    model = AutoModelForCausalLM.from_pretrained(tmp_path / 'base')
    save_hf(model, tmp_path / 'saved')
    assert [line for line in caplog.messages if "carry_base='all', which copies them" in line]
    caplog.clear()
    caplog.set_level('INFO', 'xhf_hooks')
    save_hf(model, tmp_path / 'saved', carry_base='all')
    assert [line for line in caplog.messages if 'copied from the base model: 5 tensors (model.layers.61' in line]
    assert not [line for line in caplog.messages if 'carry_base' in line]


@pytest.mark.parametrize('base', ['none', 'another class', 'other names', 'adapter'])
def test_a_base_that_does_not_show_what_to_copy(base, tmp_path):
    make_base(tmp_path / 'base')
    model = AutoModelForCausalLM.from_pretrained(tmp_path / 'base')
    if base == 'none':
        model, said = build('llama'), 'the model, which names no base, has no safetensors files on this machine'
    elif base == 'another class':
        model = LlamaForSequenceClassification.from_pretrained(tmp_path / 'base')
        said = 'is of class LlamaForCausalLM, and the trained model a LlamaForSequenceClassification'
    elif base == 'other names':  # of an older version, whose names loading changes
        for path in (tmp_path / 'base').glob('*.safetensors'):
            renamed = {name.replace('self_attn', 'attn'): tensor for name, tensor in load_file(path).items()}
            save_file(renamed, path, {'format': 'pt'})
        said = 'stores tensors under other names than a save: it has no model.layers.0.self_attn'
    else:
        model, said = adapt(model), 'LoraExporter writes no complete model here, such as an adapter alone'
    with pytest.raises(XhfError, match=f'carry_base: expected None, .*{said}'):
        save_hf(model, tmp_path / 'saved', carry_base='all')
    assert not (tmp_path / 'saved').exists()


def test_a_file_of_the_base_that_became_shorter(tmp_path):
    """It is read at each save: then the save fails, and the one before it stays."""
    make_base(tmp_path / 'base')
    model = AutoModelForCausalLM.from_pretrained(tmp_path / 'base')
    run = open_run(model, tmp_path / 'saved', carry_base='all', on_error='raise')
    run.save(iteration(1))
    before = {path.name: path.read_bytes() for path in (tmp_path / 'saved').iterdir()}
    path = tmp_path / 'base' / 'mtp.safetensors'
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(XhfError, match=r'mtp\.safetensors: .* is to be copied from this file .* shorter than it was'):
        run.save(iteration(2))
    run.close()
    assert {path.name: path.read_bytes() for path in (tmp_path / 'saved').iterdir()} == before
