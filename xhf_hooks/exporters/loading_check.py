"""Loads what a save will hold before there is one: transformers and peft load empty tensors on the meta device.

``from_pretrained`` does its own renaming, conversions and tying, so this finds whatever will not come back, of any
cause. It reads no weights, and takes tenths of a second and some MB for a model of 8 B parameters.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xhf_hooks.compat.deepspeed import restore_inherited_init
from xhf_hooks.compat.transformers import kept_in_fp32_by_name, loaded_without_device_map
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.hf_assets import write_config
from xhf_hooks.exporters.on_meta import preserved_random_state, tensors_of_modules_on_meta, without_zero_init
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import error_text, some
from xhf_hooks.model import module_tensors
from xhf_hooks.planning.types import ExportEntry, Placement
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

#: Kinds of problems, and the names of the tensors that have them.
Problems = dict[str, list[str]]


def load_empty(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    placements: Sequence[Placement | ExportEntry],
    dtype: torch.dtype | str = 'auto',
    arguments: Mapping[str, Any] | None = None,
) -> tuple[PreTrainedModel, Problems]:
    """Load a model as ``from_pretrained`` will do. Runs on: the thread that trains.

    Args:
        kind: The class that config.json names.
        config: Is written to config.json, and read from there.
        dtype: The option ``torch_dtype``.
        arguments: Keyword arguments of the class besides the config.

    Returns:
        The model, on the meta device, and what transformers reports. Of tensors that are stored and that its config
        ties, transformers 4 makes one. transformers 5 does that only if their values are equal, so not here.

    Raises:
        ModelError: The config cannot be read.
        Exception: Anything, where loading cannot be tried.
    """
    with _as_if_alone(), tempfile.TemporaryDirectory(prefix='xhf_hooks_') as name:
        folder = Path(name)
        write_config(folder, config)
        try:
            read = type(config).from_pretrained(folder)
        except Exception as error:  # of any type, from custom code
            reason = error_text(error, 500)
            raise ModelError(f'{type(config).__name__} would not load its own config.json: {reason}') from error
        restore_inherited_init(kind)
        tensors = _empty(placements)
        load = partial(load_with_info, kind, None, dtype, config=read, state_dict=tensors, **(arguments or {}))
        try:
            model, problems = load(device_map={'': 'meta'})
        except Exception:  # of any type, from custom code; raised again if the other way fails, too
            planned_names = {place.hf_name for place in placements}
            loaded = loaded_without_device_map(
                load, planned_names, (partial(torch.device, 'meta'), tensors_of_modules_on_meta)
            )
            if loaded is None:
                raise
            model, problems = loaded
        return model, problems


def load_and_find_fp32(
    kind: Any,
    config: PretrainedConfig,
    entries: Sequence[ExportEntry],
    dtype: torch.dtype,
    arguments: Mapping[str, Any] | None,
) -> set[str]:
    """The names of the tensors that ``from_pretrained`` with a 16-bit dtype keeps in fp32. Runs on: all ranks.

    Raises:
        Exception: Anything, if the class cannot be loaded empty, and the installed transformers has no simple rule.
    """
    try:
        loaded, _ = load_empty(kind, config, entries, dtype, arguments)
    except Exception:  # of any type, from custom code; raised again if there is no simple rule
        by_name = kept_in_fp32_by_name(kind, [entry.hf_name for entry in entries], dtype)
        if by_name is None:
            raise
        return by_name
    return {name for name, tensor in module_tensors(loaded) if tensor.dtype == torch.float32}


def load_with_info(
    kind: Any, source: str | None, torch_dtype: torch.dtype | str = 'auto', **options: Any
) -> tuple[Any, Problems]:
    """Call ``from_pretrained`` of a class; returns the model, and what transformers reports of it."""
    model, info = kind.from_pretrained(
        source,
        torch_dtype=torch_dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported instead
        **options,
    )
    shapes = [  # transformers 4.57 gives only names
        one if isinstance(one, str) else f'{one[0]} {tuple(one[1])}, expected {tuple(one[2])}'
        for one in info['mismatched_keys']
    ]
    names = {'missing': info['missing_keys'], 'unexpected': info['unexpected_keys'], 'of other shape': shapes}
    return model, {problem: sorted(map(str, which)) for problem, which in names.items()}


def load_empty_adapter(
    base: PreTrainedModel, config: PeftConfig, placements: Sequence[Placement | ExportEntry]
) -> Problems:
    """Load an adapter with peft, onto a base on the meta device, and return what does not fit. Runs on: rank 0.

    Args:
        config: Is written to adapter_config.json, and read from there.
    """
    from peft import PeftConfig, get_peft_model

    with _as_if_alone(), tempfile.TemporaryDirectory(prefix='xhf_hooks_') as name:
        folder = Path(name)
        config.save_pretrained(folder)
        read = PeftConfig.from_pretrained(str(folder))
        read.init_lora_weights = False  # there are no weights to initialise or decompose
        with torch.device('meta'):
            model: PeftModel = get_peft_model(base, read)
        return load_adapter_and_tell(model, _empty(placements))


def load_adapter_and_tell(model: PeftModel, tensors: dict[str, torch.Tensor]) -> Problems:
    """Load an adapter's tensors into a model that has such an adapter, and return what does not fit."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    problems = differences(_shapes(tensors), _shapes(wanted))
    problems['unexpected'] = []  # found below
    if not problems['of other shape']:  # which peft refuses
        unexpected = set(set_peft_model_state_dict(model, tensors).unexpected_keys)
        # With modules_to_save and resized embeddings, peft writes these under more names than it reads
        written = get_peft_model_state_dict(model, save_embedding_layers=True).keys() if unexpected else ()
        # peft 0.13 reports them below the trained copy of the module, whose adapter is get_peft_model's
        problems['unexpected'] = sorted(
            name for name in unexpected if name.replace('.modules_to_save.default.', '.') not in written
        )
    return problems


