"""A Llama with persistent buffers that training changes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import BatchNorm1d
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM


class NormedLlama(LlamaForCausalLM):
    """Normalises its logits by the statistics of the batches that it has seen."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.logit_norm = BatchNorm1d(config.vocab_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
        output = super().forward(input_ids=input_ids, **options)
        output.logits = self.logit_norm(output.logits.flatten(0, 1)).view_as(output.logits)
        if labels is not None:
            output.loss = cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return output
