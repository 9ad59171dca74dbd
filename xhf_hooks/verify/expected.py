"""Which tensors ``from_pretrained`` expects in a folder: its model, built without memory, asked by our exporter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xhf_hooks.errors import BaseModelError, DamagedError, ModelError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.format import strict_json
from xhf_hooks.meta_model import peft_model, transformers_model
from xhf_hooks.meta_model.bounds import limited_modules
from xhf_hooks.meta_model.trial import in_child
from xhf_hooks.model.tensors import names_by_identity
from xhf_hooks.sources import source_for

if TYPE_CHECKING:
    from peft import PeftConfig

T = TypeVar('T')

#: A LoRA checkpoint holds few of the tensors of its model.
_TENSORS_OF_A_BASE = 7000


@dataclass(frozen=True)
class ExpectedModel:
    """The model of a config.json.

    Attributes:
        class_name: Of transformers.
        shapes: Of the tensors that ``save_pretrained`` writes.
        ties: Names of one parameter, where there are several.
        embedding_rows: Rows of the input embedding; None where there is none.
        ignored: Patterns of names that the class does not mind to miss, or to find.
    """

    class_name: str
    shapes: Mapping[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...]
    embedding_rows: int | None
    ignored: tuple[str, ...]

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


def expected_model(folder: Path, n_tensors: int, *, trust_remote_code: bool) -> ExpectedModel:
    """Build it on the meta device, with the version of transformers that is installed, in a process of its own.

    Args:
        n_tensors: That the folder's files hold, which bounds what config.json may ask for.

    Raises:
        BaseModelError: This transformers does not know the model.
        DamagedError: It does, and refuses the config.
        ModelError: It can, and our exporter does not know what it saves.
    """
    task = partial(_expected, folder, n_tensors, trust_remote_code)
    return _in_child(task, 'building the model of config.json', n_tensors)


def expected_adapter(lora: PeftConfig, base: str, n_tensors: int) -> dict[str, tuple[int, ...]]:
    """The tensors that peft saves of a LoRA adapter, put onto its base model on the meta device, in such a process.

    Args:
        base: The folder of the base model.
        n_tensors: Of the adapter.

    Raises:
        ConfigError: peft refuses the adapter for this base model.
        XhfError: The base model cannot be built.
    """
    allowed = max(n_tensors, _TENSORS_OF_A_BASE)
    task = partial(_expected_adapter, lora, base, allowed)
    return _in_child(task, 'adapting the base model by adapter_config.json', allowed)


def _in_child(task: Callable[[], T], what: str, n_tensors: int) -> T:
    from transformers import AutoConfig, PreTrainedModel  # noqa: F401  (here, and not in each process)

    with transformers_model.quiet(), limited_modules(n_tensors):
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
        raise ModelError(f'{folder}: quantized weights have other names and shapes than the model')
    model = transformers_model.build(config, None, trust_remote_code=trust_remote_code)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f'{folder}: {type(model).__name__} is no model of transformers')
    entries = exporter_for(model, None).entries(source_for(model).specs(), None)
    names = [names for _, names in names_by_identity(model)]
    ignored = [
        pattern
        for attribute in ('_keys_to_ignore_on_load_missing', '_keys_to_ignore_on_load_unexpected')
        for pattern in getattr(model, attribute, None) or ()
    ]
    return ExpectedModel(
        class_name=type(model).__name__,
        shapes={entry.hf_name: entry.shape for entry in entries},
        ties=tuple(tuple(tied) for tied in names if len(tied) > 1),
        embedding_rows=_rows(model),
        ignored=(*ignored, r'rotary_emb\.inv_freq$'),  # written by transformers before 4.31
    )


def _is_known(folder: Path) -> bool:
    from transformers import CONFIG_MAPPING

    config = strict_json.read(folder / 'config.json')
    return isinstance(config.get('model_type'), str) and config['model_type'] in CONFIG_MAPPING


def _rows(model: Any) -> int | None:
    try:
        weight = getattr(model.get_input_embeddings(), 'weight', None)
    except (NotImplementedError, AttributeError):  # a model without token embeddings
        return None
    return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else None
