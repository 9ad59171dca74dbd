"""Every token that the tokenizer or the generation config names has a row in the embedding."""

from __future__ import annotations

from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.verify import strict_json
from xhf_hooks.verify.content import FolderContent, WeightFolder
from xhf_hooks.verify.report import Findings, some

_TOKENIZER_FILES = frozenset(
    {'tokenizer.json', 'tokenizer.model', 'tokenizer_config.json', 'vocab.json', 'vocab.txt', 'spiece.model'}
)


def check_vocabulary(
    content: FolderContent, folder: WeightFolder, rows: int | None, findings: Findings, *, trust_remote_code: bool
) -> None:
    """Tokenizer and generation_config.json of one folder.

    Args:
        rows: Of the input embedding; None when it is not known.
    """
    where, names = folder.name or '.', content.in_folder(folder.name)
    has_tokenizer = bool(_TOKENIZER_FILES.intersection(names))
    if rows is None:
        if has_tokenizer:
            findings.unchecked('tokenizer', f'{where}: the size of the vocabulary is not known')
        return
    for name in ('generation_config.json', 'config.json'):
        if name in names:
            _check_special_ids(folder, name, rows, findings)
    if not has_tokenizer:
        findings.unchecked('tokenizer', f'{where}: there is none')
        return
    tokenizer = _load(folder, findings, trust_remote_code)
    if tokenizer is not None:
        _check_tokenizer(where, tokenizer, rows, findings)


def _check_special_ids(folder: WeightFolder, name: str, rows: int, findings: Findings) -> None:
    try:
        config = strict_json.read(folder.path / name)
    except DamagedError:
        return  # reported with the texts
    wrong = []
    for key, value in config.items():
        if key.endswith('_token_id'):
            ids = value if isinstance(value, list) else [value]
            wrong += [f'{key} {i}' for i in ids if type(i) is int and not -1 <= i < rows]  # -1: none, in old configs
    if wrong:
        findings.problem('tokenizer', f'{folder.path / name}: {some(wrong)}; the embedding has {rows} rows')


def _load(folder: WeightFolder, findings: Findings, trust_remote_code: bool) -> Any | None:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder.path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # files are anyone's data: whatever comes, there is no tokenizer to check
        text = f'{folder.name or "."}: does not load: {(str(error).splitlines() or [type(error).__name__])[0][:200]}'
        needs_more = (
            isinstance(error, ImportError) or 'trust_remote_code' in str(error) or 'sentencepiece' in str(error)
        )
        (findings.unchecked if needs_more else findings.problem)('tokenizer', text)
        return None


def _check_tokenizer(where: str, tokenizer: Any, rows: int, findings: Findings) -> None:
    vocabulary = tokenizer.get_vocab()
    beyond = sorted((number, token) for token, number in vocabulary.items() if number >= rows)
    special = [f'{i}' for i in tokenizer.all_special_ids if i is not None and not 0 <= i < rows]
    if beyond:
        shown = some([f'{token!r} ({number})' for number, token in beyond])
        findings.problem('tokenizer', f'{where}: {len(beyond)} tokens beyond the {rows} rows of the embedding: {shown}')
    elif special:
        findings.problem(
            'tokenizer', f'{where}: special tokens {some(special)} beyond the {rows} rows of the embedding'
        )
    else:
        findings.ok('tokenizer', f'{where}: {len(vocabulary)} tokens, {rows} rows in the embedding')
