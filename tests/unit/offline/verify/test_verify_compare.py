"""Two models: identical, the same but for rounding, or different; what is rounding, against exact arithmetic."""

import json
import math
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.models.model_folder import edit_json, save_model
from tests.helpers.models.zoo import build, projector
from tests.helpers.models.zoo.llava import TinyLlava, save_bases
from xhf_hooks import save_hf
from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.offline.commands.convert import main as convert_main
from xhf_hooks.offline.convert.conversion import ConvertOptions
from xhf_hooks.offline.verify.compare import DIFFERENT, IDENTICAL, OTHER_CONFIG, ROUNDING, Comparison, compare_models
from xhf_hooks.offline.verify.models import open_models
from xhf_hooks.offline.verify.rounding import compare

WEIGHTS = 'model.safetensors'
NAME = 'model.layers.1.mlp.up_proj.weight'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return save_model('llama', tmp_path_factory.mktemp('model') / 'model')


def compared(a: Path, b: Path, **options: object) -> Comparison:
    with TemporaryDirectory() as scratch:
        return compare_models(*open_models(a, b, ConvertOptions(**options), Path(scratch)), workers=2)


def changed(model: Path, folder: Path, *casts: torch.dtype, edit: Any = torch.Tensor.contiguous) -> Path:
    """A copy with all tensors cast to one type after the other, and one of them edited, or without it."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / WEIGHTS)
    for dtype in casts:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors[NAME] = edit(tensors[NAME].clone())
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)
    return folder


def test_shards_do_not_matter(model, tmp_path):
    save_model('llama', tmp_path / 'shards', max_shard_size='100KB')
    assert len(list((tmp_path / 'shards').glob('*.safetensors'))) > 1
    found = compared(model, tmp_path / 'shards')
    assert found.verdict == IDENTICAL and found.count(IDENTICAL) == len(load_file(model / WEIGHTS))
    assert found.read_nbytes == 2 * sum(tensor.nbytes for tensor in load_file(model / WEIGHTS).values())
    assert compared(model / WEIGHTS, tmp_path / 'shards').verdict == IDENTICAL


@pytest.mark.parametrize(('dtype', 'swap'), [(torch.bfloat16, False), (torch.float16, True)])
def test_a_cast_is_rounding(model, tmp_path, dtype, swap):
    pair = [model, changed(model, tmp_path / 'b', dtype)]
    found = compared(*(reversed(pair) if swap else pair))
    assert found.verdict == ROUNDING and found.count(ROUNDING) == len(found.tensors)
    assert 0.4 < max(tensor.found.max_ulps for tensor in found.tensors) <= 0.5
    code = {torch.bfloat16: 'BF16', torch.float16: 'F16'}[dtype]
    assert {tensor.through for tensor in found.tensors} == {code}


def test_a_hidden_cast_is_found(model, tmp_path):
    """fp32 numbers that were first rounded, as xtuner's pth_to_hf --fp32 stores: 1e-4 apart, and proven the same."""
    found = compared(model, changed(model, tmp_path / 'b', torch.float16, torch.float32))
    assert found.verdict == ROUNDING and found.count(ROUNDING) == len(found.tensors)
    assert all(tensor.ulp_of == 'F32' and tensor.found.max_ulps > 100 for tensor in found.tensors)


