#!/usr/bin/env python
"""Plan a save of every class in transformers' auto mappings, check that it would load, and list those that fail.

Run it in an environment with the project and a transformers version:

    python tools/model_classes.py                       all, in 5 minutes on 2 cores
    python tools/model_classes.py LlamaForCausalLM ...  these

Models are built on the meta device from their default configs, with few layers and experts where the class accepts
that; no weights are read, and nothing is downloaded. The list in docs/versions.md is its output.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import ExportRequest
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.sources import source_for
from xhf_hooks.system.library_settings import quiet

#: Fields of configs that make models small, if they were larger.
SMALL = {
    **dict.fromkeys(('num_hidden_layers', 'num_layers', 'n_layer', 'encoder_layers', 'decoder_layers'), 2),
    **dict.fromkeys(('num_experts', 'num_local_experts', 'n_routed_experts'), 8),
}
#: What default configs lack that their classes cannot be built without, in the words of transformers' own tests.
NEEDED: dict[str, Any] = dict(
    head_dim=64,
    num_key_value_heads=4,
    vocab_size=40,
    prediction_length=8,
    context_length=8,
    n_routed_experts=8,
    n_shared_experts=1,
    num_labels=3,
    layer_types=['full_attention', 'full_attention'],
    mlp_layer_types=['dense', 'sparse'],
    vocabulary_map={'<image>': 5, '<|extra_200|>': 6, 'IMGIMG00': 7, 'IMGIMG01': 8},
)
#: Of CPU time, so that a machine that is busy with something else changes nothing.
LIMIT_SECS = 30
#: An outcome.
UNUSABLE = 'has no usable default config'


@cache  # before workers are forked, which then have it
def classes() -> dict[str, type]:
    """Every model class of the auto mappings, by name, that the installed packages can import."""
    found: dict[str, type] = {}
    for name in sorted(dir(modeling_auto)):
        if name.startswith('MODEL_') and name.endswith('MAPPING'):
            mapping = getattr(modeling_auto, name)
            for config_class in mapping:
                try:
                    kinds = mapping[config_class]
                except Exception as error:  # a mapping may name what transformers does not have
                    print(f'{name}[{config_class.__name__}]: {one_line(error)}')
                    continue
                for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                    found[kind.__name__] = kind
    return found


def tried(name: str) -> tuple[str, str]:
    """What became of a class, and why: with few layers and experts or, if its other fields do not fit, as it is.

    If it cannot be built from its default config, what that lacks is added.
    """
    with quiet():
        kind = classes()[name]
        outcome = tried_with(kind, SMALL)
        if outcome[0] != 'loads':
            outcome = tried_with(kind, {})
        if outcome[0] == UNUSABLE:
            with_needed = tried_with(kind, SMALL, NEEDED)
            outcome = outcome if with_needed[0] == UNUSABLE else with_needed
        return outcome


def tried_with(kind: type, sizes: dict[str, int], needed: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """What became of a class within LIMIT_SECS, and why.

    Args:
        needed: Values of fields that are None in its config, or in the config of a part.
    """
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECS)
    outcome = UNUSABLE
    try:
        default = kind.config_class()
        sizes = {field: size for field, size in sizes.items() if type(getattr(default, field, None)) is int}
        config = kind.config_class(**sizes)
        if needed:
            fill(config, needed)
            kind.config_class.from_dict(config.to_dict())  # raises if this class accepts other values
        model = build_on_meta(kind, config)
        outcome = 'fails'
        specs, exporter = source_for(model).specs(), exporter_for(model, None)
        export = exporter.export(ExportRequest(specs))
        how = dict(max_shard_nbytes=5 * 10**9, bucket_nbytes=10**9, strategy=WriteStrategy.GATHER)
        plan = make_plan(export.entries, specs, **how)
        notes = exporter.check_loading(export, plan.placements)
    except Exception as error:
        return outcome, one_line(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ('cannot be checked', notes[0]) if notes else ('loads', '')


def fill(config: Any, needed: Mapping[str, Any]) -> None:
    """Set fields that are None, in a config and in those of its parts."""
    for field, value in needed.items():
        if getattr(config, field, value) is None:
            setattr(config, field, value)
    for part in list(vars(config).values()):
        if hasattr(part, 'model_type'):
            fill(part, needed)


def one_line(error: Exception) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())[:300]


def start_worker() -> None:
    def out_of_time(*_: object) -> None:
        raise TimeoutError(f'more than {LIMIT_SECS} s of CPU time')

    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, out_of_time)


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter('ignore')
    started = time.monotonic()
    with quiet():
        wanted = [name for name in classes() if not sys.argv[1:] or name in sys.argv[1:]]
    with multiprocessing.get_context('fork').Pool(initializer=start_worker) as pool:  # a process for each core
        outcomes: Counter[str] = Counter()
        for name, (outcome, why) in zip(wanted, pool.imap(tried, wanted), strict=True):
            outcomes[outcome] += 1
            if outcome != 'loads':
                print(f'{name}: {outcome}: {why}', flush=True)
    secs = time.monotonic() - started
    print(f'transformers {transformers.__version__}, torch {torch.__version__}, {secs:.0f} s:', end=' ')
    print(', '.join(f'{n} {outcome}' for outcome, n in sorted(outcomes.items())))


if __name__ == '__main__':
    main()
