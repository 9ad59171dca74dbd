"""Judges weights and verdicts by reading the same spoiled files with torch, safetensors, transformers and peft."""

from __future__ import annotations

import json
import logging
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers import made_checkpoint
from tests.helpers.fuzz_cases import ORIGINAL, Case
from tests.helpers.fuzz_judges import left_behind

MANIFEST = 'xhf_manifest.json'


def judge(case: Case, status: int, root: Path, folder: Path) -> str:
    """'' if the command's folder or verdict is right or cannot be judged, else what is wrong."""
    if wrong := left_behind(case, folder, status):
        return wrong
    if status or '--dry-run' in case.argv:
        return ''
    if case.tool == 'convert':
        return _judge_weights(case, root / case.template, folder)
    if ORIGINAL in case.argv:
        return _judge_comparison(folder)
    return _judge_folder(case, root / case.template, folder)


# --- xhf-convert ---


def _judge_weights(case: Case, original: Path, folder: Path) -> str:
    found = {
        name: tensor for file in (folder / 'out').glob('*.safetensors') for name, tensor in load_file(file).items()
    }
    masters = 'float32' in case.argv
    true = said_by_checkpoint(case.template, original, use_fp32_master=masters)
    if case.kind in ('names', 'config', 'text'):
        expected = true  # the contents are unchanged
    else:
        try:
            expected = said_by_checkpoint(case.template, folder, use_fp32_master=masters)
        except Exception:  # torch cannot read it, or it is not a checkpoint: nothing to compare with
            return ''
    if found.keys() != true.keys():
        return f'other tensors: {sorted(found.keys() ^ true.keys())[:2]}'
    for name, tensor in found.items():
        if name not in expected:
            if 'not in the checkpoint' in (folder.parent / 'err').read_text():
                continue  # comes from the base model
            return 'a tensor that is not in the checkpoint'
        theirs = expected[name]
        if tensor.dtype != theirs.dtype or tensor.shape != theirs.shape or not _equal(tensor, theirs):
            rounded = tensor.dtype == torch.float32 and _equal(tensor, theirs.bfloat16().float())
            if rounded and 'note' in (folder.parent / 'err').read_text():
                continue
            return 'WRONG WEIGHTS: rounded without a word' if rounded else 'WRONG WEIGHTS'
    return ''


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def said_by_checkpoint(template: str, folder: Path, *, use_fp32_master: bool) -> dict[str, torch.Tensor]:
    """The weights that a conversion must write, by a separate reader that shares no code with the tested one."""
    if template == 'file':
        content = _load(folder / 'work_dir' / 'iter_5.pth')
        named = {name.removeprefix('llm.'): tensor for name, tensor in content['state_dict'].items()}
        return {name: tensor.contiguous() for name, tensor in named.items()}
    tag = folder / 'checkpoint-5' / 'global_step5'
    optims = [_load(file)['optimizer_state_dict'] for file in sorted(tag.glob('*_optim_states.pt'))]
    models = [_load(file) for file in sorted(tag.glob('*_model_states.pt'))]
    flat_key = 'fp32_flat_groups' if template == 'stage3' else 'single_partition_of_fp32_groups'
    groups = [optim[flat_key] for optim in optims]
    if template == 'stage3':
        fp32 = _of_slices(models[0]['param_shapes'], groups)
    else:
        fp32 = _of_partitions(models[0]['param_shapes'], groups)
    found = {}
    for name, master in fp32.items():
        stored = models[0]['module'].get(name)
        if use_fp32_master:
            found[_exported(name)] = master
        elif template != 'stage3' and stored is not None:
            found[_exported(name)] = stored.contiguous()
        else:
            found[_exported(name)] = master.to(stored.dtype)
    return found


def _exported(name: str) -> str:
    return name.replace('.default.weight', '.weight') if 'lora_' in name else name


