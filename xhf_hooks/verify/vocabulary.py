"""Checks that every token of the tokenizer and the generation config has a row in the embedding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import some
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import WeightFolder

#: The size of these files limits the memory that loading may take.
_VOCABULARIES = frozenset(
    {'tokenizer.json', 'tokenizer.model', 'vocab.json', 'vocab.txt', 'merges.txt', 'spiece.model'}
)
_TOKENIZER_FILES = _VOCABULARIES - {'merges.txt'} | {'tokenizer_config.json'}


@dataclass(frozen=True)
class _Vocabulary:
    """A loaded tokenizer: its size, and the tokens without a row in the embedding; or the error.

    Attributes:
        beyond: The first few of the ``n_beyond`` tokens without a row.
        special: Special tokens without a row.
        needs_more: The error is a missing package or permission, not damage.
    """

    n_tokens: int = 0
    n_beyond: int = 0
    beyond: str = ''
    special: str = ''
    error: str = ''
    needs_more: bool = False


def check_vocabulary(folder: WeightFolder, rows: int | None, findings: Findings, *, trust_remote_code: bool) -> None:
    """Check the tokenizer, config.json and generation_config.json of one folder.

    Args:
        rows: Rows of the input embedding; None if unknown.
    """
    where = folder.where
    has_tokenizer = bool(_TOKENIZER_FILES.intersection(folder.files))
    if rows is None:
        if has_tokenizer:
            findings.unchecked('tokenizer', f'{where}: the number of embedding rows is unknown')
        return
    for name in ('generation_config.json', 'config.json'):
        _check_special_ids(folder, name, rows, findings)
    if not has_tokenizer:
        findings.unchecked('tokenizer', f'{where}: no tokenizer files')
        return
    nbytes = sum(max(0, folder.files[name]) for name in _VOCABULARIES.intersection(folder.files))
    try:
        found = _in_child(folder.path, rows, min(nbytes, strict_json.MOST_NBYTES), trust_remote_code)
    except DamagedError as error:
        findings.problem('tokenizer', f'{where}: {error}')
    else:
        _check_tokenizer(where, found, rows, findings)


def _check_special_ids(folder: WeightFolder, name: str, rows: int, findings: Findings) -> None:
    wrong = []
    for key, value in (folder.read_json(name) or {}).items():
        if key.endswith('_token_id'):
            ids = value if isinstance(value, list) else [value]
            wrong += [f'{key} {i}' for i in ids if type(i) is int and not -1 <= i < rows]  # old configs: -1 for none
    if wrong:
        findings.problem('tokenizer', f'{folder.path / name}: {some(wrong)}; the embedding has {rows} rows')


def _in_child(folder: Path, rows: int, nbytes: int, trust_remote_code: bool) -> _Vocabulary:
    """Load it in a child process with a memory limit: tokenizer files can demand any amount."""
    from transformers import AutoTokenizer  # noqa: F401  (once, before the process forks)

    from xhf_hooks.meta_model.trial import in_child
    from xhf_hooks.model.quiet_transformers import quiet

    with quiet():
        return in_child(lambda: _vocabulary(folder, rows, trust_remote_code), 'loading the tokenizer', nbytes // 1000)


def _vocabulary(folder: Path, rows: int, trust_remote_code: bool) -> _Vocabulary:
    from transformers import AutoTokenizer

    from xhf_hooks.meta_model.transformers_model import in_one_line

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        vocabulary = tokenizer.get_vocab()
        beyond = sorted((number, token) for token, number in vocabulary.items() if number >= rows)
        special = [f'{i}' for i in tokenizer.all_special_ids if i is not None and not 0 <= i < rows]
    except MemoryError:
        raise
    except BaseException as error:  # the files are untrusted; a panic in Rust is a BaseException
        needs_more = (
            isinstance(error, ImportError) or 'trust_remote_code' in str(error) or 'sentencepiece' in str(error)
        )
        return _Vocabulary(error=f'does not load: {in_one_line(error)}', needs_more=needs_more)
    shown = some([f'{token!r} ({number})' for number, token in beyond])
    return _Vocabulary(len(vocabulary), len(beyond), shown, some(special))


def _check_tokenizer(where: str, found: _Vocabulary, rows: int, findings: Findings) -> None:
    if found.error:
        (findings.unchecked if found.needs_more else findings.problem)('tokenizer', f'{where}: {found.error}')
    elif found.n_beyond:
        findings.problem(
            'tokenizer', f'{where}: {found.n_beyond} tokens have no row in the embedding of {rows} rows: {found.beyond}'
        )
    elif found.special:
        findings.problem(
            'tokenizer', f'{where}: special tokens {found.special} have no row in the embedding of {rows} rows'
        )
    else:
        findings.ok('tokenizer', f'{where}: {found.n_tokens} tokens, {rows} rows in the embedding')
