"""What configs of the tests name beside XTuner's own classes."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from torch import nn


class NextTokenLoss(BaseMetric):
    """The mean loss over the validation data."""

    def process(self, data_batch: dict[str, Any], data_samples: Sequence[dict[str, Any]]) -> None:
        labels = data_batch['data']['labels']
        for sample, label in zip(data_samples, labels, strict=True):
            logits = sample['logits'].float()[:-1]
            self.results.append(nn.functional.cross_entropy(logits, label[1:].to(logits.device)).item())

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        loss = sum(results) / len(results)
        print(f'next_token_loss is {loss}')  # MMEngine's log has the mean of this and the earlier ones
        return {'next_token_loss': loss}


class Grounding(BaseModel):
    """Built as Sa2VA's Sa2VAModel: a chat model of remote code with LoRA, and a frozen encoder beside it.

    It adds tokens to its tokenizer, and rows to the embeddings, as it is made. A projection between the two is trained,
    and so is the encoder's decoder of masks. Checkpoints have the decoder and the projection beside the chat model.
    """

    def __init__(self, mllm: Any, tokenizer: Any, encoder: Any, special_tokens: Sequence[str], lora: Any) -> None:
        from xtuner.registry import BUILDER

        super().__init__()
        self.mllm = BUILDER.build(mllm)
        self.tokenizer = BUILDER.build(tokenizer)
        self.tokenizer.add_tokens(list(special_tokens), special_tokens=True)
        self.mllm.model.language_model.resize_token_embeddings(len(self.tokenizer))
        self.mllm._prepare_llm_for_lora(lora)
        self.grounding_encoder = BUILDER.build(encoder).requires_grad_(False)
        size, out = self.mllm.model.config.llm_config.hidden_size, self.grounding_encoder.config.hidden_size
        self.sam_mask_decoder = nn.Sequential(nn.Linear(out, out), nn.LayerNorm(out))
        self.text_hidden_fcs = nn.Sequential(nn.Linear(size, size), nn.ReLU(inplace=True), nn.Linear(size, out))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        kept = [item for item in found.items() if not item[0].startswith('grounding_encoder.')]
        return OrderedDict(kept)  # a plain dict has no room for MMEngine's `_metadata`

    def init_weights(self) -> None:
        pass

    def forward(self, data: dict[str, Any], data_samples: Any = None, mode: str = 'loss') -> Any:
        losses = self.mllm(data, data_samples, mode)
        hidden = self.mllm.model.language_model.get_input_embeddings()(data['input_ids'])
        projected = self.text_hidden_fcs(hidden.to(self.text_hidden_fcs[0].weight.dtype))
        with torch.no_grad():
            pixels = torch.cat([image.reshape(-1, *image.shape[-3:]) for image in data['pixel_values']])
            seen = self.grounding_encoder(pixels.to(self.grounding_encoder.dtype)).pooler_output
        decoded = self.sam_mask_decoder(seen[:1].to(projected.dtype))
        return losses | {'loss_grounding': (projected.mean(1).float() - decoded.float()).pow(2).mean()}
