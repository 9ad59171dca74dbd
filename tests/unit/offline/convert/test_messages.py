"""What xhf-convert says of a checkpoint, and where the model that is named is not the one that was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.config_fields import assert_same_config, config_fields
from tests.helpers.checks.converted import convert, refused
from tests.helpers.models.model_folder import edit_json, save_model, write_manifest
from tests.helpers.models.zoo import build
from tests.helpers.runs.made_checkpoint import MadeCheckpoint
from xhf_hooks.offline.commands.convert import main


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A checkpoint, and the model that it is of."""
    folder = tmp_path_factory.mktemp('trained')
    save_model('llama', folder / 'model')
    torch.save(load_file(folder / 'model' / 'model.safetensors'), folder / 'iter_5.pth')
    return folder


def base_model(trained: Path, folder: Path, **changed: Any) -> Path:
    """The config alone."""
    folder.mkdir()
    shutil.copy(trained / 'model' / 'config.json', folder)
    edit_json(folder / 'config.json', **changed)
    return folder


@pytest.mark.parametrize('given', [True, False], ids=['by --base', 'beside it'])
def test_a_layer_too_many_and_no_tokenizer(trained, tmp_path, capsys, given):
    base = base_model(trained, tmp_path / 'base', num_hidden_layers=3)
    checkpoint = trained / 'iter_5.pth' if given else Path(shutil.copy(trained / 'iter_5.pth', base))
    command = [checkpoint, tmp_path / 'out', *(['--base', base] if given else [])]
    line = refused(capsys, *command)
    assert 'that the checkpoint lacks (model.layers.2.' in line and str(base) in line and '--base has to name' in line
    edit_json(base / 'config.json', num_hidden_layers=2)
    convert(*command)
    note = next(line for line in capsys.readouterr().err.splitlines() if 'no tokenizer was found' in line)
    assert ('set --base' in note) != given and (str(base) in note) == given


