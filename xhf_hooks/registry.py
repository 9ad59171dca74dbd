"""The registries through which a source, an exporter or a writer is added, and the one that builds config values.

Among those that accept a model, the one registered last is chosen, so that yours goes before ours.
"""

from __future__ import annotations

from mmengine.registry import Registry

SOURCES = Registry('source', scope='xhf_hooks')
EXPORTERS = Registry('exporter', scope='xhf_hooks')
WRITERS = Registry('writer', scope='xhf_hooks')
#: Builds what a config describes (``dict(type='transformers.AutoTokenizer.from_pretrained', ...)``).
BUILDER = Registry('builder', scope='xhf_hooks')
