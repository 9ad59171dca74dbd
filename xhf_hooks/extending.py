"""All names that an extension needs: sources for training engines, exporters for model families.

What stands in ``__all__`` keeps its name, its arguments and its meaning from one minor version to the next; a change is
in the changelog with what to write instead. So do the methods of these classes that the API page lists. Everything else
in this package may change at any time, also names without an underscore.

docs/extending.md has examples.
"""

from xhf_hooks.errors import ModelError, OptionError, TensorError, XhfError
from xhf_hooks.exporters import Export, Exporter, ExportRequest, HuggingFaceExporter
from xhf_hooks.exporters.base import CompositeExport, CompositeExporter, specs_below, unchanged_entries
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.planning.spread import Axis, Spread, in_rank_order, on_one_rank, spread_over
from xhf_hooks.planning.types import ExportEntry, FileSet, Placement, TensorSpec
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.registry import EXPORTERS, SOURCES
from xhf_hooks.sources import Source, WholeTensorsSource
from xhf_hooks.sources.base import LocalElements

__all__ = [
    'EXPORTERS',
    'SOURCES',
    'Axis',
    'Collective',
    'CompositeExport',
    'CompositeExporter',
    'Export',
    'ExportEntry',
    'ExportRequest',
    'Exporter',
    'FileSet',
    'HuggingFaceExporter',
    'LocalElements',
    'ModelError',
    'OptionError',
    'Placement',
    'Source',
    'Spread',
    'TensorError',
    'TensorSpec',
    'WholeTensorsSource',
    'XhfError',
    'dtype_code',
    'in_rank_order',
    'on_one_rank',
    'specs_below',
    'spread_over',
    'unchanged_entries',
]
