"""The command xhf-convert on a checkpoint of one file: what it prints, refuses, and leaves when it fails."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.checks.compare import folder_tensors
from tests.helpers.models.zoo import build
from tests.helpers.ranks.launch import run_program
from xhf_hooks.offline.commands.convert import BAD_INPUT, DONE, FAILED, main


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """``iter_7.pth`` as a plain Runner leaves it, and ``base``, whose config the run names."""
    root = tmp_path_factory.mktemp('trained')
    build('qwen2', seed=1).save_pretrained(root / 'base')
    state_dict = {f'llm.{name}': tensor for name, tensor in build('qwen2').state_dict().items()}
    llm = dict(
        type='transformers.AutoModelForCausalLM.from_pretrained', pretrained_model_name_or_path=str(root / 'base')
    )
    cfg = f'model = dict(type="xtuner.model.SupervisedFinetune", llm=dict({llm!r}))\n'
    torch.save({'state_dict': state_dict, 'meta': {'iter': 7, 'epoch': 0, 'cfg': cfg}}, root / 'iter_7.pth')
    return root


def errors(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed for a failed command: one line."""
    lines = [line for line in capsys.readouterr().err.splitlines() if 'note:' not in line]
    assert len(lines) == 1 and lines[0].startswith('xhf-convert: '), lines
    return lines[0]


def leftovers(folder: Path) -> list[str]:
    """Names, without what makes each staging folder's name a new one."""
    return sorted(re.sub('(?<=[.]staging)-[0-9a-f]{12}$', '', path.name) for path in folder.iterdir())


def test_converts_and_says_what_it_did(trained, tmp_path, capsys):
    assert main([str(trained / 'iter_7.pth'), str(tmp_path / 'out'), '--verify', 'full']) == DONE
    said = capsys.readouterr().out
    for words in ('iteration 7', 'HuggingFaceExporter', 'wrote ', 'verified: all weights were read back'):
        assert words in said
    expected = build('qwen2').state_dict()
    found = folder_tensors(tmp_path / 'out')
    assert found.keys() == expected.keys() - {'lm_head.weight'}, 'it is tied, and stored twice in the checkpoint'
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    manifest = json.loads((tmp_path / 'out' / 'xhf_manifest.json').read_text())
    assert manifest['iteration'] == 7 and manifest['engine'] == 'torch'
    assert leftovers(tmp_path) == ['out']


def test_a_dry_run_writes_nothing(trained, tmp_path, capsys):
    assert main([str(trained / 'iter_7.pth'), str(tmp_path / 'deep' / 'out'), '--dry-run']) == DONE
    said = capsys.readouterr().out
    assert f'found {trained / "iter_7.pth"}: file, torch, iteration 7, 26 tensors (26 F32), ' in said
    assert 'would write to' in said and leftovers(tmp_path) == []


def test_results_as_json(trained, tmp_path, capsys):
    """On standard output alone: a script reads it."""
    out = tmp_path / 'out'
    for options, is_written in (['--dry-run'], False), (['--verify', 'full'], True):
        assert main([str(trained / 'iter_7.pth'), str(out), '--json', *options]) == DONE
        said = capsys.readouterr()
        result = json.loads(said.out)
        assert (result['out'], result['written'], result['step']) == (str(out), is_written, 'iter_7')
        assert result['nbytes'] > 0 and 'iteration 7' in said.err
    assert result['verified'] and set(result['files']) == {path.name for path in out.iterdir()}


def test_what_a_checkpoint_holds_is_told_where_its_model_is_not_known(trained, tmp_path, capsys):
    torch.save({'llm.weight': torch.ones(3)}, tmp_path / 'iter_3.pth')
    assert main([str(tmp_path / 'iter_3.pth'), str(tmp_path / 'out'), '--dry-run']) == BAD_INPUT
    assert 'iteration 3, 1 tensor (1 F32), ' in capsys.readouterr().out


