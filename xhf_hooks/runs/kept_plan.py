"""What calls of ``save_hf`` for one model share, so that only the first one plans."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xhf_hooks.exporters.base import Exporter
from xhf_hooks.options import SaveOptions
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.access import choose_strategy
from xhf_hooks.runs.preparation import Preparation
from xhf_hooks.runs.telemetry import RunLog
from xhf_hooks.runs.unwrap import Unwrapped
from xhf_hooks.sources import Source
from xhf_hooks.sources.host_memory import SnapshotMemory

_ATTRIBUTE = '_xhf_kept_plan'


@dataclass(frozen=True)
class _Planned:
    """A plan, and what it was made for.

    Attributes:
        exporter_class: In place of the exporter of the preparation, which refers to the model.
    """

    options: dict[str, Any]
    strategy: WriteStrategy
    exporter_class: Callable[..., Exporter[Any]]
    preparation: Preparation
    tokenizer: Any | None
    eos_token_ids: Sequence[int]


class KeptPlan:
    """The plan of the last call for a model, memory for copies, and a log that does not repeat itself.

    It is an attribute of the model that the user passes, and ends with it; it does not keep the model in memory. A copy
    of the model, or a pickled one, has None in its place.

    Attributes:
        said: What was logged before saves, and is not repeated.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.log = RunLog(logging.getLogger('xhf_hooks'), 'save_hf', only_errors=rank != 0)
        self.memory = SnapshotMemory()
        self.said: set[str] = set()
        self._ranks = rank, world_size
        self._planned: _Planned | None = None
        self._strategy: tuple[str, Path, WriteStrategy] | None = None  # with what it was chosen for

    @classmethod
    def of(cls, model: Any, collective: Collective) -> KeptPlan:
        """That of a model; a new one at the first call, and if this process has another rank since."""
        attributes = getattr(model, '__dict__', {})  # setattr of a wrapper may be that of the model in it
        found, ranks = attributes.get(_ATTRIBUTE), (collective.rank, collective.world_size)
        if not isinstance(found, cls) or found._ranks != ranks:
            found = attributes[_ATTRIBUTE] = cls(*ranks)
        return found

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def choose_strategy(
        self, log: logging.LoggerAdapter, writer: str, folder: Path, collective: Collective
    ) -> WriteStrategy:
        """That of the last call, if its folder was beside this one on all ranks; else as :func:`.choose_strategy`."""
        asked = writer, folder.parent
        strategy = None if self._strategy is None or self._strategy[:2] != asked else self._strategy[2]
        name = collective.from_rank0('preflight', lambda: folder.name)
        if collective.vote_any(strategy is None or name != folder.name, 'preflight') or strategy is None:
            strategy = choose_strategy(log, writer, folder, collective)
        self._strategy = *asked, strategy
        return strategy

    def preparation(
        self, unwrapped: Unwrapped, source: Source, options: SaveOptions, strategy: WriteStrategy
    ) -> Preparation | None:
        """The one of the last call; None if options or tensors are others. Whether the config is, each save asks."""
        planned = self._planned
        if planned is None or planned.strategy != strategy or planned.options != _compared(options):
            return None
        if planned.preparation.specs != source.specs():
            return None
        given = {name: value for name in ('lora', 'llava_format') if (value := getattr(options, name)) is not None}
        # As exporter_for makes it, which first looks for the class that accepts the model
        exporter = planned.exporter_class(unwrapped.model, options.module, **given)
        return replace(planned.preparation, exporter=exporter)

    def tokenizer(self) -> tuple[Any | None, Sequence[int]]:
        """The tokenizer of the last call, and token ids to add to generation_config.json. Runs on: rank 0."""
        return (None, ()) if self._planned is None else (self._planned.tokenizer, self._planned.eos_token_ids)

    def keep(
        self,
        preparation: Preparation,
        options: SaveOptions,
        strategy: WriteStrategy,
        tokenizer: Any | None,
        eos_token_ids: Sequence[int],
    ) -> None:
        """Keep the plan of this call for the next one."""
        kind, without_model = type(preparation.exporter), replace(preparation, exporter=None)  # type: ignore[arg-type]
        self._planned = _Planned(_compared(options), strategy, kind, without_model, tokenizer, eos_token_ids)


def _compared(options: SaveOptions) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != 'step'}
