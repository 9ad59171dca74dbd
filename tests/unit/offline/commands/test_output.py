"""What the commands print: of their own use, of anybody's files in lines of plain text, and how far they are."""

import io
import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.models.model_folder import save_model
from xhf_hooks import __version__
from xhf_hooks.errors import OptionError
from xhf_hooks.offline.commands import convert, verify
from xhf_hooks.offline.commands.output import complain, progress, say

#: Clears the terminal, sets its title, writes backwards, breaks lines; half of a pair is no text at all.
HOSTILE = 'a\x1b[2J\x1b]0;title\x07\n\r\u2028\u202egnp\x9b31m\ud800\x00b'
PLAIN = r'a\x1b[2J\x1b]0;title\x07\n\r\u2028\u202egnp\x9b31m\ud800\x00b'


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split('\n'))


def test_one_line_that_every_terminal_can_take(capsys):
    say(HOSTILE)
    complain(HOSTILE)
    assert capsys.readouterr() == (f'{PLAIN}\n', f'{PLAIN}\n')
    say('naïve 模型 \\n stays')
    assert capsys.readouterr().out == 'naïve 模型 \\n stays\n'
    ascii_only = io.TextIOWrapper(io.BytesIO(), 'ascii')
    say('é\udcff', ascii_only)
    ascii_only.flush()
    assert ascii_only.buffer.getvalue() == b'\\xe9\\udcff\n'


@pytest.mark.parametrize(
    ('message', 'told'),
    [
        ("readers need carry_base='all', which copies them", 'readers need --carry-base all, which copies them'),
        ("(lora='merge' or 'both')", '(--lora merge or both)'),
        ("set lora to 'adapter', or train on", 'give --lora adapter, or train on'),
        ('Set dtype to None, or remove', 'leave --dtype out, or remove'),
        ("lora='merge', --lora merge", '--lora merge, --lora merge'),
        (
            str(OptionError('lora', 'None: it has none', 'merge')),
            "option --lora: expected nothing: it has none, found 'merge'",
        ),
        (str(OptionError('llava_format', "'xtuner'", 'x')), "option --llava-format: expected 'xtuner', found 'x'"),
        ("llava_format='huggingface'", '--llava-format huggingface'),
        (
            str(OptionError('lora', "None, 'merge' or 'both' with llava_format 'huggingface'", 'adapter')),
            "option --lora: expected nothing, 'merge' or 'both' with --llava-format huggingface, found 'adapter'",
        ),
        ("set llava_format to 'xtuner'", 'give --llava-format xtuner'),
        ('for LLaVA, set llava_format to None', 'for LLaVA, leave --llava-format out'),
        (str(OptionError('--base', 'a folder', 'x')), "option --base: expected a folder, found 'x'"),
        ("torch_dtype='auto' and vocab_size", "torch_dtype='auto' and vocab_size"),
    ],
)
def test_options_are_named_as_commands_take_them(message, told, capsys):
    complain(message)
    assert capsys.readouterr().err == f'{told}\n'


def test_a_conversion_that_the_options_do_not_fit(tmp_path, capsys):
    base = save_model('llama', tmp_path / 'base')
    torch.save(load_file(base / 'model.safetensors'), tmp_path / 'weights.pth')
    command = [str(tmp_path / 'weights.pth'), str(tmp_path / 'out'), '--base', str(base)]
    assert convert.main([*command, '--lora', 'merge']) == convert.BAD_INPUT
    assert 'xhf-convert: option --lora: expected nothing: that needs a LoRA adapter' in capsys.readouterr().err
    assert convert.main([*command, '--llava-format', 'xtuner']) == convert.BAD_INPUT
    assert 'option --llava-format: expected nothing, because HuggingFaceExporter' in capsys.readouterr().err


CLEAR = 'x\x1b[2J\ny\u202e'


