"""Checks of a LoRA adapter: adapter_config.json against the tensors and the base model."""

from __future__ import annotations

import os
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

#: Names that peft's ``get_peft_model_state_dict`` writes; those of embeddings have no ``.weight``.
_PAIR = re.compile(r'(?P<module>.+)\.lora_(?P<kind>A|B|embedding_A|embedding_B)(?:\.weight)?')
_PREFIX = 'base_model.model.'  # peft puts it before the base model's names
_OTHER_HALF = {'A': 'B', 'B': 'A', 'embedding_A': 'embedding_B', 'embedding_B': 'embedding_A'}


def check_adapter(folder: WeightFolder, findings: Findings) -> None:
    """Check the config, ranks, pairs and base model of one adapter."""
    where = folder.where
    if 'adapter_config.json' not in folder.files:
        findings.problem('adapter', f'{where}: adapter_model.safetensors without adapter_config.json')
        return
    config = folder.read_json('adapter_config.json')
    if config is None:
        return
    if not isinstance(config.get('peft_type'), str):
        findings.problem('adapter', f'{where}: peft_type is {str(config.get("peft_type"))[:40]}, expected a string')
        return
    if config['peft_type'] != 'LORA':
        findings.unchecked('adapter', f'{where}: peft_type {config["peft_type"][:40]}: only LORA can be checked')
        return
    before = len(findings.found)
    pairs = {(m['module'], m['kind']): e for n, e in folder.tensors().items() if (m := _PAIR.fullmatch(n))}
    wrong, lora = _load_problems(folder, config)
    for problem in (*_pair_problems(pairs, config), *wrong, *_misfits(pairs, config)):
        findings.problem('adapter', f'{where}: {problem}')
    if len(findings.found) == before and lora is not None:
        for problem in _differences_from_peft(folder, config, lora):
            findings.problem('adapter', f'{where}: {problem}')
    if len(findings.found) == before:
        findings.ok('adapter', f'{where}: {len(pairs) // 2} LoRA pairs of rank {config.get("r")}')
    base = _base_folder(config)
    if base is not None and (base / 'config.json').is_file():
        findings.ok('adapter', f'{where}: base model found at {base}')
    else:
        name = str(config.get('base_model_name_or_path'))[:200]
        findings.unchecked('adapter', f'{where}: base model {name} is not on this machine')


def _pair_problems(pairs: Mapping[tuple[str, str], HeaderEntry], config: Mapping[str, Any]) -> list[str]:
    if not pairs:
        return ['holds no LoRA tensors']
    problems = []
    alone = [f'{module}.lora_{kind}' for module, kind in pairs if (module, _OTHER_HALF[kind]) not in pairs]
    if alone:
        problems.append(f'the other half is missing of {some(alone)}')
    wrong = [text for (module, kind), entry in pairs.items() if (text := _wrong_rank(module, kind, entry, config))]
    if wrong:
        problems.append(f'ranks differ from adapter_config.json: {some(wrong)}')
    return problems


def _wrong_rank(module: str, kind: str, entry: HeaderEntry, config: Mapping[str, Any]) -> str | None:
    if len(entry.shape) < 2:
        return f'{module} {entry.shape}'
    found = entry.shape[1 if kind.endswith('B') else 0]
    patterns = config.get('rank_pattern')
    given = [config.get('r'), *(patterns.values() if isinstance(patterns, dict) else ())]
    allowed = {rank for rank in given if type(rank) is int}
    if config.get('target_parameters'):  # the tensor holds all experts: a multiple of the rank
        return None if any(r > 0 and found % r == 0 for r in allowed) else f'{module} {found}'
    return None if found in allowed else f'{module} {found}'


def _load_problems(folder: WeightFolder, config: Mapping[str, Any]) -> tuple[list[str], PeftConfig | None]:
    """Fields of adapter_config.json that make peft fail; else the config as peft reads it, if it is installed."""
    from xhf_hooks.meta_model.peft_model import adapter_config_in

    wrong = [
        f'{name} is {str(config[name])[:40]!r}, expected an object'
        for name in ('rank_pattern', 'alpha_pattern')
        if not isinstance(config.get(name), (dict, type(None)))
    ]
    saved = config.get('modules_to_save')
    if not isinstance(saved, (list, type(None))):
        return [*wrong, f'modules_to_save is {str(saved)[:40]!r}, expected a list'], None
    paths = [f'.{name}.' for name in folder.tensors()]
    missing = [str(name) for name in saved or () if not any(f'.{name}.' in path for path in paths)]
    if missing:
        wrong.append(f'modules_to_save names {some(missing)}, but the folder has no such tensors')
    if wrong:
        return wrong, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # about options that this version of peft does not know
            return [], adapter_config_in(folder.path)
    except ImportError:
        return [], None
    except ConfigError as error:
        return [(str(error).splitlines() or ['peft cannot read adapter_config.json'])[0][:300]], None


def _misfits(pairs: Mapping[tuple[str, str], HeaderEntry], config: Mapping[str, Any]) -> list[str]:
    """Pairs whose product differs in shape from the base weight. Needs neither peft nor transformers."""
    base = _base_folder(config)
    if base is None:
        return []
    try:
        weights = {n: e for folder in read_headers(scan(base), Findings()) for n, e in folder.tensors().items()}
    except CheckpointError:
        return []
    wrong = []
    for (module, kind), entry in pairs.items():
        other, weight = pairs.get((module, 'A')), weights.get(f'{module.removeprefix(_PREFIX)}.weight')
        if kind != 'B' or other is None or weight is None or len(weight.shape) != 2 or weight.dtype not in FLOAT_DTYPES:
            continue  # quantized weights are stored in other shapes
        product = (entry.shape[0], other.shape[-1])
        if len(entry.shape) == len(other.shape) == 2 and product not in (weight.shape, weight.shape[::-1]):
            wrong.append(f'{module} {product}, the base model has {weight.shape}')
    return [f'pairs do not fit the base model: {some(wrong)}'] if wrong else []


def _differences_from_peft(folder: WeightFolder, config: Mapping[str, Any], lora: PeftConfig) -> list[str]:
    """Build the adapter with peft on its base model (meta device) and compare the LoRA tensors."""
    from xhf_hooks.verify.expected import expected_adapter

    base = _base_folder(config)
    if base is None or not (base / 'config.json').is_file():
        return []
    if config.get('task_type') not in (None, 'CAUSAL_LM'):  # other tasks add a head to the base model
        return []
    tensors = folder.tensors()
    try:
        expected = expected_adapter(lora, str(base), len(tensors))
    except ConfigError as error:
        return [str(error)[:300]]
    except XhfError:  # the base model is incomplete or not a causal language model: not checked here
        return []
    found = {name: entry.shape for name, entry in tensors.items() if '.lora_' in name}
    wanted = {name: shape for name, shape in expected.items() if '.lora_' in name and 'embedding' not in name}
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in expected]
    other = [
        f'{name} {found[name]}, expected {shape}' for name, shape in wanted.items() if found.get(name, shape) != shape
    ]
    differences = {'missing': missing, 'unexpected': extra, 'of other shapes': other}
    return [
        f'tensors {what}, compared with what peft builds from adapter_config.json: {some(names)}'
        for what, names in differences.items()
        if names
    ]


def _base_folder(config: Mapping[str, Any]) -> Path | None:
    """The folder of the base model, if it is on this machine."""
    base = config.get('base_model_name_or_path')
    return Path(base) if isinstance(base, str) and os.path.isdir(base) else None
