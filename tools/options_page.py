"""Generates the pages of options from their descriptions.

python tools/options_page.py > docs/options.md
python tools/options_page.py zh > docs/zh_cn/options.md

A meaning in Chinese (docs/zh_cn/options.json) stands beside a digest of the English one that it translates.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.options import CallbackOptions, CallOptions, HookOptions, in_reading_order

ROOT = Path(__file__).resolve().parents[1]
_DOORS = {'HFCheckpointHook': HookOptions, 'HFCheckpointCallback': CallbackOptions, 'save_hf': CallOptions}


@dataclass(frozen=True)
class _Words:
    """What a page says around the options."""

    head: str
    where: tuple[str, str, str]
    columns: str
    advanced: str
    also: str
    catalogue: str = ''  # the file with the meanings, where they are not those of the code


ENGLISH = _Words(
    '# Options\n\nGenerated from `xhf_hooks/options.py` by `tools/options_page.py`. Bad values, bad combinations and '
    'misspelt names are errors when the hook is built.',
    (
        'In the config of an MMEngine or XTuner run.',
        "For transformers' Trainer, TRL and Axolotl.",
        'One call in your own training loop.',
    ),
    '| option | default | meaning |',
    'Advanced',
    'And, as in {doors}: {names}.',
)
CHINESE = _Words(
    '# 选项\n\n由 `tools/options_page.py` 从 `xhf_hooks/options.py` 生成。'
    '错误的值、错误的组合和拼错的名字，在构建 hook 时就会报错。',
    (
        '写在 MMEngine 或 XTuner 的训练配置中。',
        '用于 transformers 的 Trainer、TRL 和 Axolotl。',
        '在自己的训练循环中调用。',
    ),
    '| 选项 | 默认值 | 含义 |',
    '高级选项',
    '另外，与 {doors} 相同：{names}。',
    'docs/zh_cn/options.json',
)


def page(words: _Words = ENGLISH) -> str:
    """The text of the page."""
    lines = [words.head]
    told: dict[str, str] = {}
    for (door, options), where in zip(_DOORS.items(), words.where, strict=True):
        lines += ['', f'## {door}', '', where]
        own = [option for option in in_reading_order(options) if option.name not in told]
        told |= dict.fromkeys((option.name for option in own), door)
        lines += _table([option for option in own if not option.metadata['is_advanced']], words)
        advanced = [option for option in own if option.metadata['is_advanced']]
        if advanced:
            lines += ['', f'### {words.advanced}', *_table(advanced, words)]
        known = [option.name for option in in_reading_order(options) if told[option.name] != door]
        if known:
            doors = ' and '.join(dict.fromkeys(told[name] for name in known))
            lines += ['', words.also.format(doors=doors, names=', '.join(known))]
    return '\n'.join([*lines, ''])


def _table(options: Sequence[Field[Any]], words: _Words) -> list[str]:
    lines = ['', words.columns, '|---|---|---|']
    for option in options:
        meaning = _translated(option, ROOT / words.catalogue) if words.catalogue else option.metadata['meaning']
        meaning = re.sub(r'``(.*?)``', r'`\1`', meaning).replace('|', '\\|')
        lines.append(f'| {option.name} | {option.default!r} | {meaning} |')
    return lines


def _translated(option: Field[Any], catalogue: Path) -> str:
    """The meaning of an option in another language.

    Raises:
        SystemExit: There is none of the English meaning as it is now.
    """
    digest = hashlib.sha256(option.metadata['meaning'].encode()).hexdigest()[:12]
    found = json.loads(catalogue.read_text(encoding='utf-8')).get(option.name, {})
    if found.get('of') != digest:
        raise SystemExit(
            f'{catalogue}: the meaning of {option.name} in xhf_hooks/options.py is new or has changed. Translate it '
            f"again, as {{'of': '{digest}', 'meaning': ...}}"
        )
    return found['meaning']


if __name__ == '__main__':
    sys.stdout.write(page(CHINESE if sys.argv[1:] == ['zh'] else ENGLISH))
