"""The registries through which a source, an exporter or a writer is added, and one that builds config values.

Among those that accept a model, the one registered last is chosen, so that yours goes before ours. The scope
is MMEngine's, where what a run's config names is looked up, too.
"""

from __future__ import annotations

from mmengine.registry import HOOKS, Registry

__all__ = ['BUILDER', 'EXPORTERS', 'HOOKS', 'SOURCES', 'WRITERS']

SOURCES = Registry('source', scope='mmengine')
EXPORTERS = Registry('exporter', scope='mmengine')
WRITERS = Registry('writer', scope='mmengine')
#: Builds what a config describes (``dict(type='transformers.AutoTokenizer.from_pretrained', ...)``).
BUILDER = Registry('builder', scope='mmengine')
