"""The names of a checkpoint's tensors before anything is matched: those that the trained model itself gives them.

Nothing here depends on the model. What an older transformers called its tensors is in :mod:`.older_names`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from xhf_hooks.errors import CheckpointError, ConfigError
from xhf_hooks.format.text import counted, some
from xhf_hooks.model import without_wrappers
from xhf_hooks.sources.stored_tensors import StoredTensor

#: The name that the adapter of a meta model has; peft's own default.
ADAPTER = 'default'
#: Module or dict of peft, and the name of an adapter in it (peft ``tuners/lora/layer.py``, ``utils/other.py``).
_OF_ADAPTER = re.compile(
    r'(?<=\.)(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|modules_to_save|trainable_tokens_delta)'
    r'\.(?!(?:weight|bias)$)([^.]+)(?=\.|$)'
)
#: peft leaves out the name where it saves an adapter by itself (peft ``utils/save_and_load.py``).
_WITHOUT_ADAPTER = re.compile(r'(?<=\.)(lora_[AB](?=\.(?:weight|bias)$)|lora_(?:embedding_[AB]|magnitude_vector)$)')
#: The state that bitsandbytes stores with a weight: of 4 bits below its name, of 8 bits beside it (``functional.py``,
#: ``QuantState.as_dict``; ``nn/modules.py``, ``Linear8bitLt``). DeepSpeed saves it even where it leaves out the weight.
_OF_QUANTIZER = re.compile(
    r'(.+)\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)|(.+\.)(?:SCB|weight_format)'
)
#: What peft adds to the names of tensors that it wraps.
_OF_PEFT = re.compile(
    r'(?<=\.)(?:base_layer|original_module|token_adapter|modules_to_save\.[^.]+)\.|(?:(?<=\.)|^)base_model\.model\.'
)


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of a checkpoint, under the names that the trained model gives them.

    Attributes:
        trained: Names of the parameters that are known to be trained; None if nothing shows it.
        quantized: Names of weights that training had quantized. They are left out, with the state of their quantizer.
        notes: Messages for the log.
    """

    tensors: list[StoredTensor]
    trained: frozenset[str] | None
    quantized: frozenset[str]
    notes: list[str]


def name_as_in_model(
    tensors: Iterable[StoredTensor], trained: Collection[str] | None, adapter_folder: str
) -> NamedTensors:
    """Give tensors names without wrappers, and the trained adapter the name that it has in a meta model.

    Args:
        trained: As of :class:`NamedTensors`, by the names in the checkpoint.
        adapter_folder: The name of the folder with the adapter's config; peft calls it as the adapter.

    Raises:
        CheckpointError: Two tensors would have one name.
        ConfigError: Several adapters may be the trained one.
    """
    named = _without_wrappers(tensors)
    trained = None if trained is None else frozenset(map(without_wrappers, trained))
    named, notes = _with_one_adapter(named, trained, adapter_folder)
    weights = {tensor.name: _weight_of_state(tensor.name) for tensor in named}
    quantized = frozenset(filter(None, weights.values()))
    left = [tensor for tensor in named if tensor.name not in quantized and weights[tensor.name] is None]
    return NamedTensors(left, trained, quantized, notes)


def name_in_base(name: str) -> str:
    """The name that a tensor has without peft's modules around its own."""
    return _OF_PEFT.sub('', name)


def without_adapters(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A model's own tensors, without those that adapters add, by the names that they have without peft.

    Of a module that peft copied, the trained copy is the model's own.
    """
    copied = {name_in_base(name) for name in stored if '.modules_to_save.' in name}
    found = {}
    for name, tensor in stored.items():
        plain = name_in_base(name)
        if '.modules_to_save.' in name or (plain not in copied and not is_of_adapter(name)):
            found[plain] = tensor
    return found


def is_of_adapter(name: str) -> bool:
    """Whether peft made the tensor for an adapter."""
    return '.modules_to_save.' in name or _OF_ADAPTER.search(name) is not None


def _without_wrappers(tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    named: dict[str, StoredTensor] = {}
    for tensor in tensors:
        plain = (without_wrappers(name) for name in (tensor.name, *tensor.aliases))
        name, *aliases = dict.fromkeys(_WITHOUT_ADAPTER.sub(rf'\1.{ADAPTER}', name) for name in plain)
        if name in named:
            raise CheckpointError(
                f'{tensor.name}: the checkpoint has two tensors of this name without wrappers such as torch.compile; '
                f'take another checkpoint'
            )
        named[name] = replace(tensor, name=name, aliases=tuple(aliases))
    return list(named.values())


def _with_one_adapter(
    tensors: list[StoredTensor], trained: Collection[str] | None, adapter_folder: str
) -> tuple[list[StoredTensor], list[str]]:
    """Leave out the adapters that are not trained, such as TRL's ``reference``, and rename the one that is."""
    names = [name for tensor in tensors for name in (tensor.name, *tensor.aliases)]
    adapters = {match[2]: name for name in names if (match := _OF_ADAPTER.search(name))}
    if adapters.keys() <= {ADAPTER}:
        return tensors, []
    chosen = _trained_adapter(set(adapters), names, trained, adapter_folder)
    kept = []
    for tensor in tensors:
        found = _OF_ADAPTER.search(tensor.name)
        if found is None or found[2] == chosen:
            renamed = [_OF_ADAPTER.sub(rf'\1.{ADAPTER}', name) for name in (tensor.name, *tensor.aliases)]
            kept.append(replace(tensor, name=renamed[0], aliases=tuple(renamed[1:])))
    frozen = sorted(adapters.keys() - {chosen})
    return kept, [f'only the trained adapter {chosen!r} is saved, without the frozen {frozen}'] if frozen else []


def _trained_adapter(
    adapters: set[str], names: Collection[str], trained: Collection[str] | None, adapter_folder: str
) -> str:
    """The name of the adapter that is trained: as recorded, else as its folder, else peft's default.

    Raises:
        ConfigError: Nothing shows it.
    """
    known = adapters
    if trained is not None:
        found = (match for name in names if name in trained and (match := _OF_ADAPTER.search(name)))
        known = {match[2] for match in found} or adapters
    for name in (*(known if len(known) == 1 else ()), adapter_folder, ADAPTER):
        if name in known:
            return name
    raise ConfigError(
        f'the checkpoint has {counted(len(known), "adapter")} ({some(sorted(known))}), and nothing shows which one was '
        f'trained: give as --base a folder of that name with its adapter_config.json'
    )


def _weight_of_state(name: str) -> str | None:
    """The name of the quantized weight whose state a tensor is; None for other tensors."""
    match = _OF_QUANTIZER.fullmatch(name)
    return None if match is None else match[1] or f'{match[2]}weight'
