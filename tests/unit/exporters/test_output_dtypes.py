"""The option dtype against transformers itself: what a class keeps in fp32, and the dtypes of a base model's files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.config_fields import dtype_in
from tests.helpers.models.model_folder import rename_tensors
from tests.helpers.models.zoo import available, build
from xhf_hooks import save_hf
from xhf_hooks.errors import AgreedError

INDEX = 'model.safetensors.index.json'
FAMILIES = [family for family in ('t5', 'deepseek_v3', 'llama', 'qwen3_moe') if available(family)]


def dtypes_of(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in folder_tensors(folder).items()}


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('family', FAMILIES)
def test_kept_in_fp32_as_by_from_pretrained(family, dtype, tmp_path):
    """What users of save_pretrained get: they load the fp32 folder with this dtype, and save."""
    build(family).save_pretrained(tmp_path / 'fp32')
    loaded(tmp_path / 'fp32', getattr(torch, dtype), family).save_pretrained(tmp_path / 'expected')
    save_hf(loaded(tmp_path / 'fp32', family=family), tmp_path / 'hf_model', dtype=dtype)
    assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / 'expected')
    assert dtype_in(tmp_path / 'hf_model') == dtype_in(tmp_path / 'expected') == dtype


# dtype='base'


def mixed_base(folder: Path, family: str = 'llama', *, wide: str = 'norm', max_shard_size: str = '5GB') -> Path:
    """A base in bf16, except that tensors with ``wide`` in their names are fp32."""
    model = build(family).bfloat16()
    for name, parameter in model.named_parameters():
        if wide in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def loaded(base: Path, dtype: torch.dtype = torch.float32, family: str = 'llama') -> Any:
    return type(build(family)).from_pretrained(base, torch_dtype=dtype)


@pytest.mark.parametrize('max_shard_size', ['5GB', '20KB'])
@pytest.mark.parametrize('trained', [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_as_in_the_base(trained, max_shard_size, tmp_path):
    base = mixed_base(tmp_path / 'base', max_shard_size=max_shard_size)
    assert (base / INDEX).exists() == (max_shard_size == '20KB')
    save_hf(loaded(base, trained), tmp_path / 'hf_model', dtype='base')
    assert dtypes_of(tmp_path / 'hf_model') == dtypes_of(base)
    assert [*dtypes_of(base).values()].count(torch.float32) == 5
    assert dtype_in(tmp_path / 'hf_model') == dtype_in(base) == 'bfloat16'
    assert_loads_clean(tmp_path / 'hf_model', transformers.LlamaForCausalLM)
    if trained is torch.float32:  # nothing was rounded, so nothing is lost
        assert_same_folder_tensors(tmp_path / 'hf_model', base)


@pytest.mark.parametrize('family', [family for family in ('qwen3_moe', 'gpt2') if available(family)])
def test_base_with_other_names_in_memory(family, tmp_path):
    """Fused experts; and a base without the prefix of the class, as GPT-2 on the Hub."""
    base = mixed_base(tmp_path / 'base', family, wide='gate.weight' if family == 'qwen3_moe' else 'ln_')
    expected = dtypes_of(base)
    model = loaded(base, torch.bfloat16, family)
    if family == 'gpt2':
        rename_tensors(base, 'transformer.', '')
    save_hf(model, tmp_path / 'hf_model', dtype='base')
    assert dtypes_of(tmp_path / 'hf_model') == expected
    assert len(set(expected.values())) == 2


def test_what_the_base_lacks_is_as_most_of_it(tmp_path):
    base = mixed_base(tmp_path / 'base')
    model = transformers.LlamaForSequenceClassification.from_pretrained(base, torch_dtype=torch.float32, num_labels=3)
    save_hf(model, tmp_path / 'hf_model', dtype='base')
    found = dtypes_of(tmp_path / 'hf_model')
    assert found['score.weight'] == torch.bfloat16
    assert found['model.norm.weight'] == torch.float32


def test_lora(tmp_path):
    base = mixed_base(tmp_path / 'base')
    model = get_peft_model(loaded(base), LoraConfig(r=2, target_modules=['q_proj'], task_type='CAUSAL_LM'))
    save_hf(model, tmp_path / 'hf_model', dtype='base', lora='both')
    assert dtypes_of(tmp_path / 'hf_model') == dtypes_of(base)
    adapter = load_file(tmp_path / 'hf_model/adapter/adapter_model.safetensors')
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}  # as in training


@pytest.mark.parametrize(
    ('dtype', 'file', 'said'),
    [
        (torch.bfloat16, 'pytorch_model.bin', r"since the base model '.*/base' has no model\.safetensors"),
        (torch.float8_e4m3fn, 'model.safetensors', r'lm_head\.weight is quantized \(F8_E4M3\)'),
    ],
)
def test_bases_that_cannot_say_it(dtype, file, said, tmp_path):
    base = mixed_base(tmp_path / 'base')
    model, tensors = loaded(base), load_file(base / 'model.safetensors')
    (base / 'model.safetensors').unlink()
    save_file({**tensors, 'lm_head.weight': tensors['lm_head.weight'].to(dtype)}, base / file)
    with pytest.raises(AgreedError, match=f'option dtype: .*{said}'):
        save_hf(model, tmp_path / 'hf_model', dtype='base')
    assert not (tmp_path / 'hf_model').exists()
