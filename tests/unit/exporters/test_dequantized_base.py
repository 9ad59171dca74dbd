"""Models that were loaded from quantized files with ``dequantize=True`` (the recipe for gpt-oss) are saved as trained.

``save_pretrained`` of transformers 5.23 converts them back to the quantizer's names, and nothing loads the result.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.checks.compare import loaded, same_logits
from tests.helpers.checks.converted import assert_converted_as_by_the_hook, checkpoint_of, convert
from tests.helpers.models.adapted import EXPERTS, adapt
from tests.helpers.models.families import MODELS
from tests.helpers.models.zoo import build
from tests.helpers.runs.engines import save_folder

pytestmark = pytest.mark.modern_only

#: Of one scale: it divides the odd sizes of the models.
BLOCK = 1


def quantized(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    fields = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**fields, 'quantization_config': config}))


def from_mxfp4(folder: Path) -> Any:
    from transformers import Mxfp4Config

    kind, options = MODELS['gpt_oss']
    options = {**options, 'hidden_size': 64, 'intermediate_size': 32, 'head_dim': 16}  # multiples of 32, in all
    base = build('gpt_oss', models={'gpt_oss': (kind, options)})
    base.bfloat16().save_pretrained(folder)
    packed = {}
    for name, tensor in load_file(folder / 'model.safetensors').items():
        if name.endswith(('gate_up_proj', 'down_proj')):
            n_experts, rows, columns = tensor.shape
            blocks = torch.arange(n_experts * columns * rows // 2).remainder(251).to(torch.uint8)
            packed[f'{name}_blocks'] = blocks.reshape(n_experts, columns, rows // 32, 16)
            packed[f'{name}_scales'] = torch.full((n_experts, columns, rows // 32), 120, dtype=torch.uint8)
        else:
            packed[name] = tensor
    quantized(folder, packed, quant_method='mxfp4', modules_to_not_convert=['lm_head'])
    options = dict(quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def from_fp8(folder: Path) -> Any:
    from transformers import FineGrainedFP8Config

    build('llama').bfloat16().save_pretrained(folder)
    stored = {}
    for name, tensor in load_file(folder / 'model.safetensors').items():
        if name.endswith('_proj.weight'):
            rows, columns = (-(-size // BLOCK) for size in tensor.shape)
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f'{name}_scale_inv'] = torch.full((rows, columns), 0.5)
        else:
            stored[name] = tensor
    quantized(folder, stored, quant_method='fp8', activation_scheme='dynamic', weight_block_size=[BLOCK, BLOCK])
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    try:
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    except RuntimeError as error:
        if 'GPU' not in str(error):
            raise
        pytest.skip(f'this transformers reads FP8 on a GPU alone: {error}')


#: What the installed transformers can load so, by the class that it needs.
LOADS = [
    load
    for load, needs in {from_mxfp4: 'Mxfp4Config', from_fp8: 'FineGrainedFP8Config'}.items()
    if hasattr(transformers, needs)
]


@pytest.mark.parametrize('load', LOADS)
def test_what_was_trained_is_loaded_of_a_save_and_of_a_conversion(load, tmp_path):
    """The base's config.json still names the quantizer."""
    model = load(tmp_path / 'base')
    assert not hasattr(model.config, 'quantization_config')
    save_folder(model, tmp_path / 'hf_model')
    checkpoint = checkpoint_of(model, tmp_path / 'run', whole=True, prefix='llm.')
    convert(checkpoint, tmp_path / 'converted', '--base', tmp_path / 'base')
    for folder in ('hf_model', 'converted'):
        again = loaded(tmp_path / folder, type(model))
        assert not hasattr(again.config, 'quantization_config') and same_logits(model, again)


@pytest.mark.parametrize('load', LOADS)
def test_a_conversion_of_its_adapters_checkpoint_is_the_hooks(load, tmp_path):
    model = adapt(load(tmp_path / 'base'), torch.bfloat16, target_modules=['q_proj'])
    checkpoint = checkpoint_of(model, tmp_path / 'run', whole=True)
    assert_converted_as_by_the_hook(checkpoint, model, tmp_path, 'adapter', 'merge')


@pytest.mark.skipif(from_mxfp4 not in LOADS, reason='this transformers has no Mxfp4Config')
def test_merged_adapter(tmp_path):
    model = adapt(from_mxfp4(tmp_path / 'base'), target_modules=['q_proj'], target_parameters=EXPERTS)
    save_folder(model, tmp_path / 'hf_model', lora='merge', dtype='float32')
    again = loaded(tmp_path / 'hf_model', type(model.get_base_model()))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        difference = again.float()(input_ids=ids).logits - model.float().merge_and_unload()(input_ids=ids).logits
    assert difference.abs().max() < 1e-4
