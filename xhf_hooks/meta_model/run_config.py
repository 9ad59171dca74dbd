"""Finds the config of a finished run: given by the user, in the checkpoint, or beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import ConfigError
from xhf_hooks.meta_model.parse_config import Unread, parse_config


@dataclass(frozen=True)
class RunConfig:
    """The fields of a config, and its file for messages."""

    where: str
    fields: Mapping[str, Any]

    @property
    def model(self) -> Mapping[str, Any] | None:
        """The field ``model``, if it has a ``type``."""
        model = self.fields.get('model')
        return model if isinstance(model, Mapping) and isinstance(model.get('type'), str) else None

    @property
    def averages(self) -> bool:
        """Whether an EMAHook averages the weights."""
        hooks = self.fields.get('custom_hooks')
        return any(_is_named(hook, 'EMAHook') for hook in hooks) if isinstance(hooks, (list, tuple)) else False

    @property
    def uses_deepspeed(self) -> bool:
        """Whether its checkpoints are written by MMEngine's DeepSpeedStrategy."""
        return _is_named(self.fields.get('strategy'), 'DeepSpeedStrategy')

    def tokenizer_folder(self) -> str | None:
        """The path or hub name of the run's tokenizer."""
        tokenizer = self.fields.get('tokenizer')
        path = tokenizer.get('pretrained_model_name_or_path') if isinstance(tokenizer, Mapping) else None
        return path if isinstance(path, str) else None


def _is_named(config: Any, name: str) -> bool:
    """Whether the config's type is a class of this name, in any module."""
    kind = config.get('type') if isinstance(config, Mapping) else None
    return isinstance(kind, str) and kind.rpartition('.')[2] == name


def find_run_config(given: Path | None, in_checkpoint: str | None, checkpoint: Path) -> RunConfig | None:
    """The config of the run that wrote ``checkpoint``; None if there is none.

    Args:
        given: File given by the user.
        in_checkpoint: The text of the checkpoint's ``meta.cfg``.
        checkpoint: The tag folder or file; configs beside it are read.

    Raises:
        ConfigError: The config cannot be read.
    """
    if given is not None:
        return _read(given)
    if in_checkpoint:
        where = f'the config in {checkpoint}'
        return RunConfig(where, parse_config(in_checkpoint, where))
    for file in _beside(checkpoint):
        config = _read(file)
        if config.model is not None:
            return config
    return None


def _beside(checkpoint: Path) -> list[Path]:
    """Configs that MMEngine dumped into the work_dir and each ``<timestamp>/vis_data``, newest first."""
    work_dir = checkpoint.parent
    found = [*work_dir.glob('*.py'), *work_dir.glob('*/vis_data/config.py')]
    found = [file for file in found if file.name != 'zero_to_fp32.py']
    return sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)


def _read(file: Path) -> RunConfig:
    try:
        text = file.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{file}: cannot be read ({error}); name the config that the run dumped') from None
    return RunConfig(str(file), parse_config(text, str(file)))


def required(value: Any, what: str, where: str) -> Any:
    """Return a value of the config that must be there.

    Raises:
        ConfigError: It is missing, or not a plain value.
    """
    if isinstance(value, Unread):
        raise ConfigError(
            f'{where}, line {value.line}: {what} is {value.text!r}, which is not run; give --config the config that '
            f'MMEngine dumped into the work_dir, or --base'
        )
    if value is None:
        raise ConfigError(f'{where}: {what} is missing; name the model that training started from with --base')
    return value
