"""Models of a few thousand parameters, for saves on many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def two_layers() -> LlamaForCausalLM:
    """A Llama of 21 tensors, the same on every rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, **small))