def bump(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    flat[7] = torch.nextafter(flat[7], torch.tensor(9.0, dtype=tensor.dtype))
    return tensor


@pytest.mark.parametrize('casts', [(), (torch.bfloat16,), (torch.float16, torch.float32)])
def test_one_unit_in_one_element_is_a_difference(model, tmp_path, casts):
    """Whatever else was rounded: of the narrower type one more unit is no rounding."""
    found = compared(model, changed(model, tmp_path / 'b', *casts, edit=bump))
    assert found.verdict == DIFFERENT and found.count(DIFFERENT) == 1
    worst = found.tensors[0]
    assert worst.name == NAME and worst.verdict == DIFFERENT
    if not casts:
        assert (worst.found.n_differ, worst.found.max_ulps) == (1, 1.0)


def test_missing_extra_and_other_shapes(model, tmp_path):
    less = changed(model, tmp_path / 'less', edit=lambda tensor: None)
    assert compared(model, less).missing == [NAME] and compared(less, model).extra == [NAME]
    assert compared(model, less).verdict == DIFFERENT
    found = compared(model, changed(model, tmp_path / 'shape', edit=lambda tensor: tensor[:-1].contiguous()))
    assert found.tensors[0].verdict == DIFFERENT and 'shapes' in found.tensors[0].reason


def test_tensors_larger_than_what_is_read_at_once(tmp_path):
    """The last element counts; empty ones and scalars do no harm."""
    big = torch.randn(5_000_000)
    for folder, value in (('a', 1.0), ('b', 1.0), ('c', 2.0)):
        (tmp_path / folder).mkdir()
        big[-1] = value
        save_file({'big': big, 'empty': torch.zeros(0, 3), 'one': torch.ones(())}, tmp_path / folder / WEIGHTS)
    assert compared(tmp_path / 'a', tmp_path / 'b').verdict == IDENTICAL
    found = compared(tmp_path / 'a', tmp_path / 'c')
    assert (found.tensors[0].found.n_differ, found.tensors[0].found.max_abs, found.count(DIFFERENT)) == (1, 1.0, 1)


def test_experts_that_are_made_of_one_tensor(tmp_path):
    """transformers 5 trains them fused and saves them apart: compared as converted."""
    model = build('mixtral')
    model.save_pretrained(tmp_path / 'model')
    torch.save({f'llm.{name}': tensor for name, tensor in model.state_dict().items()}, tmp_path / 'weights.pth')
    found = compared(tmp_path / 'model', tmp_path / 'weights.pth', base=str(tmp_path / 'model'))
    assert found.verdict == IDENTICAL and len(found.tensors) == len(load_file(tmp_path / 'model' / WEIGHTS))
    with pytest.raises(CheckpointError, match='convert one of them with xhf-convert first'):
        compared(tmp_path / 'weights.pth', tmp_path / 'weights.pth')


def test_a_model_does_not_hold_others_below_it(model, tmp_path):
    """Trainer's output_dir with its checkpoints, and a checkpoint into which a conversion wrote."""
    run = tmp_path / 'run'
    shutil.copytree(model, run)
    shutil.copytree(model, run / 'checkpoint-5')
    shutil.copytree(model, run / 'checkpoint-5' / 'hf')
    (run / 'checkpoint-5' / 'global_step5').mkdir()
    assert compared(run, model).verdict == IDENTICAL
    found = compared(run / 'checkpoint-5' / 'hf', run / 'checkpoint-5')
    assert found.verdict == IDENTICAL and found.count(IDENTICAL) == len(load_file(model / WEIGHTS))
    held = f"{run}/checkpoint-5 also holds DeepSpeed's global_step5; its Hugging Face files are compared"
    assert found.notes == [held]


@pytest.mark.parametrize('swap', [False, True])
def test_a_tied_head_is_compared_with_what_is_loaded_there(tmp_path, swap):
    """Stored or not, by the config of the model that lacks it."""
    save_model('llama_tied', tmp_path / 'tied')
    assert json.loads((tmp_path / 'tied' / 'config.json').read_text())['tie_word_embeddings']
    tensors = load_file(tmp_path / 'tied' / WEIGHTS)
    head = tensors['model.embed_tokens.weight'].clone()
    for folder, added in (('same', 0.0), ('other', 1.0)):
        shutil.copytree(tmp_path / 'tied', tmp_path / folder)
        save_file({**tensors, 'lm_head.weight': head + added}, tmp_path / folder / WEIGHTS)
    pair = lambda folder: [tmp_path / 'tied', tmp_path / folder][:: -1 if swap else 1]  # noqa: E731
    found = compared(*pair('same'))
    assert found.verdict == IDENTICAL and not found.missing and not found.extra
    assert len(found.tensors) == len(tensors) + 1
    found = compared(*pair('other'))
    assert found.verdict == DIFFERENT and found.count(DIFFERENT) == 1
    edit_json(tmp_path / 'tied' / 'config.json', tie_word_embeddings=False)
    found = compared(*pair('same'))
    assert (found.missing if swap else found.extra) == ['lm_head.weight'] and found.verdict == DIFFERENT


def test_a_note_for_each_file_that_differs(model, tmp_path):
    """Those that loaders read: config, tokenizer, adapter settings, code."""
    shutil.copytree(model, tmp_path / 'b')
    for name in ('trainer_state.json', 'README.md', 'all_results.json'):
        (tmp_path / 'b' / name).write_text('{}')
    edit_json(tmp_path / 'b' / 'config.json', transformers_version='4.0', _name_or_path='elsewhere')
    found = compared(model, tmp_path / 'b')
    assert found.verdict == IDENTICAL and found.config == found.files == []
    (tmp_path / 'b' / 'merges.txt').write_text('a b')
    found = compared(model, tmp_path / 'b')
    assert found.verdict == IDENTICAL and found.as_json()['same'], 'other files do not make another model'
    assert found.lines()[-1].startswith('weights identical, but other files differ: 21 identical, 0 rounding')
    edit_json(tmp_path / 'b' / 'config.json', max_position_embeddings=7)
    vocabulary = json.loads((tmp_path / 'b' / 'tokenizer.json').read_text())
    number, vocabulary['model']['vocab']['w9'] = vocabulary['model']['vocab']['w9'], 10_000
    (tmp_path / 'b' / 'tokenizer.json').write_text(json.dumps(vocabulary))
    (tmp_path / 'b' / 'modeling_x.py').write_text('')
    for file, rank in (('a', 8), ('b', 16)):
        folder = model if file == 'a' else tmp_path / 'b'
        folder = Path(shutil.copytree(folder, tmp_path / f'with_{file}'))
        settings = {'lora_alpha': rank, 'target_modules': ['q', 'v'][:: 1 if file == 'a' else -1]}
        (folder / 'adapter_config.json').write_text(json.dumps(settings))
    found = compared(tmp_path / 'with_a', tmp_path / 'with_b')
    config = json.loads((model / 'config.json').read_text())
    assert found.config == [
        'adapter_config.json: lora_alpha 8, 16',
        f'max_position_embeddings {config["max_position_embeddings"]}, 7',
        'modeling_x.py is only in B',
    ]
    changed_token = f'tokenizer.json differs: model.vocab.w9 {number}, 10000'
    assert found.files == ['merges.txt is only in B', changed_token]
    assert found.verdict == OTHER_CONFIG and not found.as_json()['same']
    said = found.lines()[-1]
    assert said.startswith('same weights, other config: adapter_config.json: lora_alpha 8, 16; max_position_embeddings')


@pytest.mark.parametrize('fields', [{'num_attention_heads': 1}, {'rms_norm_eps': 0.5, 'mlp_bias': True}])
def test_the_same_weights_with_another_config_are_another_model(model, fields, tmp_path):
    b = changed(model, tmp_path / 'b', torch.bfloat16)
    assert compared(model, b).verdict == ROUNDING
    edit_json(b / 'config.json', dtype='bfloat16', use_cache=False)  # as of weights with that dtype
    assert compared(model, b).verdict == ROUNDING
    edit_json(b / 'config.json', **fields)
    found = compared(model, b)
    assert found.verdict == OTHER_CONFIG and len(found.config) == len(fields)
    assert 'same weights but for rounding, other config: ' in found.lines()[-1]


@pytest.mark.parametrize('family', ['llava', 'gemma3', 'gpt_neox', 'phi3', 'qwen2_vl', 'llama'])
def test_what_only_older_readers_need_is_no_difference(family, tmp_path):
    """Of the config and of parts of it; a default is none, either."""
    model = build(family)
    model.save_pretrained(tmp_path / 'own')
    save_hf(model, tmp_path / 'ours', model_card=False)
    found = compared(tmp_path / 'own', tmp_path / 'ours')
    assert found.verdict == IDENTICAL and found.config == found.files == []


def test_an_index_that_names_a_missing_file(tmp_path):
    save_model('llama', tmp_path / 'shards', max_shard_size='100KB')
    min((tmp_path / 'shards').glob('*.safetensors')).unlink()
    with pytest.raises(DamagedError, match='the index names files that are missing: model-00001-of'):
        compared(tmp_path / 'shards', tmp_path / 'shards')


def test_the_order_of_a_list_counts(model, tmp_path):
    """Unless peft has it as a set."""
    shutil.copytree(model, tmp_path / 'b')
    for folder, kinds in ((model, ['full', 'sliding']), (tmp_path / 'b', ['sliding', 'full'])):
        folder = Path(shutil.copytree(folder, tmp_path / f'with_{folder.name}'))
        edit_json(folder / 'config.json', layer_types=kinds)
    (found,) = compared(tmp_path / f'with_{model.name}', tmp_path / 'with_b').config
    assert found == "layer_types ['full', 'sliding'], ['sliding', 'full']"


def test_a_checkpoint_is_compared_with_its_config_and_tokenizer(model, tmp_path):
    """As xhf-convert would write them."""
    torch.save(AutoModelForCausalLM.from_pretrained(model).state_dict(), tmp_path / 'weights.pth')
    found = compared(model, tmp_path / 'weights.pth', base=str(model))
    assert found.verdict == IDENTICAL and found.config == found.files == []
    shutil.copytree(model, tmp_path / 'b')
    edit_json(tmp_path / 'b' / 'config.json', max_position_embeddings=7)
    (found,) = compared(tmp_path / 'b', tmp_path / 'weights.pth', base=str(model)).config
    assert found.startswith('max_position_embeddings 7, ')


@pytest.mark.parametrize('lora', ['adapter', 'merge', 'both'])
def test_a_folder_shows_how_its_run_was_converted(model, lora, tmp_path):
    """No option has to be given anew."""
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=2, target_modules=['q_proj']))
    for name, parameter in tuned.named_parameters():
        if 'lora_B' in name:
            torch.nn.init.normal_(parameter)
    torch.save(tuned.state_dict(), tmp_path / 'weights.pth')
    tuned.save_pretrained(tmp_path)
    args = [tmp_path / 'weights.pth', tmp_path / 'out', '--base', model, '--lora', lora]
    assert convert_main([*map(str, args)]) == 0
    found = compared(tmp_path / 'out', tmp_path / 'weights.pth', base=str(model))
    assert found.verdict == IDENTICAL and found.config == found.files == []


