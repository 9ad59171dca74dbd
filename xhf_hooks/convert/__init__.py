"""Converts the checkpoint of a finished run into a Hugging Face folder, or a store; see :mod:`.conversion`."""

from __future__ import annotations

from xhf_hooks.convert.conversion import Conversion, ConvertOptions, target_of

__all__ = ['Conversion', 'ConvertOptions', 'target_of']
