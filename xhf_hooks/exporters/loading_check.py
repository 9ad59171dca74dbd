"""What will not come back of a save is found before there is one, and refused. Here peft loads empty adapters, too.

transformers loads models in :mod:`.ask_load`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.on_meta import preserved_random_state, without_zero_init
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import error_text, some
from xhf_hooks.planning.types import ExportEntry, Placement
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

#: Kinds of problems, and the names of the tensors that have them.
Problems = dict[str, list[str]]


def load_empty_adapter(
    base: PreTrainedModel, config: PeftConfig, placements: Sequence[Placement | ExportEntry]
) -> Problems:
    """Load an adapter with peft, onto a base on the meta device, and return what does not fit. Runs on: rank 0.

    Args:
        config: Is written to adapter_config.json, and read from there.
    """
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    tensors = {one.hf_name: torch.empty(one.shape, dtype=TORCH_DTYPES[one.dtype], device='meta') for one in placements}
    with as_if_alone(), tempfile.TemporaryDirectory(prefix='xhf_hooks_') as name:
        folder = Path(name)
        config.save_pretrained(folder)
        read = PeftConfig.from_pretrained(str(folder))
        read.init_lora_weights = False  # there are no weights to initialise or decompose
        with torch.device('meta'):
            model: PeftModel = get_peft_model(base, read)
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
def as_if_alone() -> Iterator[None]:
    """Training notices nothing of the block: not by random numbers, nor by a dtype that a failure leaves behind."""
    dtype = torch.get_default_dtype()
    with quiet(), without_zero_init(), preserved_random_state():
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}
