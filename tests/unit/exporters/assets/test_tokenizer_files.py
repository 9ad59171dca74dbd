"""The files of a tokenizer: what calls leave in it, where it is written to be looked at, and a full disk."""

import errno
import json
import tempfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.checks.compare import bytes_in
from tests.helpers.models.model_folder import edit_json, save_tokenizer
from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.exporters.assets.write_tokenizer import write_tokenizer


@pytest.fixture
def base(tmp_path) -> Path:
    save_tokenizer(tmp_path / 'base', 100)
    return tmp_path / 'base'


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / 'out').mkdir()
    return tmp_path / 'out'


def test_nothing_is_written_but_where_the_save_goes(base, out, monkeypatch):
    """Neither to /dev/shm, which has 64 MB in a container, nor to TMPDIR."""
    made, make = [], tempfile.mkdtemp
    monkeypatch.setattr(tempfile, 'tempdir', '/nonexistent')

    def note(*args, **more) -> str:
        made.append(make(*args, **more))
        return made[-1]

    monkeypatch.setattr(tempfile, 'mkdtemp', note)
    assert write_tokenizer(out, AutoTokenizer.from_pretrained(base), LocatedBase()) == []
    assert {Path(folder).parent for folder in made} == {out}
    assert bytes_in(out) == bytes_in(base)


def test_a_tokenizer_that_did_not_change_is_compared_at_the_first_save_only(base, out, monkeypatch):
    """Comparing takes seconds with a large vocabulary. What it saves itself shows whether it has changed."""
    tokenizer, located = AutoTokenizer.from_pretrained(base), LocatedBase()
    write, written = PreTrainedTokenizerBase.save_pretrained, []
    monkeypatch.setattr(
        PreTrainedTokenizerBase, 'save_pretrained', lambda *args, **more: (written.append(1), write(*args, **more))[1]
    )
    counts = []
    for token in (None, None, 'new'):
        if token is not None:
            tokenizer.add_tokens(token)
        written.clear()
        write_tokenizer(out, tokenizer, located)
        counts.append(len(written))
    assert counts[1] == 1 and counts[0] > 1 and counts[2] > 1


@pytest.mark.parametrize('n_written', [0, 1, 2])
def test_a_full_disk_is_an_error_and_never_another_tokenizer(base, out, monkeypatch, n_written):
    """Whichever of the tokenizers that are written to be compared has no room. tokenizers' errors are Rust's."""
    tokenizer, write, left = AutoTokenizer.from_pretrained(base), PreTrainedTokenizerBase.save_pretrained, [n_written]

    def fill(self, *args, **more):
        if not left[0]:
            raise Exception('No space left on device (os error 28)')
        left[0] -= 1
        return write(self, *args, **more)

    monkeypatch.setattr(PreTrainedTokenizerBase, 'save_pretrained', fill)
    with pytest.raises(OSError, match=f'No space left on device.*{out}') as caught:
        write_tokenizer(out, tokenizer, LocatedBase())
    assert caught.value.errno == errno.ENOSPC and list(out.iterdir()) == []


#: Calls of a training script, and the texts of a reader: forty words and two.
CALLS = {
    'truncation': dict(truncation=True, max_length=12),
    'padding': dict(padding='max_length', truncation=True, max_length=12),
    'multiple of': dict(padding=True, pad_to_multiple_of=8),
}
TEXTS = [' '.join(f'w{i}' for i in range(40)), 'w1 w2']


def n_tokens(folder: Path) -> list[int]:
    """As whoever reads tokenizer.json without transformers, such as servers in Rust."""
    read = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    return [len(read.encode(text).ids) for text in TEXTS]


@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('base_truncates', [True, False])
def test_what_a_call_switched_on_is_not_part_of_the_tokenizer(base, out, call, base_truncates):
    """Some bases have a truncation of their own, such as sentence-transformers' all-MiniLM-L6-v2."""
    if base_truncates:
        own = AutoTokenizer.from_pretrained(base)
        own.backend_tokenizer.enable_truncation(30)
        own.save_pretrained(base)
    expected = [30 if base_truncates else 40, 2]
    assert n_tokens(base) == expected
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer(TEXTS, **CALLS[call])
    assert write_tokenizer(out, tokenizer, LocatedBase()) == []
    assert bytes_in(out) == bytes_in(base)
    tokenizer.add_tokens(['<new>'])  # training changed it: now it is not copied
    assert write_tokenizer(out, tokenizer, LocatedBase()) == []
    assert n_tokens(out) == expected
    found, before = (json.loads((at / 'tokenizer.json').read_text()) for at in (out, base))
    assert [found[part] for part in ('truncation', 'padding')] == [before[part] for part in ('truncation', 'padding')]
    assert '<new>' in AutoTokenizer.from_pretrained(out).get_vocab()


def test_a_call_of_a_tokenizer_without_a_base(base, out):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.name_or_path = ''
    assert write_tokenizer(out, tokenizer, LocatedBase()) == []
    before = bytes_in(out)
    tokenizer(TEXTS, **CALLS['padding'])
    assert write_tokenizer(out, tokenizer, LocatedBase()) == []
    assert bytes_in(out) == before and n_tokens(out) == [40, 2]


def test_a_call_of_a_tokenizer_with_code_of_its_own(base, out):
    (base / 'tokenization_own.py').write_text(
        'from transformers import PreTrainedTokenizerFast\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n'
    )
    code = {'AutoTokenizer': ['tokenization_own.OwnTokenizer'] * 2}
    edit_json(base / 'tokenizer_config.json', tokenizer_class='OwnTokenizer', auto_map=code)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=True)
    assert type(tokenizer).__name__ == 'OwnTokenizer'
    tokenizer(TEXTS, **CALLS['padding'])
    assert write_tokenizer(out, tokenizer, LocatedBase()) == []
    assert n_tokens(out) == [40, 2] and 'tokenization_own.py' in bytes_in(out)