def differences(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> Problems:
    """The differences in names and shapes of tensors."""
    shapes = {name: (found[name], shape) for name, shape in expected.items() if name in found}
    return {
        'missing': [name for name in expected if name not in found],
        'unexpected': [name for name in found if name not in expected],
        'of other shape': [f'{name} {one}, expected {two}' for name, (one, two) in shapes.items() if one != two],
    }


def require_none(
    problems: Problems,
    what: str,
    remedy: str = 'if the model is as it should be, register an exporter for it (docs/extending.md)',
) -> None:
    """Refuse a model whose saves will not load.

    Raises:
        ModelError: There are problems.
    """
    found = '; '.join(f'{len(names)} {problem}: {some(names, 5)}' for problem, names in problems.items() if names)
    if found:
        raise ModelError(
            f'{what} would not load what a save of this model holds: {found}. Nothing has been saved; {remedy}'
        )


def loading_not_checked(kind: type, error: Exception) -> str:
    """A line for the log."""
    return f'could not check in advance that saves will load: {kind.__name__}: {error_text(error, 300)}'


def needs_its_code(kind: type) -> list[str]:
    """A line for the log, if the class that loads is not one of transformers."""
    if kind.__module__.partition('.')[0] == 'transformers':
        return []
    remedy = f'{kind.__name__}.register_for_auto_class() puts its code into them'
    if kind.__module__ == '__main__':  # custom_object_save of transformers leaves out such code
        remedy = f'with the class in a module of its own, and not in the script, {remedy}'
    return [
        f'{kind.__name__} is a class of {kind.__module__}, not of transformers: only code that has it can load these '
        f'folders; {remedy}'
    ]


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Training notices nothing of the block: not by random numbers, nor by a dtype that a failure leaves behind."""
    dtype = torch.get_default_dtype()
    with quiet(), without_zero_init(), preserved_random_state():
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _empty(placements: Sequence[Placement | ExportEntry]) -> dict[str, torch.Tensor]:
    return {
        place.hf_name: torch.empty(place.shape, dtype=TORCH_DTYPES[place.dtype], device='meta') for place in placements
    }


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}
