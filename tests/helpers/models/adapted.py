"""Tiny models with a trainable LoRA adapter. No tensor is zero."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from tests.helpers.models.zoo import NOISE_STD, available, build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


ATTENTION = ('q_proj', 'v_proj')
#: In transformers 5 these are parameters of one module.
EXPERTS = ['experts.gate_up_proj', 'experts.down_proj']

# Name: family, LoraConfig options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    'plain': ('llama', dict()),
    'all_linear': ('llama', dict(target_modules='all-linear')),
    'rslora': ('llama', dict(use_rslora=True)),
    'dora': ('llama', dict(use_dora=True)),
    'patterns': ('llama', dict(rank_pattern={'v_proj': 7}, alpha_pattern={'layers.1.self_attn.q_proj': 11})),
    'trained_bias': ('qwen2', dict(bias='lora_only')),
    'all_biases': ('qwen2', dict(bias='all')),
    'conv1d_weights': ('gpt2', dict(target_modules=['c_attn', 'c_fc'], fan_in_fan_out=True)),
    'conv1d_weights_dora': ('gpt2', dict(target_modules=['c_attn'], fan_in_fan_out=True, use_dora=True)),
    'embedding': ('llama', dict(target_modules=['embed_tokens', 'lm_head', 'q_proj'])),
    'embedding_dora': ('llama', dict(target_modules=['embed_tokens'], use_dora=True)),
    'conv': ('whisper', dict(target_modules=['conv1', 'q_proj'], task_type=None)),
    'conv_dora': ('whisper', dict(target_modules=['conv2'], use_dora=True, task_type=None)),
    'conv2d': ('llava', dict(target_modules=['patch_embedding', 'q_proj'])),
    'modules_to_save': ('llama', dict(modules_to_save=['lm_head', 'embed_tokens'])),
    'untied_by_modules_to_save': ('qwen2', dict(modules_to_save=['lm_head'])),
    'experts': ('mixtral', dict()),
    'expert_parameters': ('qwen3_moe', dict(target_modules=[], target_parameters=EXPERTS)),
    'experts_and_modules': ('mixtral', dict(target_parameters=['experts.down_proj', 'gate.weight'], use_rslora=True)),
    'experts_by_their_old_names': ('mixtral', dict(target_modules=['w1', 'w2', 'w3', 'q_proj'])),
    'transposed_experts': ('gpt_oss', dict(target_parameters=EXPERTS)),
    'no_task_type': ('llama', dict(task_type=None)),
}


def adapt(model: PreTrainedModel, dtype: torch.dtype | None = None, **lora: Any) -> PeftModel:
    """Add an adapter as after some training: B is not zero, and the magnitude is not the norm.

    Args:
        dtype: Final dtype of all parameters (DeepSpeed's bf16 casts adapters, too); None does not cast.
    """
    import peft.utils.constants
    import torch
    from peft import LoraConfig, get_peft_model

    options = {'r': 3, 'lora_alpha': 5, 'target_modules': list(ATTENTION), 'task_type': 'CAUSAL_LM', **lora}
    knows_all_linear = hasattr(peft.utils.constants, 'INCLUDE_LINEAR_LAYERS_SHORTHAND')  # not before peft 0.8
    if options['target_modules'] == 'all-linear' and not knows_all_linear:
        head = model.get_output_embeddings()
        linear = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and one is not head]
        options['target_modules'] = sorted({name.rpartition('.')[2] for name in linear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(**options))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += NOISE_STD * torch.randn(parameter.shape)
    if dtype is not None:
        for parameter in adapted.parameters():
            parameter.data = parameter.data.to(dtype)
    return adapted


def can_be_made(family: str, **lora: Any) -> bool:
    """Whether the installed peft has these options, and layers for what they name."""
    if not available(family):
        return False
    try:
        adapted(family, **lora)
    except (TypeError, ValueError, RuntimeError):  # the last of DoRA of transposed weights in peft 0.10
        return False
    return True


def _is_merged_as_it_is_used(model: PeftModel) -> bool:
    """Whether peft merges what its forward pass computes: peft 0.13 forgets the magnitudes of an embedding's DoRA."""
    import torch

    tokens = torch.arange(8)[None]
    with torch.no_grad():
        merged = copy.deepcopy(model).merge_and_unload()
        return torch.allclose(merged(tokens).logits, model(tokens).logits, atol=1e-4)


@cache
def is_known_to_peft(kind: str) -> bool:
    """Whether the installed peft can make and save one of :data:`KINDS`: before 0.15 it has no Conv1d, for example."""
    from peft import get_peft_model_state_dict

    family, lora = KINDS[kind]
    if not can_be_made(family, **lora):
        return False
    model = adapted(family, **lora)
    if kind == 'embedding_dora' and not _is_merged_as_it_is_used(model):
        return False
    saved = get_peft_model_state_dict(model)  # without trained biases before 0.14
    return 'bias' not in lora or any(name.endswith('bias') for name in saved)


def adapted(family: str, dtype: torch.dtype | None = None, **lora: Any) -> PeftModel:
    """A model of :data:`tests.helpers.models.families.MODELS` with an adapter, by :func:`adapt`."""
    return adapt(build(family), dtype, **lora)


def merged_by_peft(model: PeftModel, folder: Path) -> PreTrainedModel:
    """A merged copy, saved to ``folder``."""
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(folder)
    return merged


def assert_rounded_once(saved: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """Check that every element is the float64 value rounded once to the saved dtype, within fp32's own error.

    With u the unit roundoff of the saved dtype and |w| the largest element of the tensor, the error is at most
    u * |exact| + 2**-20 * |w|. For bfloat16 the second term is a 4096th of the first at |w|.
    """
    import torch

    assert saved.keys() == exact.keys()
    for name, tensor in saved.items():
        unit = torch.finfo(tensor.dtype).eps / 2
        allowed = unit * exact[name].abs() + 2.0**-20 * exact[name].abs().max()
        assert ((tensor.double() - exact[name]).abs() <= allowed).all(), name


def around(**children: nn.Module) -> nn.Module:
    """A trained model that contains others, like XTuner's; its type is ``Module``."""
    from torch import nn

    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


class Planned:
    """An exporter and what it exports, as a save has them. Attributes are those of either.

    Attributes:
        request: What the exporter is asked for.
    """

    def __init__(self, model: nn.Module, module: str | None, dtype: str | None, options: dict[str, Any]) -> None:
        from xhf_hooks.exporters import exporter_for
        from xhf_hooks.exporters.base import ExportRequest
        from xhf_hooks.sources import source_for

        self.exporter = exporter_for(model, module, **options)
        self.request = ExportRequest(source_for(model).specs(), dtype, whole=model)
        self.export = self.exporter.export(self.request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.export if hasattr(self.export, name) else self.exporter, name)

    @property
    def left_out(self) -> list[str]:
        from xhf_hooks.exporters.base import names_left_out

        return names_left_out(self.request.specs, self.export.entries)

    def check_loading(self, placements: Sequence[Any]) -> list[str]:
        return self.exporter.check_loading(self.export, placements)

    def write_hf_assets(self, folder: Path, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> list[str]:
        """Ask the exporter again first if that is outdated, as a save does."""
        if self.exporter.is_outdated(self.export):
            self.export = self.exporter.export(self.request)
        of_files = self.exporter.write_hf_assets(self.export, folder, tokenizer, eos_token_ids)
        return [*self.export.warnings, *of_files]


def planned(model: nn.Module, dtype: str | None = None, module: str | None = None, **options: Any) -> Planned:
    """What a save of a model will hold."""
    return Planned(model, module, dtype, options)


def refusal(model: nn.Module, lora: str = 'adapter') -> str:
    """The message of the error when ``model`` cannot be exported this way."""
    import pytest

    from xhf_hooks.errors import ModelError, OptionError

    with pytest.raises((ModelError, OptionError)) as caught:
        planned(model, lora=lora)
    return str(caught.value)


def written(folder: Path, model, *, dtype: str | None = None, tokenizer=None) -> list[str]:
    """Writes the HF assets as a save does; returns the warnings."""
    folder.mkdir(exist_ok=True)
    return planned(model, dtype).write_hf_assets(folder, tokenizer, ())
