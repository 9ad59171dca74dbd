"""The configs that come with XTuner: which there are, what each trains, and which exporter the package chooses.

    python -m tests.e2e.xtuner_stack.builtin_configs >docs/xtuner_configs.md

writes the table anew, in XTuner's environment.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmengine.config import Config
from torch import nn

from tests.e2e.xtuner_stack.stand_ins import family_of, stand_ins
from xhf_hooks.errors import XhfError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.xtuner.chat_template import template_of_config
from xhf_hooks.sources import Source

NOT_MMENGINE = 'none: transformers.Trainer trains it, without MMEngine hooks'
#: Options that choose an attention, a length, or weights to start from, and no other tensors.
_SAME_TENSORS = ('use_varlen_attn', 'max_position_embeddings', 'pretrained_pth')


@dataclass(frozen=True)
class Found:
    """What the package makes of a model.

    Attributes:
        model: The name of XTuner's class.
        exporter: The name of the exporter's class, or why there is none.
        reads: The tensors that go out.
        trained: The tensors that the optimizer moves.
    """

    model: str
    exporter: str
    reads: frozenset[str]
    trained: frozenset[str]


@dataclass(frozen=True)
class BuiltIn:
    """One built-in config.

    Attributes:
        name: Its path below ``xtuner/configs``.
        found: None when no MMEngine run trains it.
        template: The prompt template that the hook finds in it, or None.
    """

    name: str
    text: str
    found: Found | None
    template: Mapping[str, Any] | None

    @property
    def exporter(self) -> str:
        return NOT_MMENGINE if self.found is None else self.found.exporter


def built_ins() -> list[BuiltIn]:
    """Every built-in config. Equal models are built once."""
    (xtuner,) = find_spec('xtuner').submodule_search_locations
    root = Path(xtuner, 'configs')
    logging.disable(logging.WARNING)
    known: dict[str, Found] = {}
    result = []
    try:
        with stand_ins(), warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'Could not find a config file')  # peft's, of the bases that are not here
            for file in sorted(root.rglob('*.py')):
                text = file.read_text()
                if '\nmodel = dict(' not in text:
                    continue  # a package's __init__, or one of XTuner's conversion scripts
                cfg = Config.fromfile(file)
                found = None if 'training_args' in cfg else _found(cfg, known)
                result.append(BuiltIn(str(file.relative_to(root)), text, found, template_of_config(cfg)))
    finally:
        logging.disable(logging.NOTSET)
    return result


def table(configs: list[BuiltIn]) -> str:
    """Markdown: config family, XTuner's model, exporter, how many, how many of them with a prompt template."""
    rows: Counter[tuple[str, str, str]] = Counter()
    with_template: Counter[tuple[str, str, str]] = Counter()
    for config in configs:
        model = '' if config.found is None else config.found.model
        row = (config.name.partition('/')[0], model, config.exporter)
        rows[row] += 1
        with_template[row] += config.template is not None
    lines = [
        '# XTuner 0.2.0: the exporter of each built-in config',
        '',
        'Found by `tests/e2e/xtuner_stack/test_builtin_configs.py` from the configs alone, with tiny stand-ins for the',
        'base models; `python -m tests.e2e.xtuner_stack.builtin_configs` writes this file.',
        '',
        "| configs | XTuner's model | exporter | how many | of them with a prompt template |",
        '|---|---|---|---|---|',
    ]
    for row, count in sorted(rows.items()):
        lines.append(f'| {" | ".join(row)} | {count} | {with_template[row]} |')
    lines.append(f'| all | | | {rows.total()} | {with_template.total()} |')
    return '\n'.join(lines) + '\n'


def _found(cfg: Config, known: dict[str, Found]) -> Found:
    model = {name: value for name, value in cfg._to_lazy_dict()['model'].items() if name not in _SAME_TENSORS}
    key = re.sub(r"'[^' ]+/[^' ]+'", lambda base: family_of(base[0]), repr(model))  # by what stands in for the bases
    if key not in known:
        known[key] = _choose(_build(cfg))
    return known[key]


def _build(cfg: Config) -> nn.Module:
    from xtuner.registry import BUILDER

    model = cfg.model
    for option in _SAME_TENSORS:
        model.pop(option, None)
    return BUILDER.build(model)


def _choose(model: nn.Module) -> Found:
    source = Source(model)
    try:
        exporter = exporter_for(model, None)
        entries = exporter.entries(source.specs(), None)
        chosen = type(exporter).__name__
    except XhfError as error:
        entries, chosen = [], f'none: {error}'.partition(',')[0]
    return Found(
        type(model).__name__,
        chosen,
        frozenset(name for entry in entries for name in entry.reads),
        frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
    )


if __name__ == '__main__':
    print(table(built_ins()), end='')
