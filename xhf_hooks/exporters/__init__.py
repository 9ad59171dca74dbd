"""Which tensors go out under which Hugging Face names. Importing this package registers the built-in exporters."""

from __future__ import annotations

from torch import nn

from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.registry import EXPORTERS

__all__ = ['Exporter', 'HuggingFaceExporter', 'exporter_for']


def exporter_for(model: nn.Module, module: str | None) -> Exporter:
    """The exporter of a trained model: the one registered last among those that accept it.

    Args:
        module: The hook's option of that name; None lets the exporter find what to export.

    Raises:
        ModelError: No exporter accepts the model.
    """
    accepting = [cls for cls in EXPORTERS.module_dict.values() if cls.accepts(model, module)]
    if not accepting:
        raise ModelError(
            f'no exporter accepts {type(model).__name__}. Looked for: {sorted(EXPORTERS.module_dict)}. '
            f'Its modules are {[name for name, _ in model.named_children()]}. Name the PreTrainedModel in it '
            f'with the option module, or register an exporter of your own (README, "A new model family")'
        )
    return accepting[-1](model, module)
