"""Real runs of `xtuner train` of LLaVA at ZeRO-3, compared with XTuner's own conversion of their checkpoints."""

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from mmengine.config import Config
from PIL import Image
from transformers import LlavaForConditionalGeneration, LlavaProcessor
from xtuner.model import LLaVAModel
from xtuner.model.utils import guess_load_checkpoint
from xtuner.utils import IMAGE_TOKEN_INDEX, PROMPT_TEMPLATE

from tests.e2e.xtuner_stack.launches import LAST, LLAVA_RUNS, export_of
from tests.helpers.checks.compare import assert_loads_clean, assert_same_tensors, folder_tensors
from tests.helpers.checks.pages import code
from tests.helpers.models.zoo.llava import VOCAB_SIZE, n_image_tokens

pytestmark = pytest.mark.parametrize('name', LLAVA_RUNS)


@pytest.fixture(autouse=True)
def at_the_root(runs, monkeypatch):
    """Where the base models are that the configs name."""
    monkeypatch.chdir(runs.root)


def trained_model(work_dir: Path) -> tuple[Any, Any]:
    """The config, and XTuner's model with the weights of the last checkpoint in the trained precision.

    XTuner's pth_to_hf does this, but rounds to float16 as it reads.
    """
    from xtuner.registry import BUILDER

    cfg = Config.fromfile(work_dir / f'{work_dir.name}.py')
    # With transformers' attention: that of XTuner 0.1.15 sees later tokens where flash_attn is missing
    with mock.patch('xtuner.model.llava.dispatch_modules'):
        model = BUILDER.build(cfg.model)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=f'iter_{LAST}.pth')
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown
    return cfg, model.to(torch.bfloat16)


def has_to_hf() -> bool:
    return hasattr(LLaVAModel, 'to_hf')


def converts_to_one_model() -> bool:
    """XTuner before 0.1.18 writes its own layout alone; later ones fail where transformers renamed the parts."""
    return has_to_hf() and not getattr(LlavaForConditionalGeneration, '_checkpoint_conversion_mapping', None)


def converted_by_xtuner(work_dir: Path, folder: Path, save_format: str) -> Path:
    if not has_to_hf():
        arguments = [f'{work_dir.name}.py', str(work_dir / f'iter_{LAST}.pth'), str(folder), '--fp32']
        with mock.patch.object(sys, 'argv', ['pth_to_hf', *arguments]):
            runpy.run_module('xtuner.tools.model_converters.pth_to_hf', run_name='__main__')
        return folder
    cfg, model = trained_model(work_dir)
    folder.mkdir()
    if save_format == 'huggingface':
        model = model.float()  # so that merging rounds once, to bfloat16 in the end
    model.to_hf(cfg, str(folder), fp32=True, save_format=save_format)
    return folder


def weights_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(at.relative_to(folder)): folder_tensors(at) for at in {f.parent for f in folder.rglob('*.safetensors')}}


def test_xtuners_layout_is_what_xtuner_converts(runs, name, tmp_path):
    work_dir = runs.work_dir(name)
    expected = converted_by_xtuner(work_dir, tmp_path / 'expected', 'xtuner')
    ours, theirs = weights_of(export_of(work_dir)), weights_of(expected)
    assert {part: set(tensors) for part, tensors in ours.items()} == {p: set(t) for p, t in theirs.items()}
    for part, tensors in theirs.items():
        for key, tensor in tensors.items():
            assert ours[part][key].dtype == torch.bfloat16, (part, key)
            assert torch.equal(ours[part][key], tensor.to(torch.bfloat16)), (part, key)
    for path in expected.rglob('*.json'):
        assert path.name.endswith('.index.json') or (export_of(work_dir) / path.relative_to(expected)).exists(), path


def test_one_model_is_what_xtuner_converts_and_sees(runs, name, tmp_path):
    """Same image, same text, same logits, in float32 up to 1e-4; and it generates."""
    work_dir, folder = runs.work_dir(name), runs.root / f'{name}_complete'
    if name == 'llava_lora' and converts_to_one_model():  # not a frozen visual encoder
        expected = folder_tensors(converted_by_xtuner(work_dir, tmp_path / 'expected', 'huggingface'))
        found = folder_tensors(folder)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            # But the rows of the new tokens, which XTuner draws at random
            rows = VOCAB_SIZE if len(tensor) == 192 else len(tensor)
            assert torch.equal(found[key][:rows], tensor[:rows].to(torch.bfloat16)), key
    model, processor = assert_loads_clean(folder, LlavaForConditionalGeneration), LlavaProcessor.from_pretrained(folder)
    inputs = question_about_image(processor, runs.root / 'images' / '0.png')
    asked = inputs | {'pixel_values': inputs['pixel_values'].to(model.dtype)}
    generated = model.generate(**asked, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert generated.shape[1] == inputs['input_ids'].shape[1] + 4
    model = model.float().eval()
    is_image = inputs['input_ids'][0] == model.config.image_token_index
    n_tokens = n_image_tokens()
    assert int(is_image.sum()) == n_tokens
    first, ids = int(is_image.nonzero()[0]), inputs['input_ids'][0].tolist()
    ids_of_xtuner = torch.tensor([[*ids[:first], IMAGE_TOKEN_INDEX, *ids[first + n_tokens :]]])
    data = {'input_ids': ids_of_xtuner, 'pixel_values': inputs['pixel_values']}
    with torch.no_grad():
        logits = trained_model(work_dir)[1].float().eval()(data, mode='tensor').logits
        found = model(**inputs).logits[..., :VOCAB_SIZE]
    # Merged weights were rounded to bfloat16 once more than the factors
    tolerance = 2e-2 if name == 'llava_lora' else 1e-4
    torch.testing.assert_close(found, logits, rtol=tolerance, atol=tolerance)


def test_the_next_stage_starts_from_the_projector_of_a_save(runs, name, tmp_path, monkeypatch):
    """By the code of the page; `pretrained_pth` is what guess_load_checkpoint is given."""
    work_dir = runs.work_dir(name)
    projector = {key: t for key, t in trained_model(work_dir)[1].state_dict().items() if key.startswith('projector.')}
    monkeypatch.chdir(tmp_path)
    exec(code('projector.pth', 'xtuner.md').replace('work_dirs/NAME', str(work_dir.absolute())), {})
    assert_same_tensors(guess_load_checkpoint('projector.pth'), projector)


def question_about_image(processor: Any, file: Path) -> Any:
    text = processor.tokenizer.apply_chat_template(
        [{'role': 'user', 'content': '<image>\nwhat is this'}], tokenize=False, add_generation_prompt=True
    )
    template = PROMPT_TEMPLATE.get('llama3_chat', PROMPT_TEMPLATE.llama2_chat)
    assert template.INSTRUCTION.format(input='<image>\nwhat is this') in text
    inputs = processor(text=text, images=Image.open(file).convert('RGB'), return_tensors='pt')
    return {name: tensor for name, tensor in inputs.items() if name != 'token_type_ids'}
