"""Real runs of `xtuner train` of LLaVA at ZeRO-3, compared with XTuner's own conversion of their checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.xtuner_stack.launches import (
    PARTITIONED,
    TORCHRUN,
    Launch,
    Runs,
    export_of,
    filled_in,
    log_of,
    partitioning_config,
    saves_in,
)
from tests.helpers.compare import assert_loads_clean, folder_tensors
from tests.helpers.converted import assert_same_files, convert
from tests.helpers.zoo.llava import N_PATCHES, VOCAB_SIZE, save_bases

LAST = 2
FULL = {'freeze_llm': False, 'freeze_visual_encoder': False, 'visual_select_layer': -1}
RUNS = {
    name: Launch('llm', PARTITIONED, {'max_iters': LAST, **settings}, config='llava_config.py')
    for name, settings in {'pretrain': {}, 'full': FULL, 'lora': {'with_lora': True}}.items()
}
NEW_ROWS = 192 - VOCAB_SIZE


class LlavaRuns(Runs):
    """Of LLaVA, whose config names more places."""

    def _train(self, launch: Launch, name: str) -> list[str]:
        root = self._root
        places = {
            'llm_name_or_path': str(root / launch.family),
            'visual_encoder_name_or_path': str(root / 'clip'),
            'data_path': str(root / launch.data),
            'image_folder': str(root / 'images'),
            'complete_dir': str(root / name / 'complete'),
        }
        config = root / f'{name}.py'
        config.write_text(filled_in(launch.config, **places, **launch.settings))
        return [*TORCHRUN, str(config), '--launcher', 'pytorch', '--deepspeed', launch.deepspeed]


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    from PIL import Image

    root = tmp_path_factory.mktemp('llava')
    save_bases(root)
    (root / 'images').mkdir()
    samples = []
    for i in range(4):
        Image.effect_noise((9 + i, 11), 60).convert('RGB').save(root / 'images' / f'{i}.png')
        turns = [
            {'from': 'human', 'value': f'<image>\nwhat is this w{i}'},
            {'from': 'gpt', 'value': f'this is a cat w{i}'},
        ]
        samples.append({'id': i, 'image': f'{i}.png', 'conversations': turns})
    (root / 'data.json').write_text(json.dumps(samples))
    (root / PARTITIONED).write_text(json.dumps(partitioning_config()))
    return LlavaRuns(root, RUNS)


def trained_model(work_dir: Path) -> tuple[Any, Any]:
    """The config, and XTuner's model with the weights of the last checkpoint in the trained precision.

    XTuner's pth_to_hf does this, but rounds to float16 as it reads.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from mmengine.config import Config
    from xtuner.registry import BUILDER

    cfg = Config.fromfile(work_dir / f'{work_dir.name}.py')
    model = BUILDER.build(cfg.model)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=f'iter_{LAST}.pth')
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown
    return cfg, model.to(torch.bfloat16)


def converted_by_xtuner(work_dir: Path, folder: Path, save_format: str) -> Path:
    cfg, model = trained_model(work_dir)
    folder.mkdir()
    if save_format == 'huggingface':
        model = model.float()  # so that merging rounds once, to bfloat16 in the end
    model.to_hf(cfg, str(folder), fp32=True, save_format=save_format)
    return folder


def parts(folder: Path) -> dict[str, list[str]]:
    """Folder to the names of the files in it, without our manifest."""
    files = [path.relative_to(folder) for path in folder.rglob('*') if path.is_file()]
    found: dict[str, list[str]] = {}
    for path in sorted(files):
        if path.name != 'xhf_manifest.json':
            found.setdefault(str(path.parent), []).append(path.name)
    return found


def weights_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {str(at.relative_to(folder)): folder_tensors(at) for at in {f.parent for f in folder.rglob('*.safetensors')}}


@pytest.mark.parametrize('name', RUNS)
def test_xtuners_layout_is_what_xtuner_converts(runs, name, tmp_path):
    work_dir = runs.work_dir(name)
    expected = converted_by_xtuner(work_dir, tmp_path / 'expected', 'xtuner')
    found = export_of(work_dir)
    ours, theirs = weights_of(found), weights_of(expected)
    assert {part: set(tensors) for part, tensors in ours.items()} == {p: set(t) for p, t in theirs.items()}
    for part, tensors in theirs.items():
        for key, tensor in tensors.items():
            assert ours[part][key].dtype == tensor.dtype == torch.bfloat16, (part, key)
            assert torch.equal(ours[part][key], tensor), (part, key)
    their_files, our_files = parts(expected), parts(found)
    assert their_files.keys() == our_files.keys()
    beside_adapter = {'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json'}  # which XTuner lacks
    for folder, names in their_files.items():
        allowed = beside_adapter if folder == 'llm_adapter' else set()
        assert set(names) <= set(our_files[folder]) <= {*names, *allowed}