def test_llava_in_the_layout_of_transformers(tmp_path, monkeypatch):
    """The folder shows its layout."""
    for name in ('xtuner', 'xtuner.model', 'xtuner.model.modules'):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, 'xtuner.model.modules.projector', projector)  # stands for xtuner's
    save_bases(tmp_path)
    llava = TinyLlava(tmp_path, frozen=('visual_encoder',), dtype=torch.bfloat16)
    state = {name: tensor for name, tensor in llava.state_dict().items() if not name.startswith('visual_encoder.')}
    cfg = f"""model = dict(
        type='xtuner.model.LLaVAModel', freeze_llm=False, freeze_visual_encoder=True,
        llm=dict(type='transformers.AutoModelForCausalLM.from_pretrained',
                 pretrained_model_name_or_path={str(tmp_path / 'llm')!r}),
        visual_encoder=dict(type='transformers.CLIPVisionModel.from_pretrained',
                            pretrained_model_name_or_path={str(tmp_path / 'clip')!r}))"""
    torch.save({'state_dict': state, 'meta': {'cfg': cfg}}, tmp_path / 'iter_5.pth')
    for layout in ('huggingface', 'xtuner'):
        args = [tmp_path / 'iter_5.pth', tmp_path / layout, '--llava-format', layout]
        assert convert_main([*map(str, args)]) == 0
        found = compared(tmp_path / layout, tmp_path / 'iter_5.pth')
        assert found.verdict == IDENTICAL and len(found.tensors) > 20 and found.config == found.files == []


