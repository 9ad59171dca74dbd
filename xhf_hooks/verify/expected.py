"""The tensors that ``from_pretrained`` expects in a folder, from its model on the meta device and our exporter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from xhf_hooks.errors import BaseModelError, DamagedError, ModelError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.format import strict_json
from xhf_hooks.meta_model import peft_model, transformers_model
from xhf_hooks.meta_model.bounds import limited_modules
from xhf_hooks.meta_model.trial import in_child
from xhf_hooks.model.quiet_transformers import quiet
from xhf_hooks.model.tensors import input_embedding, names_by_identity
from xhf_hooks.sources import source_for

if TYPE_CHECKING:
    from peft import PeftConfig

T = TypeVar('T')

#: Limit for a base model; the adapter's own number of tensors says little about it.
_TENSORS_OF_A_BASE = 7000


@dataclass(frozen=True)
class ExpectedModel:
    """What the model that a config.json describes would save.

    Attributes:
        class_name: The class of transformers.
        shapes: Name to shape of each tensor that ``save_pretrained`` writes.
        ties: Groups of names that share one parameter.
        embedding_rows: Rows of the input embedding; None if there is none.
        ignored: Patterns of names that the class allows to be missing or unexpected.
    """

    class_name: str
    shapes: Mapping[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...]
    embedding_rows: int | None
    ignored: tuple[str, ...]

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


def expected_model(folder: Path, n_tensors: int, *, trust_remote_code: bool) -> ExpectedModel:
    """Build the model on the meta device with the installed transformers, in a child process.

    Args:
        n_tensors: Number of tensors in the folder; limits the size of the model that config.json may describe.

    Raises:
        BaseModelError: The installed transformers does not have the model.
        DamagedError: It has the model but refuses the config.
        ModelError: The model was built, but no exporter can tell what it saves.
    """
    task = partial(_expected, folder, n_tensors, trust_remote_code)
    return _in_child(task, 'building the model of config.json', n_tensors)


def expected_adapter(lora: PeftConfig, base: str, n_tensors: int) -> dict[str, tuple[int, ...]]:
    """The LoRA tensors that peft saves for this adapter on its base model; built like :func:`expected_model`.

    Args:
        base: Folder of the base model.
        n_tensors: Number of tensors in the adapter.

    Raises:
        ConfigError: peft refuses the adapter for this base model.
        XhfError: The base model cannot be built.
    """
    allowed = max(n_tensors, _TENSORS_OF_A_BASE)
    task = partial(_expected_adapter, lora, base, allowed)
    return _in_child(task, 'adapting the base model by adapter_config.json', allowed)


def _in_child(task: Callable[[], T], what: str, n_tensors: int) -> T:
    from transformers import AutoConfig, PreTrainedModel  # noqa: F401  (once, before the process forks)

    with quiet(), limited_modules(n_tensors):
        return in_child(task, what, n_tensors)


def _expected_adapter(lora: PeftConfig, base: str, n_tensors: int) -> dict[str, tuple[int, ...]]:
    config = transformers_model.load_config(base, trust_remote_code=False, why='the base model', n_tensors=n_tensors)
    model = transformers_model.build(config, 'AutoModelForCausalLM', trust_remote_code=False)
    adapted = peft_model.adapt(model, lora)
    entries = exporter_for(adapted, None, lora='adapter').entries(source_for(adapted).specs(), None)
    return {entry.hf_name: entry.shape for entry in entries}


def _expected(folder: Path, n_tensors: int, trust_remote_code: bool) -> ExpectedModel:
    from transformers import PreTrainedModel

    try:
        config = transformers_model.load_config(
            str(folder), trust_remote_code=trust_remote_code, why='this folder', n_tensors=n_tensors
        )
    except BaseModelError as error:
        if _is_known(folder):
            why = transformers_model.in_one_line(error.__cause__ or error.__context__ or error)
            raise DamagedError(f'transformers refuses config.json: {why}') from None
        raise
    if getattr(config, 'quantization_config', None) is not None:
        raise ModelError(f'{folder}: names and shapes of quantized weights cannot be checked')
    model = transformers_model.build(config, None, trust_remote_code=trust_remote_code)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f'{folder}: {type(model).__name__} is not a PreTrainedModel')
    entries = exporter_for(model, None).entries(source_for(model).specs(), None)
    names = [names for _, names in names_by_identity(model)]
    embedding = input_embedding(model)
    ignored = [
        pattern
        for attribute in ('_keys_to_ignore_on_load_missing', '_keys_to_ignore_on_load_unexpected')
        for pattern in getattr(model, attribute, None) or ()
    ]
    return ExpectedModel(
        class_name=type(model).__name__,
        shapes={entry.hf_name: entry.shape for entry in entries},
        ties=tuple(tuple(tied) for tied in names if len(tied) > 1),
        embedding_rows=embedding.shape[0] if embedding is not None and embedding.dim() == 2 else None,
        ignored=(*ignored, r'rotary_emb\.inv_freq$'),  # written by transformers before 4.31
    )


def _is_known(folder: Path) -> bool:
    from transformers import CONFIG_MAPPING

    config = strict_json.read(folder / 'config.json')
    return isinstance(config.get('model_type'), str) and config['model_type'] in CONFIG_MAPPING
