"""Generates docs/options.md from the options' descriptions: ``python tools/options_page.py > docs/options.md``."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import Field, fields, is_dataclass
from typing import Any

from xhf_hooks.options import CallbackOptions, CallOptions, HookOptions

_DOORS = {
    'HFCheckpointHook': (HookOptions, 'in the config of an MMEngine or XTuner run'),
    'HFCheckpointCallback': (CallbackOptions, "for transformers' Trainer, TRL and Axolotl"),
    'save_hf': (CallOptions, 'one call in your own training loop'),
}


def in_reading_order(options: type) -> list[Field[Any]]:
    """The options: out_dir, then its own, then inherited ones."""
    classes = [base for base in options.__mro__ if is_dataclass(base)]
    found = {o.name: o for base in classes for o in fields(base) if o.name in inspect.get_annotations(base)}
    return sorted(found.values(), key=lambda option: option.name != 'out_dir')


def page() -> str:
    """The text of the page."""
    lines = ['# Options', '', 'Generated from `xhf_hooks/options.py` by `tools/options_page.py`. Bad values,']
    lines[-1] += ' bad combinations and misspelt names are errors when the hook is built.'
    told: dict[str, str] = {}
    for door, (options, where) in _DOORS.items():
        lines += ['', f'## {door}', '', f'{where[0].upper()}{where[1:]}.', '']
        new = [option for option in in_reading_order(options) if option.name not in told]
        lines += ['| option | default | meaning |', '|---|---|---|']
        for option in new:
            told[option.name] = door
            meaning = re.sub(r'``(.*?)``', r'`\1`', option.metadata['meaning']).replace('|', '\\|')
            lines.append(f'| {option.name} | {option.default!r} | {meaning} |')
        known = [option.name for option in in_reading_order(options) if told[option.name] != door]
        if known:
            lines += ['', f'And, as in {" and ".join(dict.fromkeys(told[n] for n in known))}: {", ".join(known)}.']
    return '\n'.join([*lines, ''])


if __name__ == '__main__':
    sys.stdout.write(page())
