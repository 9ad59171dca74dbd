"""Converts the checkpoint of a finished run into a Hugging Face folder; see :mod:`.conversion`."""

from __future__ import annotations

from xhf_hooks.offline.convert.conversion import Conversion, ConvertOptions, describe_checkpoint
from xhf_hooks.offline.convert.plan_conversion import plan_conversion

__all__ = ['Conversion', 'ConvertOptions', 'describe_checkpoint', 'plan_conversion']