def test_a_base_that_is_no_model(trained, tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    adapter = base_model(trained, tmp_path / 'adapter')
    (adapter / 'adapter_config.json').write_text('{"peft_type": "LORA", "base_model_name_or_path": null}')
    half = base_model(trained, tmp_path / 'half', num_hidden_layers=3)
    weight_map = {'model.layers.2.mlp.up_proj.weight': 'model-00002-of-00002.safetensors'}
    (half / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
    for base, words in {
        'gone': '--base has to name a folder with the model',
        'empty': '--base has to name a folder with the model',
        'adapter': 'has no base_model_name_or_path; set it to the base model',
        'half': 'half/model-00002-of-00002.safetensors: cannot be read',
    }.items():
        line = refused(capsys, trained / 'iter_5.pth', tmp_path / 'out', '--base', tmp_path / base)
        assert words in line and str(tmp_path / base) in line


#: Values of the wrong kind in the base model's config.json, or names of something else than the field requires.
WRONG: tuple[dict[str, Any], ...] = (
    {'model_type': ['llama']},
    {'architectures': ['Trainer']},
    {'hidden_act': 'nope'},
    {'auto_map': {'AutoConfig': 5}},
    {'torch_dtype': 'nope'},
    {'quantization_config': 'x'},
    {'num_hidden_layers': '2'},
)


@pytest.mark.parametrize('changed', WRONG, ids=str)
def test_a_config_that_no_model_has(trained, tmp_path, capsys, changed):
    """One line, or a conversion that does not need the field; never a fault of this program."""
    base = base_model(trained, tmp_path / 'base', **changed)
    status = main([str(trained / 'iter_5.pth'), str(tmp_path / 'out'), '--base', str(base)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith('xhf-convert: ')]
    if status:
        assert status == 2 and len(lines) == 1 and not (tmp_path / 'out').exists()
    else:
        assert set(changed) & {'auto_map', 'torch_dtype', 'model_type'}


def test_the_hooks_own_folder_says_what_the_model_is(trained, tmp_path, capsys):
    """In a work_dir whose config has a model that only its own code knows. Not a folder that the hook did not make."""
    saved = tmp_path / '20261122_101010' / 'hf_model'
    shutil.copytree(trained / 'model', saved)
    write_manifest(saved)
    weights = torch.load(trained / 'iter_5.pth')
    meta = {'cfg': "model = dict(type='DemoCausalLM', base_folder='gone')\n"}
    torch.save({'state_dict': {f'llm.{n}': t for n, t in weights.items()}, 'meta': meta}, tmp_path / 'iter_5.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_5.pth'))
    convert(tmp_path, tmp_path / 'out')
    assert f'model {saved}; HuggingFaceExporter' in capsys.readouterr().out
    # That of save_pretrained; transformers 4 also writes from where a model was loaded
    named = {'_name_or_path': str(saved)} if '_name_or_path' in config_fields(tmp_path / 'out') else {}
    assert_same_config(tmp_path / 'out', saved, **named)
    assert_same_folder_tensors(tmp_path / 'out', saved)
    (saved / 'xhf_manifest.json').unlink()
    assert 'has no supported model' in refused(capsys, tmp_path, tmp_path / 'again')


def test_the_base_is_not_replaced_by_its_conversion(trained, tmp_path, capsys):
    """It may be one that this package wrote, which OUT may name otherwise."""
    base = base_model(trained, tmp_path / 'base')
    convert(trained / 'iter_5.pth', base / 'out', '--base', base)
    (tmp_path / 'link').symlink_to(base / 'out')
    again = [str(trained / 'iter_5.pth'), str(base / 'out'), '--base', str(tmp_path / 'link'), '--overwrite']
    capsys.readouterr()
    assert main(again) == 2
    assert 'is (or contains) the base model' in (said := capsys.readouterr().err) and 'give as OUT another' in said


@pytest.mark.parametrize('options', [(), ('--base', 'model')])
def test_a_config_without_a_model_is_not_taken(trained, tmp_path, capsys, options):
    (tmp_path / 'no_model.py').write_text("optimizer = dict(type='AdamW')\n")
    options = [trained / one if one == 'model' else one for one in options]
    command = [trained / 'iter_5.pth', tmp_path / 'out', '--config', tmp_path / 'no_model.py']
    assert f'{tmp_path / "no_model.py"}: has no model' in refused(capsys, *command, *options)


def test_a_folder_that_is_one_already(trained, tmp_path, capsys):
    line = refused(capsys, trained / 'model', tmp_path / 'out')
    assert f'{trained / "model"}: a Hugging Face folder already' in line and 'xhf-verify' in line


def test_custom_code_beside_a_checkpoint_is_no_config_of_the_run(trained, tmp_path, capsys):
    """Trainer puts it beside its config.json."""
    base = base_model(trained, tmp_path / 'run')
    shutil.copy(trained / 'iter_5.pth', base)
    (base / 'modeling_custom.py').write_text('def build(pairs):\n    return 1\n')
    convert(base / 'iter_5.pth', tmp_path / 'out')
    assert 'not read' not in capsys.readouterr().err


# Checkpoints without masters, or whose files tell nothing of themselves


BY_NAME = 'not checked: which rank wrote which file, since only their names say so'
NO_MASTERS = 'float32: this checkpoint has no fp32 master weights'


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp('model') / 'base'
    build('llama_tied').save_pretrained(folder)
    return folder


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(p.shape, generator=generator) for name, p in build('llama_tied').named_parameters()}


def made(stage: int = 1) -> MadeCheckpoint:
    shared = {'lm_head.weight': 'model.embed_tokens.weight'}
    return MadeCheckpoint(masters=weights(), shared=shared, dtype=torch.bfloat16, stage=stage)


def without_optimizer(folder: Path) -> Path:
    checkpoint = made().write(folder / 'x')
    for file in checkpoint.glob('*optim_states.pt'):
        file.unlink()
    return checkpoint


def without_zero(folder: Path) -> Path:
    checkpoint = without_optimizer(folder)
    (file,) = checkpoint.iterdir()
    torch.save({**torch.load(file, weights_only=False), 'param_shapes': None}, file)
    return checkpoint


def one_file(folder: Path) -> Path:
    torch.save({'state_dict': made().as_trained}, folder / 'x.pth')
    return folder / 'x.pth'


@pytest.mark.parametrize('make', [without_optimizer, without_zero, one_file])
def test_no_masters_are_there(base, tmp_path, capsys, make):
    checkpoint = make(tmp_path)
    n_tensors = len(weights())
    line = f'{NO_MASTERS} for {n_tensors} of {n_tensors} tensors: their 16-bit weights are widened'
    options = ['--base', base, '--dtype', 'float32']
    convert(checkpoint, tmp_path / 'dry', *options, '--dry-run')
    assert line in capsys.readouterr().out.splitlines()
    convert(checkpoint, tmp_path / 'out', *options)
    said = capsys.readouterr()
    assert line in said.out.splitlines() and said.err.splitlines()[-1] == f'xhf-convert: note: {line}'
    assert json.loads((tmp_path / 'out' / 'xhf_manifest.json').read_text())['widened_tensors'] == n_tensors
    found = folder_tensors(tmp_path / 'out')
    assert all(torch.equal(found[name], tensor.bfloat16().float()) for name, tensor in weights().items())
    convert(checkpoint, tmp_path / 'half', '--base', base, '--dtype', 'float16')
    said = capsys.readouterr()
    assert 'widened' not in said.out + said.err


def test_files_that_tell_nothing_of_themselves(base, tmp_path, capsys):
    folder = made(stage=3).write(tmp_path / 'x')
    for expected in (False, True):
        convert(folder, tmp_path / 'out', '--base', base, '--dry-run')
        assert (BY_NAME in capsys.readouterr().out) == expected
        for file in folder.iterdir():
            state = torch.load(file, weights_only=False)
            with file.open('wb') as stream:  # then the file does not name itself
                torch.save(state, stream)


def test_one_tensor_is_not_tensors(base, tmp_path, capsys):
    state = {**{f'net.{name}': tensor for name, tensor in weights().items()}, 'loss.steps': torch.zeros(1).long()}
    torch.save(state, tmp_path / 'x.pth')
    convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', base)
    assert 'not exported: 1 tensor (loss.steps)' in capsys.readouterr().err
