"""Generates docs/options.md from the options' descriptions: ``python tools/options_page.py > docs/options.md``."""

from __future__ import annotations

import re
import sys

from xhf_hooks.config.frontends import in_reading_order
from xhf_hooks.config.options import CallbackOptions, CallOptions, HookOptions

_DOORS = {
    'HFCheckpointHook': (HookOptions, 'in the config of an MMEngine or XTuner run'),
    'HFCheckpointCallback': (CallbackOptions, "for transformers' Trainer, TRL and Axolotl"),
    'save_hf': (CallOptions, 'one call in your own training loop'),
}


def page() -> str:
    """The text of the page."""
    lines = ['# Options', '', 'Generated from `xhf_hooks/config/options.py` by `tools/options_page.py`. Bad values,']
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
