"""Whether a folder loads: transformers and peft load its names, shapes and dtypes on the meta device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import XhfError
from xhf_hooks.exporters.ask_load import ask_load
from xhf_hooks.exporters.loading_check import Problems, load_empty_adapter
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.files.check import OK, PROBLEM, UNCHECKED, FolderCheck
from xhf_hooks.format import strict_json
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.loaded_files import ADAPTER_CONFIG, CONFIG
from xhf_hooks.format.text import error_text, some
from xhf_hooks.model import names_by_identity
from xhf_hooks.offline.model.transformers_model import (
    adapter_config_in,
    build,
    build_fitting,
    class_for_adapter,
    class_named,
    first_architecture,
    load_config,
)
from xhf_hooks.offline.verify.layout import model_files
from xhf_hooks.planning.types import ExportEntry
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BY_HAND = 'load it with from_pretrained where it is used'


class _CannotTry(Exception):
    """Loading cannot be tried on this machine, or without running code; that is no damage."""


class _WouldFail(Exception):
    """Loading fails for a reason that lies in the folder."""


def check_loading(report: FolderCheck, *, base: str | None, trust_remote_code: bool) -> None:
    """Load each model and adapter in a checked folder, as hook and converter do before they write one. Offline.

    A *problem* is what the folder lacks: names, shapes, a config of which no model can be built. What this machine
    lacks, such as the base of an adapter or a package, is *unchecked*.

    Args:
        report: The finished check of an undamaged folder; gets the findings.
        base: The base model of an adapter; None: the one that adapter_config.json names.

    Raises:
        XhfError: ``base`` was given and cannot be used.
    """
    for inside, files in model_files(report.path, report.manifest).items():
        started, where = time.perf_counter(), f'{inside}: ' if inside else ''
        folder, entries = report.path / inside, _entries_of(report, files)
        try:
            with quiet():
                if (folder / ADAPTER_CONFIG).is_file():
                    name, problems = _load_adapter(folder, entries, base, trust_remote_code)
                else:
                    name, problems = _load_model(folder, entries, trust_remote_code)
        except _CannotTry as error:
            report.add(UNCHECKED, 'load', f'{where}{error}')
        except _WouldFail as error:
            report.add(PROBLEM, 'load', f'{where}{error}')
        else:
            found = [f'{len(names)} {kind}: {some(names)}' for kind, names in problems.items() if names]
            for text in found:
                report.add(PROBLEM, 'load', f'{where}{name}: {text}')
            if not found:
                secs = time.perf_counter() - started
                report.add(OK, 'load', f'{where}{name} in {secs:.1f} s, without weights')


def tied_names_in(folder: Path) -> list[set[str]]:
    """Names of the tensors that loading a folder makes one, by its config.json; none if that is unknown here."""
    try:
        with quiet():
            config, kind = _config_and_class(folder, trust_remote_code=False)
            model = build_on_meta(kind, config)
    except Exception:  # of any type, from custom code; or no config.json, or one of a class that is not here
        return []
    return [set(names) for _, names in names_by_identity(model) if len(names) > 1]


def _entries_of(report: FolderCheck, files: list[str]) -> list[ExportEntry]:
    """The tensors in these files that the class loads, as an exporter plans them."""
    recorded = {} if report.manifest is None else report.manifest.files
    copied = {
        (file, name)
        for file in files
        if file in recorded
        for name, tensor in recorded[file].tensors.items()
        if tensor.copied_from_base
    }
    return [
        ExportEntry(entry.name, entry.shape, entry.dtype, (entry.name,))
        for file in files
        for entry in report.headers[file].entries
        if (file, entry.name) not in copied
    ]


def _load_model(folder: Path, entries: list[ExportEntry], trust_remote_code: bool) -> tuple[str, Problems]:
    config, kind = _config_and_class(folder, trust_remote_code)
    try:
        build_on_meta(kind, config)
    except ImportError as error:
        raise _CannotTry(f'{kind.__name__} needs a package that is not here ({error_text(error)})') from error
    except Exception as error:  # of any type, from custom code
        raise _WouldFail(f'{kind.__name__} cannot be built from config.json ({error_text(error)})') from error
    _require_dtypes(entries)
    try:
        loaded = ask_load(kind, config, {entry.hf_name: entry for entry in entries})
    except Exception as error:  # of any type, from custom code; or accelerate is missing, which loading needs
        raise _CannotTry(f'loading {kind.__name__} could not be checked: {error_text(error)}; {_BY_HAND}') from error
    return kind.__name__, loaded.problems


def _config_and_class(folder: Path, trust_remote_code: bool) -> tuple[PretrainedConfig, Any]:
    """The config of a model, and the class that it names."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    content = strict_json.read(folder / CONFIG)
    name = first_architecture(content.get('architectures'))
    if content.get('quantization_config'):
        raise _CannotTry(
            f'{name} is quantized, and quantized weights cannot be checked without their package; {_BY_HAND}'
        )
    kind, kind_of_config = class_named(name), content.get('model_type')
    has_code = bool(content.get('auto_map'))
    if kind is None and not (has_code and trust_remote_code):
        if name is None:
            raise _CannotTry(
                'config.json names no class of a model (architectures); load it with the class that wrote it'
            )
        reason = (
            'its code in the folder may not run: add --trust-remote-code'
            if has_code
            else 'its code is not in the folder: only code that has it can load it'
        )
        raise _CannotTry(f'{name} is not a class of transformers, and {reason}')
    if kind_of_config not in CONFIG_MAPPING and not (has_code and trust_remote_code):
        raise _CannotTry(
            f'transformers {__version__} has no model_type {str(kind_of_config)[:80]!r}; use a version that has it'
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        return config, kind or type(build(config, None, trust_remote_code=trust_remote_code))
    except ImportError as error:
        raise _CannotTry(f'{name} needs a package that is not here ({error_text(error)})') from error
    except Exception as error:  # a model's own code may raise anything
        raise _WouldFail(f'config.json cannot be loaded ({error_text(error, 500)})') from error


def _load_adapter(
    folder: Path, entries: list[ExportEntry], base: str | None, trust_remote_code: bool
) -> tuple[str, Problems]:
    """Onto a model as peft needs it, with as many tokens and labels as the adapter has. Needs no weights of it."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise _CannotTry(f'an adapter needs peft, which is not here ({error_text(error)})') from error
    kind = strict_json.read(folder / ADAPTER_CONFIG).get('peft_type')
    if kind != 'LORA':
        raise _CannotTry(f'an adapter of type {str(kind)[:80]} cannot be checked, only LORA; {_BY_HAND}')
    try:
        lora = adapter_config_in(folder)
    except XhfError as error:
        raise _WouldFail(str(error)) from error
    _require_dtypes(entries)
    named = base or str(lora.base_model_name_or_path)
    try:
        config = load_config(named, trust_remote_code=trust_remote_code, why='the base model')
        name = class_for_adapter(lora, config)
        shapes = {entry.hf_name: entry.shape for entry in entries}
        model = build_fitting(config, name, shapes, trust_remote_code=trust_remote_code)
    except XhfError as error:
        if base is not None:
            raise
        raise _CannotTry(f'the base of this adapter cannot be used here: {error}') from error
    try:
        return f'adapter of a {type(model).__name__}', load_empty_adapter(model, lora, entries)
    except ImportError as error:
        raise _CannotTry(f'this adapter needs a package that is not here ({error_text(error)})') from error
    except Exception as error:  # peft raises anything where modules are missing
        raise _WouldFail(f'peft cannot adapt a {type(model).__name__} of {named}: {error_text(error, 500)}') from error


def _require_dtypes(entries: list[ExportEntry]) -> None:
    unknown = sorted({entry.dtype for entry in entries} - TORCH_DTYPES.keys())
    if unknown:
        raise _CannotTry(f'this version of torch has no dtype for {some(unknown)}')