def _of_slices(shapes: list[dict[str, Any]], groups: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    flat, at, found = [torch.cat(group) for group in groups], 0, {}
    for name, shape in (item for group in shapes for item in group.items()):
        numel = torch.Size(shape).numel()
        size = -(-numel // len(flat))
        found[name] = torch.cat([vector[at : at + size] for vector in flat])[:numel].reshape(shape)
        at += size
    return found


def _of_partitions(shapes: list[dict[str, Any]], groups: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    found = {}
    for index, group in enumerate(shapes):
        vector, at = torch.cat([rank[index] for rank in groups]), 0
        for name, shape in group.items():
            numel = torch.Size(shape).numel()
            found[name] = vector[at : at + numel].reshape(shape)
            at += numel
    return found


def _load(file: Path) -> Any:
    ours = [
        value
        for value in vars(made_checkpoint).values()
        if getattr(value, '__module__', '') == made_checkpoint.__name__
    ]
    with torch.serialization.safe_globals([*ours, getattr, OrderedDict]):
        return torch.load(file, weights_only=True, map_location='cpu')


# --- xhf-verify ---


def _judge_comparison(folder: Path) -> str:
    if 'identical' not in (folder.parent / 'out_text').read_text().splitlines()[-1]:
        return ''
    one, other = (_tensors(folder / name) for name in ('model', ORIGINAL))
    if one.keys() != other.keys() or not all(_equal(tensor, other[name]) for name, tensor in one.items()):
        return 'SAID TO BE IDENTICAL, and it is not'
    return ''


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob('*.safetensors')) for name, tensor in load_file(file).items()}


def _judge_folder(case: Case, original: Path, folder: Path) -> str:
    said = (folder.parent / 'out_text').read_text()
    model = folder / 'model'
    manifest = model / MANIFEST
    if manifest.is_file() and '--no-read' not in case.argv:
        return _judge_by_manifest(original / 'model', model)
    told_in_json = '"unchecked"' in said and '"check": "config"' in said
    if 'unchecked  config' in said or told_in_json or '--no-read' in case.argv:
        return ''
    return _judge_by_loading(case, model)


def _judge_by_manifest(original: Path, model: Path) -> str:
    true, found = (_described(folder / MANIFEST) for folder in (original, model))
    if true != found:
        if found['version'] == 1:
            return ''
        return 'GOOD, and the manifest is another'
    for name in true['files']:
        if (original / name).read_bytes() != (model / name).read_bytes():
            return f'GOOD, and {name} is another'
    return ''


def _described(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    files = {
        name: (
            file['nbytes'],
            file['crc32'],
            {n: (t['shape'], t['dtype'], t['crc32'], t['non_finite']) for n, t in (file.get('tensors') or {}).items()},
        )
        for name, file in content['files'].items()
    }
    return {'version': content['format_version'], 'files': files}


def _judge_by_loading(case: Case, model: Path) -> str:
    """Without a manifest: transformers must load the folder with no tensor missing."""
    import transformers

    logging.disable(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter('ignore')
    try:
        if case.template == 'adapter':
            from peft import PeftModel

            base = transformers.AutoModelForCausalLM.from_pretrained('base')
            PeftModel.from_pretrained(base, str(model))
            return ''
        config = transformers.AutoConfig.from_pretrained(model)
        model_class = getattr(transformers, (config.architectures or ['AutoModelForCausalLM'])[0])
        _, info = model_class.from_pretrained(model, output_loading_info=True)
        if '--no-model' in case.argv:
            return ''
        lacking = {
            key: sorted(map(str, info.get(key) or ()))[:2]
            for key in ('missing_keys', 'mismatched_keys', 'unexpected_keys')
        }
        if any(lacking.values()):
            return f'GOOD, and transformers says {[key for key in lacking if lacking[key]]}'
        if 'ok         tokenizer' in (model.parents[1] / 'out_text').read_text():
            transformers.AutoTokenizer.from_pretrained(model)
    except Exception as error:
        if '--no-model' in case.argv:
            return ''
        return f'GOOD, and loading it fails: {type(error).__name__}'
    return ''
