"""adapter_config.json against the tensors of a LoRA adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import HeaderEntry
from xhf_hooks.format.text import some
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import FolderContent, WeightFolder

#: Names that peft's ``get_peft_model_state_dict`` writes; an embedding's have no ``.weight``.
_PAIR = re.compile(r'(?P<module>.+)\.lora_(?P<kind>A|B|embedding_A|embedding_B)(?:\.weight)?')
_OTHER_HALF = {'A': 'B', 'B': 'A', 'embedding_A': 'embedding_B', 'embedding_B': 'embedding_A'}


def check_adapter(content: FolderContent, folder: WeightFolder, findings: Findings) -> None:
    """Ranks, pairs and modules of one adapter."""
    where = folder.name or '.'
    if 'adapter_config.json' not in content.in_folder(folder.name):
        findings.problem('adapter', f'{where}: adapter_model.safetensors, and no adapter_config.json')
        return
    try:
        config = strict_json.read(folder.path / 'adapter_config.json')
    except DamagedError:
        return  # reported with the texts
    if config.get('peft_type') != 'LORA':
        findings.unchecked('adapter', f'{where}: peft_type {str(config.get("peft_type"))[:40]}: only LORA is known')
        return
    before = len(findings.found)
    pairs = {(m['module'], m['kind']): e for n, e in folder.tensors().items() if (m := _PAIR.fullmatch(n))}
    if not pairs:
        findings.problem('adapter', f'{where}: no tensor is one of a LoRA adapter')
    alone = [f'{module}.lora_{kind}' for module, kind in pairs if (module, _OTHER_HALF[kind]) not in pairs]
    if alone:
        findings.problem('adapter', f'{where}: the other half is missing of {some(alone)}')
    wrong = [text for (module, kind), entry in pairs.items() if (text := _other_rank(module, kind, entry, config))]
    if wrong:
        findings.problem('adapter', f'{where}: ranks that adapter_config.json does not give: {some(wrong)}')
    if len(findings.found) == before:
        findings.ok('adapter', f'{where}: {len(pairs) // 2} LoRA pairs of rank {config.get("r")}')
    _check_base(where, config, findings)


def _other_rank(module: str, kind: str, entry: HeaderEntry, config: Mapping[str, Any]) -> str | None:
    if len(entry.shape) < 2:
        return f'{module} {entry.shape}'
    found = entry.shape[1 if kind.endswith('B') else 0]
    patterns = config.get('rank_pattern')
    allowed = {config.get('r'), *(patterns.values() if isinstance(patterns, dict) else ())}
    if config.get('target_parameters'):  # several experts in one tensor: ranks of all of them
        return None if any(type(r) is int and r > 0 and found % r == 0 for r in allowed) else f'{module} {found}'
    return None if found in allowed else f'{module} {found}'


def _check_base(where: str, config: Mapping[str, Any], findings: Findings) -> None:
    base = config.get('base_model_name_or_path')
    if isinstance(base, str) and base and (Path(base) / 'config.json').is_file():
        findings.ok('adapter', f'{where}: its base model {base} is there')
    else:
        findings.unchecked('adapter', f'{where}: its base model {str(base)[:200]} is not on this machine')
