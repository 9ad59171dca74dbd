"""A tiny model shaped like XTuner's LLaVAModel, and the base models that it starts from."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.helpers.models.adapted import adapt
from tests.helpers.models.zoo import NOISE_STD, VISION_TOWER, build
from xhf_hooks.compat.transformers import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ('<unk>', '<s>', '</s>', 'what', 'is', 'this', 'a', 'cat')
VOCAB_SIZE = 131  # of the zoo's llama
PREPROCESSOR = {
    'image_processor_type': 'CLIPImageProcessor',
    'size': {'shortest_edge': VISION_TOWER['image_size']},
    'crop_size': {'height': VISION_TOWER['image_size'], 'width': VISION_TOWER['image_size']},
    'image_mean': [0.5, 0.5, 0.5],
    'image_std': [0.5, 0.5, 0.5],
}
N_PATCHES = (VISION_TOWER['image_size'] // VISION_TOWER['patch_size']) ** 2


def n_image_tokens() -> int:
    """How many tokens an image takes in a text: before 4.45 the processor leaves it to the model to make room."""
    from transformers import LlavaProcessor

    return N_PATCHES if 'patch_size' in signature(LlavaProcessor).parameters else 1


def save_bases(root: Path, n_words: int = VOCAB_SIZE) -> None:
    """Save ``root/llm``, a Llama with a tokenizer of ``n_words``, and ``root/clip``, a CLIP with its preprocessor."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    build('llama').save_pretrained(root / 'llm')
    tokenizer(n_words).save_pretrained(root / 'llm')
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        clip = CLIPVisionModel(CLIPVisionConfig(**VISION_TOWER))
        for parameter in clip.parameters():
            parameter.data += NOISE_STD * torch.randn(parameter.shape)
    clip.save_pretrained(root / 'clip')
    (root / 'clip' / 'preprocessor_config.json').write_text(json.dumps(PREPROCESSOR))


def tokenizer(n_words: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A word tokenizer without a padding token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*WORDS, *(f'w{i}' for i in range(n_words - len(WORDS)))]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token='<unk>', bos_token='<s>', eos_token='</s>')


class TinyLlava(nn.Module):
    """The children, the attribute and the forward pass of XTuner's LLaVAModel.

    Args:
        root: The folder given to :func:`save_bases`.
        frozen: Children whose parameters are frozen.
        lora: Child to its LoraConfig options.
        projector: Options of the projector's config.
    """

    def __init__(
        self,
        root: Path,
        *,
        frozen: tuple[str, ...] = (),
        lora: dict[str, dict[str, Any]] | None = None,
        dtype: torch.dtype = torch.float32,
        visual_select_layer: int = -2,
        llm: nn.Module | None = None,
        **projector: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, CLIPVisionModel

        from tests.helpers.models.zoo.projector import ProjectorConfig, ProjectorModel

        super().__init__()
        self.llm = llm or AutoModelForCausalLM.from_pretrained(root / 'llm', torch_dtype=dtype)
        self.llm.config.use_cache = False  # like XTuner
        self.visual_encoder = CLIPVisionModel.from_pretrained(root / 'clip', torch_dtype=dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            sizes = {'llm_hidden_size': text_config(self.llm.config).hidden_size}
            self.projector = ProjectorModel(ProjectorConfig(**sizes, **projector)).to(dtype)
        self.visual_select_layer = visual_select_layer
        for name in frozen:
            getattr(self, name).requires_grad_(False)
        for name, options in (lora or {}).items():
            defaults = {} if name == 'llm' else {'task_type': None}
            setattr(self, name, adapt(getattr(self, name), dtype, **{**defaults, **options}))

    def forward(self, pixel_values: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Logits of a text with one image in it; XTuner's forward and prepare_inputs_labels_for_multimodal."""
        seen = self.visual_encoder(pixel_values, output_hidden_states=True).hidden_states
        image = self.projector(seen[self.visual_select_layer][:, 1:])
        embed = self.llm.get_input_embeddings()
        return self.llm(inputs_embeds=torch.cat([embed(before), image, embed(after)], dim=1)).logits


def question() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An image and the token ids before and after it."""
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(1, 3, VISION_TOWER['image_size'], VISION_TOWER['image_size'], generator=generator)
    return image, torch.tensor([[1, 5, 9]]), torch.tensor([[4, 7]])