def has_next(code: str) -> bool:
    """Whether torch knows the next number of a dtype on a CPU, as of float16 since 2.2."""
    try:
        torch.nextafter(*torch.ones(2, 1, dtype=TORCH_DTYPES[code]))
    except RuntimeError:
        return False
    return True


FLOATS = tuple(filter(has_next, ('F64', 'F32', 'BF16', 'F16')))


def neighbours(value: Fraction, code: str) -> set[Fraction]:
    """The values of a dtype nearest to a number: one, or two that are equally near."""
    dtype = TORCH_DTYPES[code]
    near = torch.tensor(float(value), dtype=torch.float64).to(dtype)
    if not math.isfinite(float(near)):
        return set()  # too large for the type: infinity is no rounding
    found = [near, *(torch.nextafter(near, torch.tensor(s * math.inf, dtype=dtype)) for s in (1, -1))]
    exact = [Fraction(float(one)) for one in found if math.isfinite(float(one))]
    least = min((abs(one - value) for one in exact), default=None)
    return {one for one in exact if abs(one - value) == least}


def is_rounding(a: float, b: float, a_code: str, b_code: str) -> bool:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    if not (math.isfinite(a) and math.isfinite(b)):
        return False
    x, y = Fraction(a), Fraction(b)
    return y in neighbours(x, b_code) or x in neighbours(y, a_code)


values = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.floats(-2, 2, width=32),
    st.floats(-(2**-20), 2**-20, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-11, 1 + 3 * 2**-8, 65504.0, 65520.0, 2**-24, 2**-25, 3.4e38]),
)


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(st.tuples(values, st.sampled_from(['rounded', 'next', 'other']), values), max_size=8),
    codes=st.sampled_from([(a, b) for a in FLOATS for b in FLOATS if a != b]),
)
def test_against_fractions(numbers, codes):
    a_dtype, b_dtype = (TORCH_DTYPES[code] for code in codes)
    a = torch.tensor([one for one, _, _ in numbers], dtype=torch.float64).to(a_dtype)
    b = a.to(b_dtype)
    for i, (_, kind, other) in enumerate(numbers):
        if kind == 'next':
            b[i] = torch.nextafter(b[i], torch.tensor(math.inf, dtype=b_dtype))
        elif kind == 'other':
            b[i] = torch.tensor(other, dtype=torch.float64).to(b_dtype)
    found = compare(a, b, codes)
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    narrow = max(codes, key=lambda code: torch.finfo(TORCH_DTYPES[code]).eps)
    assert found.unexplained[narrow] == sum(not is_rounding(x, y, *codes) for x, y in pairs)
    assert found.n_differ == sum(x != y and not (math.isnan(x) and math.isnan(y)) for x, y in pairs)
    exact = [abs(Fraction(x) - Fraction(y)) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    largest = float(max(exact, default=0))
    assert found.max_abs == pytest.approx(largest, rel=1e-6) or largest > 3.4e38


@pytest.mark.parametrize('code', ['I8', 'U8', 'I64', 'BOOL', 'C64'])
def test_exact_types(code):
    a = torch.tensor([0, 1, 0, 1]).to(TORCH_DTYPES[code])
    b = a.clone()
    assert compare(a, b, (code, code)).same_bytes
    b[2] = 1
    found = compare(a, b, (code, code))
    assert (found.n_differ, found.max_abs) == (1, 1.0) and not found.unexplained
