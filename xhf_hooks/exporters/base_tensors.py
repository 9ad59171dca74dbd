"""Tensors of the base model's files that the trained class does not load, such as layers for multi-token prediction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from xhf_hooks.base_files import base_folder, base_json
from xhf_hooks.errors import OptionError
from xhf_hooks.format.index import weight_files
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.format.text import counted, some
from xhf_hooks.planning.types import ExportEntry, StoredBytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Fields that count layers for multi-token prediction, such as num_nextn_predict_layers (DeepSeek, GLM, MiMo) and
#: mtp_num_hidden_layers (Qwen3.5), and their tensors. Some have the names of another layer of the model.
_MTP_FIELD = re.compile(r'^num_(nextn|mtp).*layers|^mtp_num.*layers')
_MTP_TENSOR = re.compile(r'(^|[._])(mtp|nextn)[._]')


def entries_without_modules(names: Iterable[str], reference: PreTrainedModel, base_dir: str) -> list[ExportEntry]:
    """Tensors of the base in modules that its class in transformers does not have, to be copied. Reads headers.

    None if the base is of another class, or has its tensors in another format.

    Args:
        names: Those that are written without them.
        reference: The model that ``from_pretrained`` will build.
    """
    folder, classes = base_folder(base_dir), base_json(base_dir, 'config.json').get('architectures') or ()
    if folder is None or type(reference).__name__ not in classes:
        return []
    in_base = [
        ExportEntry(one.name, one.shape, one.dtype, (), copied_from=StoredBytes(str(path), one.start))
        for path in weight_files(folder)
        if path.is_file()
        for one in read_header(path).entries
    ]
    written = set(names)
    if written.isdisjoint(one.hf_name for one in in_base):
        return []
    prefix = f'{reference.base_model_prefix}.'
    modules = {name for name, _ in reference.named_modules(remove_duplicate=False)}
    known = modules | {f'{prefix}{name}' for name in modules} | {name.removeprefix(prefix) for name in modules}
    return [one for one in in_base if one.hf_name not in written and one.hf_name.rpartition('.')[0] not in known]


def require_base_files(base_dir: str) -> None:
    """Refuse the option ``carry_base`` for a model whose base has no safetensors files here.

    Raises:
        OptionError: It has none.
    """
    folder = base_folder(base_dir)
    if folder is None or not weight_files(folder):
        where = f'the base model {base_dir!r}' if base_dir else 'the model'
        raise OptionError('carry_base', f'None, since {where} has no safetensors files on this machine', 'all')


def warn_of_missing(
    names: Sequence[str], written: Sequence[str], reference: PreTrainedModel, base_dir: str
) -> list[str]:
    """A warning about what the base has, and a save lacks.

    Args:
        names: Names in the model of what is written.
        written: Names under which it is written.
        reference: The model that ``from_pretrained`` will build.
    """
    if announced := _missing_mtp_layers([*names, *written], base_dir):
        return announced
    missing = entries_without_modules(written, reference, base_dir)
    if not missing:
        return []
    return [
        f'{counted(len(missing), "tensor")} of the base model {base_dir!r} are not in the save, since '
        f'{type(reference).__name__} of transformers has no modules for them: '
        f"{some([one.hf_name for one in missing])}; readers that use them need carry_base='all', which copies them"
    ]


def _missing_mtp_layers(names: Iterable[str], base_dir: str) -> list[str]:
    """A warning if the base announces layers for multi-token prediction, but no tensor has such a name."""
    base = base_json(base_dir, 'config.json')
    fields = {**base, **base.get('text_config', {})}
    announced = [name for name, value in fields.items() if _MTP_FIELD.search(name) and type(value) is int and value]
    layer = f'.layers.{fields.get("num_hidden_layers")}.'
    if not announced or any(_MTP_TENSOR.search(name) or layer in f'.{name}' for name in names):
        return []
    name, value = announced[0], fields[announced[0]]
    return [
        f'config.json has {name}={value}, but the class of the trained model has no layers for multi-token prediction, '
        f'so none are saved: servers that use them cannot load the folder unless {name} is set to 0, or the layers are '
        f"copied from the base, with carry_base='all'"
    ]
