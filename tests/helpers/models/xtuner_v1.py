"""Stand-ins for models of XTuner V1, which is on no package index: what an exporter asks of ``xtuner.v1.model.base``.

Their tensors are those of a folder of transformers, under V1's names, and with V1's fused experts. What V1 itself
writes is in tests/trainers/test_xtuner_v1.py.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.helpers.checks.compare import folder_tensors

_FUSED = {'fused_w1w3': ('gate_proj', 'up_proj'), 'fused_w2': ('down_proj',)}


class BaseModel(nn.Module):
    """V1's base class, as far as it describes how a model is saved.

    Args:
        tensors: By V1's names.
        n_experts: In each layer.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], hf_config: Any, n_experts: int = 0) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            hf_config=hf_config,
            save_hf=None if hf_config is None else hf_config.save_pretrained,
            float8_cfg=None,
            hf_save_cfg=SimpleNamespace(fp32_keys_pattern=None),
            hf_key_mapping=None,
        )
        self._hf_path: Path | None = None
        self.n_experts = n_experts
        for name, tensor in tensors.items():
            *path, last = name.split('.')
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(last, nn.Parameter(tensor.clone(), tensor.is_floating_point()))
        self.load_spec_mapping = {
            name: SimpleNamespace(name=name, global_hf_keys=self.to_hf_key_list(name), shards=[]) for name in tensors
        }

    def to_hf_key_list(self, key: str) -> list[str]:
        raise NotImplementedError

    def param_to_safetensor(self, safetensor: torch.Tensor, hf_param_name: str) -> torch.Tensor:
        return safetensor

    def _get_save_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        patterns = self.config.hf_save_cfg.fp32_keys_pattern or ()
        return torch.float32 if any(re.search(pattern, name) for pattern in patterns) else dtype

    def set_hf(self, hf_path: Path) -> None:
        self._hf_path = hf_path

    def save_hf(self, hf_dir: Path) -> None:
        raise AssertionError("V1's own save")


class Model(BaseModel):
    """One with names of its own, such as Qwen3MoE of V1."""

    prefix = ''

    def to_hf_key_list(self, key: str) -> list[str]:
        if not key.startswith('lm_head'):
            key = f'model.{key}'
        key = self.prefix + re.sub(r'layers\.(\d+)\.(experts|gate)\b', r'layers.\1.mlp.\2', key)
        for fused, parts in _FUSED.items():
            if fused in key:
                return [key.replace(fused, f'{i}.{part}') for i in range(self.n_experts) for part in parts]
        return [key]


class Composed(BaseModel):
    """One of several models, such as Qwen3-VL's."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__({}, None)
        for name, part in parts.items():
            self.add_module(name, part)


def of_folder(folder: Path, kind: type[Model] = Model) -> Model:
    """V1's model of a folder of transformers' Qwen3 or Qwen3-MoE."""
    from transformers import AutoConfig

    stored, tensors = folder_tensors(folder), {}
    config = AutoConfig.from_pretrained(folder)
    n_experts = getattr(config, 'num_experts', 0)
    for name, tensor in stored.items():
        own = name.removeprefix('model.').replace('mlp.gate.', 'gate.')
        found = re.fullmatch(r'(layers\.\d+)\.mlp\.experts\.0\.(gate|down)_proj\.weight', own)
        if found is not None:
            fused = 'fused_w1w3' if found[2] == 'gate' else 'fused_w2'
            stem = f'model.{found[1]}.mlp.experts'
            parts = [stored[f'{stem}.{i}.{part}.weight'] for i in range(n_experts) for part in _FUSED[fused]]
            tensors[f'{found[1]}.experts.{fused}.weight'] = torch.cat(parts)
        elif '.experts.' not in own:
            tensors[own] = tensor
    config.architectures = ['Qwen3MoeForCausalLM' if n_experts else 'Qwen3ForCausalLM']
    return kind(tensors, config, n_experts)


@contextmanager
def imported() -> Iterator[None]:
    """V1 seems to be imported, as it is wherever there is such a model."""
    base, models = types.ModuleType('xtuner.v1.model.base'), types.ModuleType('xtuner.v1.model')
    base.BaseModel = BaseModel  # type: ignore[attr-defined]
    models.get_model_config_from_hf = _config_of  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {module.__name__: module for module in (base, models)}):
        yield


def _config_of(folder: Path) -> Any:
    return SimpleNamespace(build=lambda: of_folder(folder).to('meta'))
