"""Plans of bytes, and what ranks have written of them."""

import numpy as np

from xhf_hooks.files.tally import Tally
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import ExportEntry, TensorSpec
from xhf_hooks.planning.write_strategy import WriteStrategy

LIMITS = dict(max_shard_nbytes=10**6, bucket_nbytes=1, strategy=WriteStrategy.GATHER)


def together(tallies: list[Tally]) -> Tally:
    """As save.py adds up what ranks have written."""
    tallies[0].sums = np.add.reduce([tally.sums for tally in tallies])
    tallies[0].checksums = np.bitwise_xor.reduce([tally.checksums for tally in tallies])
    return tallies[0]


def plan_of(*sizes: int) -> SavePlan:
    specs = [TensorSpec(f'w{number}', (size,), 'U8') for number, size in enumerate(sizes)]
    return make_plan([ExportEntry(s.name, s.shape, 'U8', (s.name,)) for s in specs], specs, **LIMITS)