@pytest.mark.parametrize('name', ['full', 'lora'])
def test_one_model_is_what_xtuner_converts(runs, name, tmp_path):
    """But the rows of the new tokens, which XTuner draws at random. (It cannot convert a frozen visual encoder.)"""
    work_dir = runs.work_dir(name)
    expected = folder_tensors(converted_by_xtuner(work_dir, tmp_path / 'expected', 'huggingface'))
    found = folder_tensors(work_dir / 'complete')
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape, key
        rows = VOCAB_SIZE if len(tensor) == VOCAB_SIZE + NEW_ROWS else len(tensor)
        assert torch.equal(found[key][:rows], tensor[:rows].to(torch.bfloat16)), key


@pytest.mark.parametrize('name', RUNS)
def test_one_model_sees_what_xtuners_model_sees(runs, name):
    """Same image, same text, same logits, in float32 up to 1e-4."""
    from transformers import LlavaForConditionalGeneration, LlavaProcessor
    from xtuner.utils import IMAGE_TOKEN_INDEX

    work_dir = runs.work_dir(name)
    folder = work_dir / 'complete'
    loaded = assert_loads_clean(folder, LlavaForConditionalGeneration).float().eval()
    inputs = question_about_image(LlavaProcessor.from_pretrained(folder), work_dir.parent / 'images' / '0.png')
    is_image = inputs['input_ids'][0] == loaded.config.image_token_index
    assert int(is_image.sum()) == N_PATCHES
    first = int(is_image.nonzero()[0])
    ids = inputs['input_ids'][0].tolist()
    _, model = trained_model(work_dir)
    ids_of_xtuner = torch.tensor([[*ids[:first], IMAGE_TOKEN_INDEX, *ids[first + N_PATCHES :]]])
    data = {'input_ids': ids_of_xtuner, 'pixel_values': inputs['pixel_values']}
    with torch.no_grad():
        expected = model.float().eval()(data, mode='tensor').logits
        found = loaded(**inputs).logits[..., :VOCAB_SIZE]
    # Merged weights were rounded to bfloat16 once more than the factors
    tolerance = 2e-2 if name == 'lora' else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def question_about_image(processor: Any, file: Path) -> Any:
    from PIL import Image

    text = processor.tokenizer.apply_chat_template(
        [{'role': 'user', 'content': '<image>\nwhat is this'}], tokenize=False, add_generation_prompt=True
    )
    assert 'USER: <image>\nwhat is this ASSISTANT:' in text  # as XTuner's vicuna template has it
    inputs = processor(text=text, images=Image.open(file).convert('RGB'), return_tensors='pt')
    inputs.pop('token_type_ids', None)
    return inputs


@pytest.mark.parametrize('name', RUNS)
def test_one_model_generates(runs, name):
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

    work_dir = runs.work_dir(name)
    model = assert_loads_clean(work_dir / 'complete', LlavaForConditionalGeneration)
    processor = LlavaProcessor.from_pretrained(work_dir / 'complete')
    inputs = question_about_image(processor, work_dir.parent / 'images' / '1.png')
    inputs['pixel_values'] = inputs['pixel_values'].to(model.dtype)
    generated = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert generated.shape[1] == inputs['input_ids'].shape[1] + 4


def test_full_llm_generates(runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = export_of(runs.work_dir('full'))
    model = assert_loads_clean(folder, AutoModelForCausalLM)
    prompt = AutoTokenizer.from_pretrained(folder)('what is this', return_tensors='pt').input_ids
    assert model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape[1] == prompt.shape[1] + 3


@pytest.mark.parametrize('name', RUNS)
def test_what_the_log_says(runs, name):
    log = log_of(runs.work_dir(name))
    assert saves_in(log) == [f'iter_{LAST}'] * 2  # two hooks
    frozen = re.findall(r'(\w+) is frozen and not written', log)
    assert frozen == (['llm', 'visual_encoder'] if name == 'pretrain' else [])


@pytest.mark.parametrize('name', RUNS)
def test_training_moved_what_is_not_frozen(runs, name):
    """Else equal weights would prove little."""
    work_dir = runs.work_dir(name)
    biases = [t for key, t in folder_tensors(export_of(work_dir) / 'projector').items() if key.endswith('bias')]
    assert len(biases) == 2 and all(torch.count_nonzero(bias) for bias in biases)
    if name == 'lora':
        for part in ('llm_adapter', 'visual_encoder_adapter'):
            tensors = folder_tensors(export_of(work_dir) / part)
            assert all(torch.count_nonzero(t) for key, t in tensors.items() if 'lora_B' in key and 'layers.0' in key)
    if name == 'full':
        base = folder_tensors(work_dir.parent / 'llm')
        trained = folder_tensors(export_of(work_dir))
        assert [key for key, t in base.items() if torch.equal(trained[key], t.to(torch.bfloat16))] == []


@pytest.mark.parametrize('name', RUNS)
def test_a_converted_checkpoint_is_the_hooks_export(runs, name, tmp_path):
    work_dir = runs.work_dir(name)
    assert_same_files(convert(work_dir, tmp_path / 'out'), export_of(work_dir))
