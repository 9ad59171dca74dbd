"""Llamas of a few thousand parameters, for training and for saves; the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import BatchNorm1d
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.models.zoo import ODD_DECODER, SPECIAL_TOKENS, fitted

if TYPE_CHECKING:
    from peft import PeftModel

VOCAB = ODD_DECODER['vocab_size']
_SMALL = dict(
    vocab_size=64,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def llama(**config: Any) -> LlamaForCausalLM:
    """A Llama with two layers, even sizes and 21 tensors, unless ``config`` says otherwise."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**_SMALL, **config}))


def odd_llama(
    *, tied: bool = False, bf16: bool = False, lora: bool = False, batch_norm: bool = False, base: str = ''
) -> LlamaForCausalLM | PeftModel:
    """A Llama with the zoo's odd sizes, which ZeRO-3 has to pad.

    Args:
        lora: Add an adapter; everything else is frozen.
        batch_norm: Add persistent buffers that training changes.
        base: Folder that the model claims to be loaded from.
    """
    sizes = {name: value for name, value in fitted(ODD_DECODER).items() if name not in SPECIAL_TOKENS}
    torch.manual_seed(0)
    model = (NormedLlama if batch_norm else LlamaForCausalLM)(LlamaConfig(**sizes, tie_word_embeddings=tied))
    model.config._name_or_path = model.name_or_path = base
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=['q_proj'], task_type='CAUSAL_LM'))
    return model.to(torch.bfloat16) if bf16 else model


def larger_llama() -> LlamaForCausalLM:
    """A Llama of ten layers of 10 MB each, in fp32; the rest is tiny. Is only saved: it has no random weights.

    These take longer to draw than to save.
    """
    sizes = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=8)
    with torch.device('meta'):
        model = llama(vocab_size=VOCAB, num_hidden_layers=10, **sizes)
    model.to_empty(device='cpu')
    for parameter in model.parameters():
        parameter.data.copy_(torch.arange(parameter.numel()).remainder_(251).view_as(parameter))
    return model


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


def build_model(kind: str) -> Any:
    """A bf16 Llama; ``frozen`` has its embedding and first layer frozen."""
    model = odd_llama(tied=kind == 'tied', bf16=True)
    if kind == 'frozen':
        for name, parameter in model.named_parameters():
            parameter.requires_grad_('embed' not in name and 'layers.0' not in name)
    return model
