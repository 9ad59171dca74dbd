"""Checks config.json against the tensors, the tokenizer against the embedding, and tied weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import BaseModelError, DamagedError, ModelError, PlanError
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import counted, some
from xhf_hooks.integrity.checksums import FileSums
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import FolderContent, WeightFolder
from xhf_hooks.verify.config_kinds import wrong_kinds
from xhf_hooks.verify.model_reader import INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS
from xhf_hooks.verify.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from xhf_hooks.verify.expected import ExpectedModel


def check_texts(content: FolderContent, findings: Findings) -> None:
    """Check that every JSON file parses."""
    damaged = 0
    for name in content.files:
        if name.endswith('.json') and not name.endswith('.index.json'):
            try:
                strict_json.read(content.path / name)
            except DamagedError as error:
                if 'expected a JSON object' not in str(error):  # some tokenizers have lists in their vocabulary files
                    findings.problem('texts', str(error))
                    damaged += 1
    if not damaged:
        findings.ok('texts', 'all JSON files are well formed')


def check_model(
    folder: WeightFolder,
    sums: Mapping[str, FileSums],
    findings: Findings,
    *,
    trust_remote_code: bool,
) -> None:
    """Check the weights of one folder against its config.json.

    Args:
        sums: Checksums by file, relative to the checkpoint; {} if nothing was read.
    """
    where = folder.where
    if 'config.json' not in folder.files:
        findings.unchecked('config', f'{where}: no config.json beside the weights')
        return
    config = folder.read_json('config.json')
    if config is None:
        return
    tensors = folder.tensors()
    expected, rows = None, None
    wrong = wrong_kinds(config)
    if wrong:
        findings.problem('config', f'{where}: config.json: {some(wrong)}')
    else:
        from xhf_hooks.verify.expected import expected_model  # imports torch and transformers

        try:
            expected = expected_model(folder.path, len(tensors), trust_remote_code=trust_remote_code)
        except (BaseModelError, ModelError, PlanError) as error:
            findings.unchecked('config', f'{where}: names and shapes were not checked: {error}')
        except DamagedError as error:
            findings.problem('config', f'{where}: {error}')
    if expected is not None:
        _compare_shapes(where, expected, folder, findings)
        rows = expected.embedding_rows
    else:
        rows = _rows_by_name(folder)
    _check_ties(where, config, expected, folder, sums, findings)
    wrong = wrong_kinds(folder.read_json('generation_config.json') or {})
    if wrong:
        findings.problem('config', f'{where}: generation_config.json: {some(wrong)}')
    if not trust_remote_code:
        _tell_of_code(folder, config, findings)
    check_vocabulary(folder, rows, findings, trust_remote_code=trust_remote_code)


def _tell_of_code(folder: WeightFolder, config: Mapping[str, Any], findings: Findings) -> None:
    from xhf_hooks.meta_model.transformers_model import own_code

    files = own_code(config, folder.read_json('tokenizer_config.json') or {})
    if files:
        findings.note('code', f'{folder.where}: has custom code ({", ".join(files)}), which was not run')


def _compare_shapes(where: str, expected: ExpectedModel, folder: WeightFolder, findings: Findings) -> None:
    tensors = folder.tensors()
    tied = {name: group for group in expected.ties for name in group}
    missing = [
        name
        for name in expected.shapes
        if name not in tensors and not expected.ignores(name) and not any(t in tensors for t in tied.get(name, ()))
    ]
    extra = [n for n in tensors if n not in expected.shapes and n not in tied and not expected.ignores(n)]
    other = [
        f'{name} expected {shape}, found {tensors[name].shape}'
        for name, shape in expected.shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    for what, names in (('missing', missing), ('unexpected', extra), ('of other shapes', other)):
        if names:
            text = f'{counted(len(names), "tensor")} {what} for {expected.class_name} of config.json: {some(names)}'
            findings.problem('config', f'{where}: {text}')
    if not (missing or extra or other):
        n_tensors = counted(len(expected.shapes), 'tensor')
        findings.ok('config', f'{where}: names and shapes match {expected.class_name} ({n_tensors})')


def _check_ties(
    where: str,
    config: Mapping[str, Any],
    expected: ExpectedModel | None,
    folder: WeightFolder,
    sums: Mapping[str, FileSums],
    findings: Findings,
) -> None:
    tensors = folder.tensors()
    if expected is not None:
        groups = [[name for name in group if name in tensors] for group in expected.ties]
    elif config.get('tie_word_embeddings') is True:
        ends = (INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS)
        groups = [[name for name in tensors for end in ends if name.endswith(end)]]
    else:
        return
    groups = [group for group in groups if len(group) > 1]
    crcs = _tensor_sums(folder, sums)
    for group in groups:
        if len({(tensors[name].shape, tensors[name].dtype) for name in group}) > 1:
            findings.problem('ties', f'{where}: config.json ties {some(group)}, but their shapes or dtypes differ')
        elif not all(name in crcs for name in group):
            findings.unchecked('ties', f'{where}: {some(group)} are tied, but were not read')
        elif len({crcs[name] for name in group}) > 1:
            findings.problem('ties', f'{where}: config.json ties {some(group)}, but their values differ')
    if not findings.has_problem('ties'):
        said = 'stored once' if not groups else f'equal ({len(groups)} sets)'
        if groups or (expected is not None and expected.ties):
            findings.ok('ties', f'{where}: tied weights are {said}')


def _tensor_sums(folder: WeightFolder, sums: Mapping[str, FileSums]) -> dict[str, int]:
    found: dict[str, int] = {}
    for file in folder.loaded():
        read = sums.get(folder.prefix + file)
        found |= read.tensors if read is not None else {}
    return found


def _rows_by_name(folder: WeightFolder) -> int | None:
    found = {e.shape[0] for n, e in folder.tensors().items() if n.endswith(INPUT_EMBEDDINGS) and len(e.shape) == 2}
    return found.pop() if len(found) == 1 else None