def test_out_exists(trained, tmp_path, capsys):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'thesis.tex').write_text('mine')
    command = [str(trained / 'iter_7.pth'), str(tmp_path / 'out')]
    assert main([*command, '--dry-run']) == DONE
    assert f'would write to {tmp_path / "out"}, which exists' in capsys.readouterr().out
    assert main([*command, '--dry-run', '--overwrite']) == DONE
    assert 'which exists' not in capsys.readouterr().out
    assert main(command) == BAD_INPUT
    assert 'exists' in errors(capsys)
    assert main([*command, '--overwrite']) == BAD_INPUT, 'it is not ours'
    assert 'did not write' in errors(capsys)
    assert leftovers(tmp_path / 'out') == ['thesis.tex']
    (tmp_path / 'out' / 'thesis.tex').unlink()
    for options in ([], ['--overwrite', '--dtype', 'bfloat16']):
        assert main([*command, *options]) == DONE
    assert {tensor.dtype for tensor in folder_tensors(tmp_path / 'out').values()} == {torch.bfloat16}
    assert leftovers(tmp_path) == ['out']


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (['--base', '/nowhere'], '/nowhere'),
        (['--base', 'OTHER'], 'differ: llm.model.embed_tokens.weight'),
        (['--base', 'SMALLER'], 'the checkpoint has tensors that the model of'),
        (['--config', '/nowhere.py'], '/nowhere.py'),
        (['--lora', 'merge'], 'option --lora'),
        (['--module', 'llm.nothing'], 'option --module'),
    ],
)
def test_bad_input(trained, tmp_path, capsys, options, expected):
    config = json.loads((trained / 'base' / 'config.json').read_text())
    smaller = {'num_hidden_layers': 1, 'layer_types': ['full_attention']}
    for name, change in (('OTHER', {'hidden_size': 45}), ('SMALLER', smaller)):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'config.json').write_text(json.dumps({**config, **change}))
    options = [str(tmp_path / option) if option.isupper() else option for option in options]
    assert main([str(trained / 'iter_7.pth'), str(tmp_path / 'out'), *options]) == BAD_INPUT
    assert expected in errors(capsys) and leftovers(tmp_path) == ['OTHER', 'SMALLER']


def test_disk_too_small(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: SimpleNamespace(free=64_000))
    assert main([str(trained / 'iter_7.pth'), str(tmp_path / 'out')]) == BAD_INPUT
    assert re.search(r'has 64 kB free, and 1[0-9]+ kB are needed; .* give as OUT one on', errors(capsys))
    assert leftovers(tmp_path) == []


# Ends the process when half of the file is written.
HALFWAY = """
import os, signal, sys, time
from xhf_hooks.offline.commands.convert import main
from xhf_hooks.files.output_file import OutputFile

write = OutputFile.write

def halfway(self, data, offset):
    write(self, memoryview(b'half'), 0)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(1)

OutputFile.write = halfway
sys.exit(main(sys.argv[2:]))
"""


def test_what_is_killed_halfway_leaves_nothing_under_the_name(trained, tmp_path):
    arguments = [str(trained / 'iter_7.pth'), str(tmp_path / 'out')]
    (killed,) = run_program(HALFWAY, 'SIGKILL', *arguments)
    assert (killed.returncode, leftovers(tmp_path)) == (-signal.SIGKILL, ['.out.lock', '.out.staging'])
    (ended,) = run_program(HALFWAY, 'SIGTERM', *arguments)  # it clears up first
    assert (ended.returncode, leftovers(tmp_path)) == (FAILED, []) and 'interrupted' in ended.stderr


# Ends the process where OUT is being replaced, on a file system that cannot exchange two folders, such as NFS.
BETWEEN_RENAMES = """
import os, signal, sys
from xhf_hooks.offline.commands.convert import main
from xhf_hooks.places import replacement

signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the fork server of a run that saves on it blocks it
rename = os.rename

def renamed(old, new):
    if 'staging' in str(old) and str(new) == sys.argv[3]:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    rename(old, new)

replacement.exchange = lambda one, other: False
os.rename = renamed
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize('how', ['SIGKILL', 'SIGTERM'])
def test_what_was_there_comes_back_if_its_replacement_is_killed(trained, tmp_path, capsys, how):
    """Without --overwrite. The output of the killed process is complete, and had the user's leave to replace it."""
    out = tmp_path / 'out'
    arguments = [str(trained / 'iter_7.pth'), str(out)]
    assert main([*arguments, '--dtype', 'float16']) == DONE
    before = folder_tensors(out)
    (ended,) = run_program(BETWEEN_RENAMES, how, *arguments, '--overwrite')
    capsys.readouterr()
    if how == 'SIGTERM':  # it puts things back first
        assert (ended.returncode, leftovers(tmp_path)) == (FAILED, ['out'])
    else:
        assert ended.returncode == -signal.SIGKILL and not out.exists()
        assert main(arguments) == BAD_INPUT
        assert f'{out} exists: another process has written it' in errors(capsys)
        assert leftovers(tmp_path) == ['out', 'out_iter_7']
    earlier = folder_tensors(out if how == 'SIGTERM' else tmp_path / 'out_iter_7')
    assert earlier.keys() == before.keys() and all(torch.equal(earlier[name], before[name]) for name in before)


def fail(self, data, offset):
    raise OSError(28, 'No space left on device')


def spoil(self):
    os.pwrite(self._fd, b'\x7f', os.fstat(self._fd).st_size - 1)


@pytest.mark.parametrize(
    ('method', 'instead', 'said'),
    [('write', fail, 'No space left on device'), ('fsync', spoil, 'differs from what was saved')],
)
def test_a_disk_that_fails_or_lies(trained, tmp_path, capsys, monkeypatch, method, instead, said):
    monkeypatch.setattr(f'xhf_hooks.files.output_file.OutputFile.{method}', instead)
    assert main([str(trained / 'iter_7.pth'), str(tmp_path / 'out'), '--verify', 'full']) == FAILED
    assert said in errors(capsys) and leftovers(tmp_path) == []
