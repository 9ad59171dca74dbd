"""Tensors of the base model's files that the trained class does not load, such as layers for multi-token prediction."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from xhf_hooks.compat.transformers import converts_weights, without_legacy_names
from xhf_hooks.errors import OptionError
from xhf_hooks.exporters.ask_load import ask_load
from xhf_hooks.exporters.assets.base_files import LocatedBase
from xhf_hooks.exporters.loading_check import as_if_alone
from xhf_hooks.exporters.on_meta import build_on_meta
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


def entries_to_copy(written: Sequence[str], reference: PreTrainedModel, base_model: LocatedBase) -> list[ExportEntry]:
    """The tensors that the option ``carry_base`` copies: those of the base in modules that its class does not have.

    Args:
        written: Names of what is written without them.
        reference: The model that ``from_pretrained`` will build.

    Raises:
        OptionError: The base does not show which tensors these are.
    """
    folder, kind = base_model.folder, type(reference).__name__
    classes = base_model.read_json('config.json').get('architectures') or ()
    in_base = _entries_in(base_model)
    lacking = sorted(set(written).difference(entry.hf_name for entry in in_base))
    named = f'the base model {base_model.name!r}' if base_model.name else 'the model, which names no base,'
    problem = None
    if folder is None or not in_base:
        problem = f'{named} has no safetensors files on this machine'
    elif kind not in classes:
        problem = f'{named} is of class {some([*classes])}, and the trained model a {kind}'
    elif len(lacking) > 1:  # one may be a head that training untied
        problem = f'{named} stores tensors under other names than a save: it has no {some(lacking)}'
    if problem is not None:
        raise OptionError('carry_base', f'None, since {problem}', 'all')
    return _not_ignored(in_base, _without_modules(in_base, written, reference), reference)


def _entries_in(base_model: LocatedBase) -> list[ExportEntry]:
    """The tensors in the base's files, to be copied. Reads headers."""
    folder = base_model.folder
    return [
        ExportEntry(one.name, one.shape, one.dtype, (), copied_from=StoredBytes(str(path), one.start))
        for path in ([] if folder is None else weight_files(folder))
        if path.is_file()
        for one in read_header(path).entries
    ]


def _without_modules(
    in_base: Sequence[ExportEntry], written: Sequence[str], reference: PreTrainedModel
) -> list[ExportEntry]:
    """The base's tensors in modules that the reference does not have."""
    names = set(written)
    prefix = f'{reference.base_model_prefix}.'
    modules = {name for name, _ in reference.named_modules(remove_duplicate=False)}
    known = modules | {f'{prefix}{name}' for name in modules} | {name.removeprefix(prefix) for name in modules}
    return [one for one in in_base if one.hf_name not in names and one.hf_name.rpartition('.')[0] not in known]


def _not_ignored(
    in_base: Sequence[ExportEntry], found: Sequence[ExportEntry], reference: PreTrainedModel
) -> list[ExportEntry]:
    """Those of the found tensors that ``from_pretrained`` reports as unexpected, and layers for multi-token prediction.

    It is silent about buffers of older versions, such as Llama's ``inv_freq``, and about what the class lists as
    ignored. Some classes list layers for multi-token prediction, which servers read.
    """
    if not found:
        return []
    try:
        loaded = ask_load(type(reference), reference.config, {one.hf_name: one for one in in_base})
    except Exception:  # of any type, from custom code, or a dtype that torch lacks
        return [*found]
    unexpected = set(loaded.problems['unexpected'])
    # transformers 5 reports the names in memory, which may differ from those in the files
    renamed = {name.rpartition('.')[2] for name in unexpected - {one.hf_name for one in in_base}}
    layer = _layer_beyond(reference.config.to_dict())
    return [
        one
        for one in found
        if one.hf_name in unexpected
        or one.hf_name.rpartition('.')[2] in renamed
        or _MTP_TENSOR.search(one.hf_name)
        or layer in f'.{one.hf_name}'
    ]


def _of_other_heads(names: Iterable[str], reference: PreTrainedModel) -> set[str]:
    """The tensors for which another class of the same config has modules, as BertForPreTraining has for BERT's pooler.

    They are heads that the trained class does without, and no server reads them with it.
    """
    kind = type(reference)
    left, heads = {name for name in names if not _MTP_TENSOR.search(name)}, set()
    with as_if_alone():
        for _, other in inspect.getmembers(inspect.getmodule(kind), inspect.isclass) if left else ():
            if other is not kind and getattr(other, 'config_class', None) is kind.config_class:
                with suppress(Exception):  # of any type: a class of another part, or one that wants more than a config
                    heads |= {name for name, _ in build_on_meta(other, reference.config).named_parameters()}
    return left & heads


