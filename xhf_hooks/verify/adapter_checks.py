"""adapter_config.json against the tensors of a LoRA adapter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import CheckpointError, ConfigError, XhfError
from xhf_hooks.format.safetensors import FLOAT_DTYPES, HeaderEntry
from xhf_hooks.format.text import some
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import WeightFolder, read_headers, scan

if TYPE_CHECKING:
    from peft import PeftConfig

#: Names that peft's ``get_peft_model_state_dict`` writes; an embedding's have no ``.weight``.
_PAIR = re.compile(r'(?P<module>.+)\.lora_(?P<kind>A|B|embedding_A|embedding_B)(?:\.weight)?')
_PREFIX = 'base_model.model.'  # what peft's names have before the base model's
_OTHER_HALF = {'A': 'B', 'B': 'A', 'embedding_A': 'embedding_B', 'embedding_B': 'embedding_A'}


def check_adapter(folder: WeightFolder, findings: Findings) -> None:
    """Ranks, pairs and modules of one adapter."""
    where = folder.where
    if 'adapter_config.json' not in folder.files:
        findings.problem('adapter', f'{where}: adapter_model.safetensors, and no adapter_config.json')
        return
    config = folder.read_json('adapter_config.json')
    if config is None:
        return
    if not isinstance(config.get('peft_type'), str):
        findings.problem('adapter', f'{where}: peft_type is {str(config.get("peft_type"))[:40]}, expected a name')
        return
    if config['peft_type'] != 'LORA':
        findings.unchecked('adapter', f'{where}: peft_type {config["peft_type"][:40]}: only LORA is known')
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
    bad, lora = _bad_fields(config, folder), None
    if not bad:
        try:
            lora = _peft_config(folder.path)
        except ConfigError as error:
            bad = [(str(error).splitlines() or ['peft cannot read its adapter_config.json'])[0][:300]]
    for problem in (*bad, *_other_shapes(pairs, config)):
        findings.problem('adapter', f'{where}: {problem}')
    if len(findings.found) == before and lora is not None:
        for problem in _loaded_otherwise(folder, config, lora):
            findings.problem('adapter', f'{where}: {problem}')
    if len(findings.found) == before:
        findings.ok('adapter', f'{where}: {len(pairs) // 2} LoRA pairs of rank {config.get("r")}')
    _check_base(where, config, findings)


def _other_rank(module: str, kind: str, entry: HeaderEntry, config: Mapping[str, Any]) -> str | None:
    if len(entry.shape) < 2:
        return f'{module} {entry.shape}'
    found = entry.shape[1 if kind.endswith('B') else 0]
    patterns = config.get('rank_pattern')
    given = [config.get('r'), *(patterns.values() if isinstance(patterns, dict) else ())]
    allowed = {rank for rank in given if type(rank) is int}
    if config.get('target_parameters'):  # several experts in one tensor: ranks of all of them
        return None if any(r > 0 and found % r == 0 for r in allowed) else f'{module} {found}'
    return None if found in allowed else f'{module} {found}'


def _bad_fields(config: Mapping[str, Any], folder: WeightFolder) -> list[str]:
    """What peft would stumble over when it loads the adapter."""
    bad = [
        f'{name} is {str(config[name])[:40]!r}, expected an object'
        for name in ('rank_pattern', 'alpha_pattern')
        if not isinstance(config.get(name), (dict, type(None)))
    ]
    saved = config.get('modules_to_save')
    if not isinstance(saved, (list, type(None))):
        return [*bad, f'modules_to_save is {str(saved)[:40]!r}, expected a list']
    paths = [f'.{name}.' for name in folder.tensors()]
    lacking = [str(name) for name in saved or () if not any(f'.{name}.' in path for path in paths)]
    if lacking:
        bad.append(f'modules_to_save names {some(lacking)}, of which there is no tensor')
    return bad


def _peft_config(folder: Path) -> PeftConfig | None:
    """adapter_config.json as peft reads it; None where peft is not installed.

    Raises:
        ConfigError: peft cannot read it.
    """
    from xhf_hooks.meta_model.peft_model import adapter_config_in

    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of options that this version does not know
            return adapter_config_in(folder)
    except ImportError:  # of peft
        return None


def _other_shapes(pairs: Mapping[tuple[str, str], HeaderEntry], config: Mapping[str, Any]) -> list[str]:
    """Pairs whose product has not the shape of the weight that they are added to, as far as the base is there."""
    base = config.get('base_model_name_or_path')
    if not isinstance(base, str) or not base or '\0' in base or not Path(base).is_dir():
        return []
    try:
        weights = {n: e for folder in read_headers(scan(Path(base)), Findings()) for n, e in folder.tensors().items()}
    except CheckpointError:
        return []
    wrong = []
    for (module, kind), entry in pairs.items():
        other, weight = pairs.get((module, 'A')), weights.get(f'{module.removeprefix(_PREFIX)}.weight')
        if kind != 'B' or other is None or weight is None or len(weight.shape) != 2 or weight.dtype not in FLOAT_DTYPES:
            continue  # a quantized weight has another shape
        made = (entry.shape[0], other.shape[-1])
        if len(entry.shape) == len(other.shape) == 2 and made not in (weight.shape, weight.shape[::-1]):
            wrong.append(f'{module} {made}, the base model has {weight.shape}')
    return [f'pairs that do not fit: {some(wrong)}'] if wrong else []


def _loaded_otherwise(folder: WeightFolder, config: Mapping[str, Any], lora: PeftConfig) -> list[str]:
    """What peft makes of adapter_config.json and the base model beside it, against the tensors of the folder."""
    from xhf_hooks.verify.expected import expected_adapter

    base = config.get('base_model_name_or_path')
    if config.get('task_type') not in (None, 'CAUSAL_LM') or not isinstance(base, str) or not _is_folder(base):
        return []  # other tasks put a head of their own onto the base model
    tensors = folder.tensors()
    try:
        expected = expected_adapter(lora, base, len(tensors))
    except ConfigError as error:
        return [str(error)[:300]]
    except XhfError:  # the base model is no model of causal language, or is not whole: not ours to judge
        return []
    found = {name: entry.shape for name, entry in tensors.items() if '.lora_' in name}
    wanted = {name: shape for name, shape in expected.items() if '.lora_' in name and 'embedding' not in name}
    lacking = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in expected]
    other = [
        f'{name} {found[name]}, expected {shape}' for name, shape in wanted.items() if found.get(name, shape) != shape
    ]
    wrong = {'misses': lacking, 'does not know': unknown, 'has in other shapes': other}
    return [f'peft, as adapter_config.json sets it up, {what} {some(names)}' for what, names in wrong.items() if names]


def _is_folder(base: str) -> bool:
    return bool(base) and '\0' not in base and (Path(base) / 'config.json').is_file()


def _check_base(where: str, config: Mapping[str, Any], findings: Findings) -> None:
    base = config.get('base_model_name_or_path')
    if isinstance(base, str) and base and (Path(base) / 'config.json').is_file():
        findings.ok('adapter', f'{where}: its base model {base} is there')
    else:
        findings.unchecked('adapter', f'{where}: its base model {str(base)[:200]} is not on this machine')
