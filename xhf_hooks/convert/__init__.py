"""Converts the checkpoint of a finished run into a Hugging Face folder; see :mod:`.conversion`."""

from __future__ import annotations

from xhf_hooks.convert.conversion import Conversion, ConvertOptions

__all__ = ['Conversion', 'ConvertOptions']