def warn_of_base(
    names: Sequence[str],
    entries: Sequence[ExportEntry],
    reference: PreTrainedModel,
    base_model: LocatedBase,
    already_told: Collection[str] = (),
) -> list[str]:
    """Warnings about what the base has, and a save lacks, or has in another form.

    Args:
        names: Names in the model of what is written.
        entries: What is written.
        reference: The model that ``from_pretrained`` will build.
        already_told: Names of tensors of which another warning tells.
    """
    written = [entry.hf_name for entry in entries]
    announced = _missing_mtp_layers([*names, *written], base_model)
    if type(reference).__name__ not in (base_model.read_json('config.json').get('architectures') or ()):
        return announced
    in_base = _entries_in(base_model)
    if set(written).isdisjoint(one.hf_name for one in in_base):  # the base has them in another format
        return announced
    in_other_form = _warn_of_forms(entries, in_base, reference, base_model)
    if announced:
        return [*announced, *in_other_form]
    found = [one for one in _without_modules(in_base, written, reference) if one.hf_name not in already_told]
    missing = [one.hf_name for one in _not_ignored(in_base, found, reference)]
    of_heads = _of_other_heads(missing, reference)
    missing = [name for name in missing if name not in of_heads]
    if not missing:
        return in_other_form
    return [
        f'the save lacks {counted(len(missing), "tensor")} of the base model {base_model.name!r}, for which '
        f'{type(reference).__name__} of transformers has no modules: {some(missing)}; readers that use them need '
        f"carry_base='all', which copies them",
        *in_other_form,
    ]


def _warn_of_forms(
    entries: Sequence[ExportEntry],
    in_base: Sequence[ExportEntry],
    reference: PreTrainedModel,
    base_model: LocatedBase,
) -> list[str]:
    """Warnings about tensors that the base has under another name or in another shape, such as Qwen3-VL-MoE's experts.

    Training may have changed the number of elements, of rows or positions.

    Args:
        entries: What is written.
        in_base: What is in the base's files.
        reference: The model that ``from_pretrained`` will build.
    """
    from transformers import __version__

    shapes = {one.hf_name: one.shape for one in in_base}
    known = [(entry, shapes[entry.hf_name]) for entry in entries if entry.hf_name in shapes]
    other = [one for one, shape in known if shape != one.shape and math.prod(shape) == math.prod(one.shape)]
    wrote = base_model.read_json('config.json').get('transformers_version')
    rest = (
        f'transformers {__version__} writes and reads that. Older versions'
        f'{f", such as {wrote} of the base," if wrote else ""} and other programs may expect the '
    )
    warnings = []
    if other:
        first = other[0]
        warnings.append(
            f'{counted(len(other), "tensor")} of the save {"has" if len(other) == 1 else "have"} another shape than in '
            f'the base model {base_model.name!r}: {some([entry.hf_name for entry in other])} ({first.shape}, in the '
            f'base {shapes[first.hf_name]}). {rest}shape of the base'
        )
    if renamed := _renamed(entries, in_base, reference):
        now, before = next(iter(renamed.items()))
        warnings.append(
            f'{counted(len(renamed), "tensor")} of the save {"has" if len(renamed) == 1 else "have"} another name than '
            f'in the base model {base_model.name!r}: {some([*renamed])} (in the base, {now} is {before}). {rest}name '
            f'in the base'
        )
    return warnings


def _renamed(
    entries: Sequence[ExportEntry], in_base: Sequence[ExportEntry], reference: PreTrainedModel
) -> dict[str, str]:
    """Names of tensors in the save, and in the base, of which ``from_pretrained`` makes the same tensor of the model.

    Only transformers 5 renames what it saves. Not names that transformers 4 reads, too: without the prefix of the base
    model, or with older words.
    """
    if not converts_weights():
        return {}
    listed = [{one.hf_name for one in found} for found in (entries, in_base)]
    plain = without_legacy_names(set().union(*listed))
    plain = {name: found.removeprefix(f'{reference.base_model_prefix}.') for name, found in plain.items()}
    own, of_base = ({plain[name] for name in found} for found in listed)
    if own <= of_base or of_base <= own:
        return {}
    try:
        loaded = [
            ask_load(type(reference), reference.config, {one.hf_name: one for one in found}).made
            for found in (entries, in_base)
        ]
    except Exception:  # of any type, from custom code; check_loading() reports it
        return {}
    found = {}
    for name in loaded[0].keys() & loaded[1].keys():
        now, before = (one[name].sources for one in loaded)
        if of_base.isdisjoint(plain[one] for one in now) and own.isdisjoint(plain[one] for one in before):
            found[now[0]] = before[0]
    return dict(sorted(found.items()))


def _missing_mtp_layers(names: Iterable[str], base_model: LocatedBase) -> list[str]:
    """A warning if the base announces layers for multi-token prediction, but no tensor has such a name."""
    base = base_model.read_json('config.json')
    fields = {**base, **base.get('text_config', {})}
    announced = [name for name, value in fields.items() if _MTP_FIELD.search(name) and type(value) is int and value]
    layer = _layer_beyond(base)
    if not announced or any(_MTP_TENSOR.search(name) or layer in f'.{name}' for name in names):
        return []
    name, value = announced[0], fields[announced[0]]
    return [
        f'config.json has {name}={value}, but the class of the trained model has no layers for multi-token prediction, '
        f'so none are saved: servers that use them cannot load the folder unless {name} is set to 0, or the layers are '
        f"copied from the base, with carry_base='all'"
    ]


def _layer_beyond(config: Mapping[str, Any]) -> str:
    """Part of the name of the layer after the last one of the text model, which may be for multi-token prediction."""
    fields = {**config, **(config.get('text_config') or {})}
    return f'.layers.{fields.get("num_hidden_layers")}.'