def test_verify_of_hostile_names(tmp_path, capfd):
    folder = tmp_path / f'm{CLEAR}'
    folder.mkdir()
    save_file({f'{CLEAR}{i}': torch.full((1,), float('nan')) for i in range(300)}, folder / 'model.safetensors')
    (folder / f'extra{CLEAR}.json').write_text('{')
    (folder / 'config.json').write_text(json.dumps({'model_type': CLEAR, 'architectures': [CLEAR]}))
    assert verify.main([str(folder)]) == verify.DIFFERENT
    said = ''.join(capfd.readouterr())
    assert is_plain(said) and r'\x1b[2J\ny\u202e' in said
    assert verify.main([str(folder), '--json']) == verify.DIFFERENT
    out = capfd.readouterr().out
    assert is_plain(out) and json.loads(out)['path'] == str(folder)


@pytest.mark.parametrize(('is_terminal', 'secs'), [(True, 1), (False, 11)])
def test_progress(capsys, monkeypatch, is_terminal, secs):
    """The work of a moment shows nothing."""
    now = [1000.0]
    monkeypatch.setattr('tqdm.std.time', lambda: now[0])
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal, raising=False)
    with progress('converting') as show:
        show(10**9, 10**10)
        assert capsys.readouterr().err == ''
        now[0] += secs
        show(42 * 10**8, 10**10)
        assert re.search(r'^\s*converting: +42%.* 4.20G/10.0G.*B/s', capsys.readouterr().err)


COMMANDS = {'xhf-convert': convert, 'xhf-verify': verify}


@pytest.mark.parametrize('name', COMMANDS)
def test_help_fits_two_screens_and_begins_with_the_usual_calls(name, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '80')
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(['--help'])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and lines[0].startswith(f'usage: {name}') and len(lines) <= 2 * 24
    usual = lines[lines.index('usual calls:') : lines.index('options:')]
    assert sum(line.startswith(f'  {name} ') for line in usual) >= 3


@pytest.mark.parametrize('name', COMMANDS)
def test_version(name, capsys):
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(['--version'])
    assert ended.value.code == 0 and capsys.readouterr().out == f'{name} {__version__}\n'


@pytest.mark.parametrize(
    ('name', 'words', 'expected'),
    [
        ('xhf-convert', 'run OUT --max-shard-size 5gigs', "expected a size such as '128MB' or a number of bytes"),
        ('xhf-convert', 'run s3://bucket/run', 'expected a path on this machine, found the URL s3://bucket/run'),
        (
            'xhf-convert',
            'run ~nobody-here/x',
            'expected a path on this machine, found ~nobody-here/x: no such home folder',
        ),
        ('xhf-convert', 'run OUT --base ~nobody-here/x', 'found ~nobody-here/x: no such home folder'),
        ('xhf-verify', '~nobody-here/x', 'found ~nobody-here/x: no such home folder'),
        ('xhf-verify', 'FILE', 'model.safetensors is a file; give its folder: '),
        ('xhf-verify', '--compare a b c', '--compare takes two paths, found 3: a b c'),
        ('xhf-verify', '--compare a', '--compare takes two paths, found 1: a'),
    ],
)
def test_wrong_use_says_what_is_right(name, words, expected, tmp_path, capsys):
    file = tmp_path / 'model.safetensors'
    file.touch()
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(words.replace('FILE', str(file)).split())
    assert ended.value.code == 2 and expected in capsys.readouterr().err


def test_a_checkpoint_in_a_home_folder_that_is_not_there(capsys, tmp_path):
    assert convert.main(['~nobody-here/x', str(tmp_path / 'out')]) == 2
    assert '~nobody-here/x: no such home folder; give a checkpoint' in capsys.readouterr().err


def test_a_checkpoint_alone_is_a_file_for_xhf_verify_and_not_missing(tmp_path, capsys):
    file = tmp_path / 'iter_5.pth'
    file.touch()
    assert verify.main([str(file)]) == verify.UNUSABLE
    assert f'{file}: a file; give a folder with *.safetensors files; to compare a checkpoint' in capsys.readouterr().err
