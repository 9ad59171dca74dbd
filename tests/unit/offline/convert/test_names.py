"""Names in checkpoints: of wrappers, of adapters and quantizers, of several models; and what is in none of them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from tests.helpers.checks.compare import assert_same_folder_tensors, assert_same_tensors, folder_tensors
from tests.helpers.checks.converted import (
    assert_converted_as_by_the_hook,
    base_of,
    checkpoint_of,
    convert,
    refused,
)
from tests.helpers.models.adapted import adapt
from tests.helpers.models.model_folder import edit_json
from tests.helpers.models.zoo import available, build, has_class_for
from tests.helpers.runs.made_checkpoint import MadeCheckpoint, save_dcp
from xhf_hooks import save_hf
from xhf_hooks.offline.commands.verify import main as verify


def from_base(folder: Path, kind: str = 'AutoModelForCausalLM', **options: Any) -> Any:
    return getattr(transformers, kind).from_pretrained(folder, **options)


@pytest.fixture(scope='module')
def llama(tmp_path_factory):
    """A base; and the state of a model that was trained from it, which is also in ``trained``."""
    folder = tmp_path_factory.mktemp('llama')
    base_of('llama', folder / 'base')
    model = build('llama', seed=7)
    model.save_pretrained(folder / 'trained')
    return folder, model.state_dict()


# Several models of a kind


@pytest.mark.parametrize(('trained', 'other'), [('actor', 'ref'), ('online', 'ema'), ('student', 'teacher')])
def test_of_two_models_the_option_module_chooses(llama, tmp_path, capsys, trained, other):
    folder, state = llama
    of_base = load_file(folder / 'base' / 'model.safetensors')
    both = {f'{trained}.{n}': t for n, t in state.items()} | {f'{other}.{n}': t for n, t in of_base.items()}
    both |= {'head.weight': torch.ones(3), 'head.steps': torch.tensor(2)}
    torch.save({'state_dict': both}, tmp_path / 'x.pth')
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', folder / 'base')
    assert 'option --module' in line and repr(trained) in line and repr(other) in line
    for name, expected in ((trained, folder / 'trained'), (other, folder / 'base')):
        out = convert(tmp_path / 'x.pth', tmp_path / name, '--base', folder / 'base', '--module', name)
        assert_same_folder_tensors(out, expected)
        others = load_file(out / 'other_modules' / 'model.safetensors')  # without the other model
        assert_same_tensors(others, {name: both[name] for name in ('head.weight', 'head.steps')})
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', folder / 'base', '--module', 'critic')
    assert "found 'critic'" in line and repr(trained) in line


def test_a_model_and_its_compiled_self_are_one(llama, tmp_path):
    folder, state = llama
    both = {f'model.{n}': t for n, t in state.items()} | {f'compiled._orig_mod.{n}': t for n, t in state.items()}
    torch.save({'state_dict': both}, tmp_path / 'x.pth')
    out = convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', folder / 'base')
    assert_same_folder_tensors(out, folder / 'trained')


@pytest.mark.parametrize(
    ('renamed', 'told'),
    [
        (lambda name: name.replace('model.layers', 'blocks').replace('weight', 'w'), 'as of torchtitan, Megatron'),
        (lambda name: name.replace('_proj.weight', '_proj.qweight'), 'quantized weights (AWQ, GPTQ)'),
    ],
    ids=['of a trainer', 'of AWQ'],
)
def test_names_of_others(llama, tmp_path, capsys, renamed, told):
    folder, state = llama
    torch.save({renamed(name): tensor for name, tensor in state.items()}, tmp_path / 'x.pth')
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', folder / 'base')
    assert told in line and str(folder / 'base') in line


def test_a_config_of_the_run_that_names_no_class(llama, tmp_path):
    """As ``config.save_pretrained`` writes it before there is a model."""
    folder, state = llama
    (tmp_path / 'run').mkdir()
    torch.save(state, tmp_path / 'run' / 'pytorch_model.bin')
    config = json.loads((folder / 'base' / 'config.json').read_text())
    del config['architectures']
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(config))
    for options in ([], ['--base', folder / 'base']):
        out = convert(tmp_path / 'run', tmp_path / f'out{len(options)}', *options)
        assert_same_folder_tensors(out, folder / 'trained')
        assert json.loads((out / 'config.json').read_text())['architectures'] == ['LlamaForCausalLM']


# Wrappers

WRAPPED: dict[str, Callable[[Any], Any]] = {
    'a compiled model': lambda model: torch.compile(model),
    'compiled blocks': lambda model: _wrap_blocks(model, torch.compile),
    'checkpointed blocks': lambda model: _wrap_blocks(model, _checkpointed),
    'of Lightning': lambda model: torch.nn.ModuleDict({'model': torch.compile(model)}),
}


def _wrap_blocks(model: Any, wrap: Callable[[Any], Any]) -> Any:
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = wrap(block)
    return model


def _checkpointed(block: Any) -> Any:
    """As torch's own wrapper names it in a run that saves its state dict under FSDP."""
    holder = torch.nn.Module()
    holder._checkpoint_wrapped_module = block
    return holder


@pytest.mark.parametrize('name', WRAPPED)
@pytest.mark.parametrize('layout', ['file', 'dcp'])
def test_wrappers_are_in_no_name(llama, tmp_path, name, layout):
    folder, _ = llama
    state = WRAPPED[name](build('llama', seed=7)).state_dict()
    assert any('_orig_mod' in one or '_checkpoint_wrapped_module' in one for one in state)
    if layout == 'file':
        torch.save({'state_dict': state}, tmp_path / 'x')
    else:
        save_dcp({'model': state}, tmp_path / 'x')
    out = convert(tmp_path / 'x', tmp_path / 'out', '--base', folder / 'base')
    assert_same_folder_tensors(out, folder / 'trained')


# What is missing


def _without_a_layer(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if 'layers.1.' not in name}


def _as_dtensor(tensor: Any) -> Any:
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed import tensor as tensors

    if not hasattr(tensors, 'distribute_tensor'):  # torch before 2.5
        from torch.distributed import _tensor as tensors

    init_process_group('gloo', store=HashStore(), rank=0, world_size=1)
    try:
        mesh = tensors.DeviceMesh('cpu', [0])
        return tensors.distribute_tensor(tensor, mesh, [tensors.Shard(0)])
    finally:
        destroy_process_group()


INCOMPLETE: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    'a layer': (_without_a_layer, 'model.layers.1.self_attn.q_proj.weight'),
    'numpy': (lambda state: {n: t.numpy() if 'q_proj' in n else t for n, t in state.items()}, 'is a numpy array'),
    'sparse': (lambda state: {n: t.to_sparse() if 'q_proj' in n else t for n, t in state.items()}, 'a sparse tensor'),
    'dtensor': (lambda state: {n: _as_dtensor(t) if 'q_proj' in n else t for n, t in state.items()}, 'is a DTensor'),
    'none': (lambda state: {n: None if 'q_proj' in n else t for n, t in state.items()}, 'q_proj.weight is a None'),
    'the head, as if it were tied': (lambda state: {n: t for n, t in state.items() if 'lm_head' not in n}, 'lm_head'),
}


@pytest.mark.parametrize('name', INCOMPLETE)
def test_what_a_full_fine_tune_lacks_is_not_taken_from_the_base(llama, tmp_path, capsys, name):
    folder, state = llama
    spoil, words = INCOMPLETE[name]
    torch.save({'state_dict': spoil(state)}, tmp_path / 'x.pth')
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', folder / 'base')
    assert 'that the checkpoint lacks' in line and words in line and str(folder / 'base') in line


def test_what_deepspeed_has_recorded_as_frozen_is_taken_from_the_base(llama, tmp_path, capsys):
    """With ``exclude_frozen_parameters``: no adapter, and not all of the weights."""
    folder, state = llama
    trained = {name: tensor for name, tensor in state.items() if 'embed_tokens' not in name}
    checkpoint = MadeCheckpoint(masters=trained, dtype=torch.bfloat16, stage=2).write(tmp_path / 'x')
    out = folder_tensors(convert(checkpoint, tmp_path / 'out', '--base', folder / 'base'))
    of_base = load_file(folder / 'base' / 'model.safetensors')
    expected = {n: t if n in trained else of_base[n] for n, t in state.items()}
    trained_as = {n: t.bfloat16() if n in trained else t for n, t in expected.items()}  # its config casts nothing
    assert_same_tensors(out, trained_as)
    assert '1 tensor not in the checkpoint, read from' in capsys.readouterr().err


@pytest.mark.parametrize('lacking', ['lora_A', 'lora_B', 'modules_to_save'])
@pytest.mark.parametrize('mode', ['adapter', 'merge'])
def test_an_adapter_that_is_not_whole(llama, tmp_path, capsys, lacking, mode):
    folder, _ = llama
    checkpoint = checkpoint_of(adapt(from_base(folder / 'base'), modules_to_save=['lm_head']), tmp_path / 'run')
    state = {n: t for n, t in torch.load(checkpoint)['state_dict'].items() if lacking not in n}
    torch.save({'state_dict': state}, checkpoint)
    line = refused(capsys, checkpoint, tmp_path / 'out', '--lora', mode)
    assert f'.{lacking}.default' in line and 'take a complete checkpoint of the adapter' in line


def test_an_adapter_of_which_the_first_rank_alone_was_saved(llama, tmp_path, capsys):
    """As versions of Accelerate write pytorch_model_fsdp.bin."""
    checkpoint = checkpoint_of(adapt(from_base(llama[0] / 'base')), tmp_path / 'run')
    state = {n: t[: -(-len(t) // 2)].clone() for n, t in torch.load(checkpoint)['state_dict'].items()}
    torch.save(state, tmp_path / 'run' / 'pytorch_model_fsdp.bin')
    for mode in ('adapter', 'merge'):
        line = refused(capsys, tmp_path / 'run' / 'pytorch_model_fsdp.bin', tmp_path / 'out', '--lora', mode)
        assert "has one rank's rows of the adapter" in line and 'SHARDED_STATE_DICT' in line and '--base' not in line


@pytest.mark.parametrize('stage', [2, 3])
def test_files_that_older_versions_of_deepspeed_name_after_sequence_ranks(llama, tmp_path, stage):
    """With Ulysses: the weights are split over all ranks, and over none of a model-parallel group."""
    folder, state = llama
    checkpoint = MadeCheckpoint(masters=state, dtype=torch.bfloat16, stage=stage).write(tmp_path / 'x')
    expected = convert(checkpoint, tmp_path / 'expected', '--base', folder / 'base')
    of_second = [*checkpoint.glob('*pp_rank_1_*')]
    for file in of_second:  # saved again: torch.save keeps the name in the file
        torch.save(torch.load(file, weights_only=False), str(file).replace('mp_rank_00', 'mp_rank_01'))
        file.unlink()
    assert of_second
    assert_same_folder_tensors(convert(checkpoint, tmp_path / 'out', '--base', folder / 'base'), expected)


@pytest.mark.parametrize('outer', [(), ('model',)])
def test_one_of_two_models_in_a_folder_of_dcp(llama, tmp_path, capsys, outer):
    folder, state = llama
    content: dict[str, Any] = {'actor': state, 'critic': {n: t + 1 for n, t in state.items()}}
    for key in outer:
        content = {name: {key: tensors} for name, tensors in content.items()}
    save_dcp({**content, 'optimizer': {'state': {'a': torch.ones(2)}}}, tmp_path / 'dcp')
    line = refused(capsys, tmp_path / 'dcp', tmp_path / 'out', '--base', folder / 'base')
    assert "one of ['actor', 'critic']" in line
    out = convert(tmp_path / 'dcp', tmp_path / 'out', '--base', folder / 'base', '--module', 'actor')
    assert_same_tensors(folder_tensors(out), state)


def test_an_adapter_needs_no_weights_of_its_base(llama, tmp_path, capsys):
    shutil.copytree(llama[0] / 'base', tmp_path / 'base')
    model = adapt(from_base(tmp_path / 'base'))
    checkpoint = checkpoint_of(model, tmp_path / 'run')
    (tmp_path / 'base' / 'model.safetensors').unlink()
    assert_converted_as_by_the_hook(checkpoint, model, tmp_path, 'adapter')
    assert 'has no files of weights' in refused(capsys, checkpoint, tmp_path / 'out', '--lora', 'merge')


@pytest.mark.modern_only
@pytest.mark.parametrize('family', [one for one in ('llava', 'paligemma', 'mllama') if available(one)])
def test_a_vision_language_model_whose_names_were_those_of_its_files(family, tmp_path):
    """As before transformers 4.52. Its text model alone has names of the checkpoint, and is not what was trained."""
    base = base_of(family, tmp_path / 'base')
    trained = build(family, seed=7)
    trained.save_pretrained(tmp_path / 'trained')
    torch.save(load_file(tmp_path / 'trained' / 'model.safetensors'), tmp_path / 'x.pth')
    out = convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', base)
    assert_same_folder_tensors(out, tmp_path / 'trained')
    assert transformers.AutoConfig.from_pretrained(out).architectures == [type(trained).__name__]


@pytest.mark.modern_only
@pytest.mark.skipif(not hasattr(transformers, 'Qwen3_5ForCausalLM'), reason='this transformers has no Qwen3.5')
@pytest.mark.parametrize(
    ('beside', 'names_base'),
    [(False, True), (True, True), (True, False)],
    ids=['', 'with its config.json beside it', 'without --base'],
)
def test_the_text_model_that_an_auto_class_makes_of_a_vision_language_base(tmp_path, beside, names_base, capsys):
    rope = {'rope_type': 'default', 'rope_theta': 1e4, 'mrope_section': [1, 1, 2], 'partial_rotary_factor': 1.0}
    linear = {'linear_num_value_heads': 4, 'linear_num_key_heads': 2}
    linear |= {'linear_key_head_dim': 8, 'linear_value_head_dim': 8}
    layers = {'num_hidden_layers': 2, 'layer_types': ['linear_attention', 'full_attention']}
    size = {'vocab_size': 131, 'hidden_size': 32, 'intermediate_size': 48}
    heads = {'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8}
    vision = {'depth': 1, 'hidden_size': 32, 'num_heads': 4, 'intermediate_size': 48, 'out_hidden_size': 32}
    config = transformers.Qwen3_5Config(
        text_config={**size, **layers, **heads, **linear, 'rope_parameters': rope},
        vision_config={**vision, 'patch_size': 4, 'num_position_embeddings': 16},
    )
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / 'base')
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'base', torch_dtype=torch.float16)
    save_hf(model, tmp_path / 'hook')
    masters = {name: tensor.float() for name, tensor in model.state_dict().items()}
    MadeCheckpoint(masters=masters, stage=2).write(tmp_path / 'run' / 'global_step5')
    if beside:
        model.config.save_pretrained(tmp_path / 'run')
    base = ['--base', tmp_path / 'base'] if names_base else []
    out = convert(tmp_path / 'run' / 'global_step5', tmp_path / 'out', *base)
    assert_same_folder_tensors(out, tmp_path / 'hook')
    assert ('the names in OUT are those of a vision-language base' in capsys.readouterr().err) != names_base
    assert verify(['--compare', str(tmp_path / 'hook'), str(out)]) == 0
    written = transformers.AutoConfig.from_pretrained(out)
    assert (written.architectures, written.model_type) == (['Qwen3_5ForCausalLM'], 'qwen3_5_text')


@pytest.mark.modern_only
@pytest.mark.skipif(not hasattr(transformers, 'Qwen3VLMoeConfig'), reason='this transformers has no Qwen3-VL-MoE')
def test_tensors_of_the_same_name_that_an_older_version_had_transposed(tmp_path):
    dense = build('qwen3_vl').config
    config = transformers.Qwen3VLMoeConfig(
        text_config={**dense.text_config.to_dict(), 'model_type': 'qwen3_vl_moe_text', 'num_experts': 4},
        vision_config={**dense.vision_config.to_dict(), 'model_type': 'qwen3_vl_moe'},
    )
    base, model = tmp_path / 'base', transformers.Qwen3VLMoeForConditionalGeneration(config)
    model.save_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    save_hf(model, tmp_path / 'trained')
    older = {name: t.mT.contiguous() if 'mlp.experts.' in name else t for name, t in model.state_dict().items()}
    assert any(older[name].shape != tensor.shape for name, tensor in model.state_dict().items())
    torch.save(older, tmp_path / 'x.pth')
    assert_same_folder_tensors(convert(tmp_path / 'x.pth', tmp_path / 'out', '--base', base), tmp_path / 'trained')


def test_a_class_that_fully_shard_has_renamed(llama, tmp_path, capsys):
    """Trainer writes that name to config.json: beside a checkpoint, and into the base of the next run."""
    folder, state = llama
    shutil.copytree(folder / 'base', tmp_path / 'base')
    edit_json(tmp_path / 'base' / 'config.json', architectures=['FSDPLlamaForCausalLM'])
    (tmp_path / 'checkpoint-2').mkdir()
    torch.save(state, tmp_path / 'checkpoint-2' / 'pytorch_model_fsdp.bin')
    expected = convert(tmp_path / 'checkpoint-2', tmp_path / 'expected', '--base', folder / 'base')
    found = [convert(tmp_path / 'checkpoint-2', tmp_path / 'by_base', '--base', tmp_path / 'base')]
    shutil.copy(tmp_path / 'base' / 'config.json', tmp_path / 'checkpoint-2')
    found.append(convert(tmp_path / 'checkpoint-2', tmp_path / 'alone'))
    found.append(convert(tmp_path / 'checkpoint-2', tmp_path / 'both', '--base', folder / 'base'))
    for out in found:
        assert_same_folder_tensors(out, expected)
        assert transformers.AutoConfig.from_pretrained(out).architectures == ['LlamaForCausalLM']
    assert capsys.readouterr().err.count('names the class FSDPLlamaForCausalLM, as FSDP calls a LlamaForCausalLM') == 3


# Adapters and quantizers


@pytest.mark.parametrize('whole', [True, False])
def test_a_lora_run_without_its_config(llama, tmp_path, capsys, whole):
    folder, _ = llama
    checkpoint = checkpoint_of(adapt(from_base(folder / 'base')), tmp_path / 'run', whole=whole)
    shutil.copy(checkpoint, tmp_path / 'x.pth')
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', folder / 'base')
    assert '--base has to name a folder with' in line and 'adapter' in line


def named_adapters(base: Path, trained: str, *frozen: str) -> Any:
    def lora() -> LoraConfig:
        return LoraConfig(r=3, lora_alpha=5, target_modules=['q_proj'], task_type='CAUSAL_LM')

    model = get_peft_model(from_base(base), lora(), adapter_name=trained)
    for name in frozen:
        model.add_adapter(name, lora())
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if 'lora_' in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


@pytest.mark.parametrize(
    ('trained', 'frozen'), [('policy', ()), ('default', ('reference',)), ('policy', ('reference',))]
)
def test_an_adapter_of_any_name(llama, tmp_path, capsys, trained, frozen):
    folder, _ = llama
    model = named_adapters(folder / 'base', trained, *frozen)
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'x.pth')
    model.save_pretrained(tmp_path / 'run')
    given = tmp_path / 'run' if trained == 'default' else tmp_path / 'run' / trained
    for mode in ('adapter', 'merge'):
        save_hf(model, tmp_path / f'hook_{mode}', lora=mode)
        out = convert(tmp_path / 'x.pth', tmp_path / mode, '--base', given, '--lora', mode)
        assert_same_folder_tensors(out, tmp_path / f'hook_{mode}')
        assert ("without the frozen ['reference']" in capsys.readouterr().err) == bool(frozen)


def test_an_adapter_as_peft_saves_it_alone(llama, tmp_path):
    """By ``torch.save(get_peft_model_state_dict(model))``: without the adapter's name."""
    live = adapt(from_base(llama[0] / 'base'), target_modules=['q_proj', 'embed_tokens'])
    checkpoint_of(live, tmp_path / 'run')
    torch.save(get_peft_model_state_dict(live), tmp_path / 'run' / 'adapter.pt')
    assert_converted_as_by_the_hook(tmp_path / 'run' / 'adapter.pt', live, tmp_path, 'adapter', 'merge')


def test_which_of_two_adapters_was_trained_is_asked(llama, tmp_path, capsys):
    folder, _ = llama
    model = named_adapters(folder / 'base', 'policy', 'reference')
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'x.pth')
    model.peft_config['policy'].save_pretrained(tmp_path / 'run')
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', tmp_path / 'run')
    assert '2 adapters (policy, reference)' in line


@pytest.mark.modern_only
@pytest.mark.parametrize('bits', [4, 8])
@pytest.mark.parametrize('whole', [True, False], ids=['whole', 'as Trainer saves it'])
def test_a_qlora_run(llama, tmp_path, capsys, bits, whole):
    """DeepSpeed leaves out frozen weights, and not the state that bitsandbytes keeps of them."""
    folder, _ = llama
    quantized = transformers.BitsAndBytesConfig(**{f'load_in_{bits}bit': True})
    try:
        model = adapt(from_base(folder / 'base', quantization_config=quantized, device_map={'': 'cpu'}))
    except (ImportError, RuntimeError) as error:
        if 'GPU' not in str(error):
            raise
        pytest.skip(f'transformers or bitsandbytes quantize on a GPU alone here: {error}')
    checkpoint = checkpoint_of(model, tmp_path / 'run', whole=True)
    state = torch.load(checkpoint)['state_dict']
    assert any(name.endswith(('absmax', 'SCB')) for name in state)
    if not whole:
        names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        torch.save({'state_dict': {n: t for n, t in state.items() if n not in names}}, checkpoint)
    save_hf(model, tmp_path / 'hook', lora='adapter')
    assert_same_folder_tensors(convert(checkpoint, tmp_path / 'adapter', '--lora', 'adapter'), tmp_path / 'hook')
    capsys.readouterr()
    line = refused(capsys, checkpoint, tmp_path / 'out', '--lora', 'merge')
    assert 'quantized' in line and '--base UNQUANTIZED' in line
    out = convert(checkpoint, tmp_path / 'merged', '--lora', 'merge', '--base', folder / 'base')
    # transformers 4 makes float16 of what it does not quantize, which only a whole checkpoint tells
    dtype = state['base_model.model.model.norm.weight'].dtype if whole else torch.float32
    expected = adapt(from_base(folder / 'base', torch_dtype=dtype))
    trained = {name: tensor for name, tensor in state.items() if 'lora_' in name}
    for name, parameter in expected.named_parameters():
        parameter.data = parameter.data.float() if 'lora_' in name else parameter.data
    expected.load_state_dict(trained, strict=False)
    save_hf(expected, tmp_path / 'expected', lora='merge')
    names = folder_tensors(tmp_path / 'expected')
    found = folder_tensors(out)
    assert found.keys() == names.keys()
    assert all(torch.equal(found[n], t) for n, t in names.items() if 'proj' in n), 'what was quantized is the base'
    assert 'quantized' in capsys.readouterr().err


# What transformers ignores, and heads


@pytest.mark.parametrize(
    ('family', 'buffer'),
    [
        ('gpt2', 'transformer.h.0.attn.bias'),
        ('gpt2', 'transformer.h.1.attn.masked_bias'),
        ('gpt_neox', 'gpt_neox.layers.0.attention.bias'),
        ('bert', 'bert.embeddings.position_ids'),
    ],
)
def test_buffers_of_older_versions_are_left_out(tmp_path, family, buffer):
    base = base_of(family, tmp_path / 'base')
    torch.save({**build(family, seed=7).state_dict(), buffer: torch.ones(1, 4)}, tmp_path / 'x.bin')
    save_hf(build(family, seed=7), tmp_path / 'trained')
    assert_same_folder_tensors(convert(tmp_path / 'x.bin', tmp_path / 'out', '--base', base), tmp_path / 'trained')


HEADS = {'SequenceClassification': 5, 'TokenClassification': 5, 'QuestionAnswering': 2}


@pytest.mark.parametrize(
    ('family', 'kind', 'labels'),
    [
        (family, kind, labels)
        for family in ('llama', 'qwen3_moe')
        for kind, labels in HEADS.items()
        if has_class_for(family, kind)
    ],
)
def test_a_head_that_training_put_on_a_causal_base(tmp_path, capsys, family, kind, labels):
    base = base_of(family, tmp_path / 'base')
    model = from_base(base, f'AutoModelFor{kind}', num_labels=labels)
    checkpoint = checkpoint_of(model, tmp_path / 'run', whole=True)
    save_hf(model, tmp_path / 'hook')
    out = convert(checkpoint, tmp_path / 'out', '--base', base)
    assert_same_folder_tensors(out, tmp_path / 'hook')
    config = transformers.AutoConfig.from_pretrained(out)
    assert config.architectures == [type(model).__name__] and config.num_labels == labels
    assert re.search(f'the checkpoint is of a {type(model).__name__}', capsys.readouterr().err)


@pytest.mark.modern_only
@pytest.mark.skipif(not available('qwen3_moe'), reason='this transformers has no Qwen3-MoE')
@pytest.mark.parametrize('stage', [2, 3])
@pytest.mark.parametrize('dtype', ['keep', 'float32'])
def test_experts_that_an_older_version_kept_apart_have_their_masters(tmp_path, stage, dtype):
    """Names in memory were those of the files; each expert lies in the flat vectors of several ranks."""
    base = base_of('qwen3_moe', tmp_path / 'base')
    build('qwen3_moe', seed=7).save_pretrained(tmp_path / 'trained')
    masters = load_file(tmp_path / 'trained' / 'model.safetensors')
    checkpoint = MadeCheckpoint(masters=masters, dtype=torch.float16, stage=stage).write(tmp_path / 'x')
    out = folder_tensors(convert(checkpoint, tmp_path / 'out', '--base', base, '--dtype', dtype, '--workers', '2'))
    assert_same_tensors(out, masters if dtype == 'float32' else {name: t.half() for name, t in masters.items()})


def test_a_base_whose_head_lies_elsewhere_is_not_the_base(llama, tmp_path, capsys):
    """A LLaVA, with the base of its language model: the backbone alone would be a model without the trained head."""
    folder, _ = llama
    state = {}
    for name, tensor in build('llava').state_dict().items():
        # As transformers 5 has them in memory
        name = name.replace('language_model.model.', 'language_model.').replace('language_model.lm_head.', 'lm_head.')
        state[name if name.startswith(('model.', 'lm_head.')) else f'model.{name}'] = tensor
    assert {'lm_head.weight', 'model.language_model.norm.weight'} <= state.keys()
    torch.save(state, tmp_path / 'x.pth')
    line = refused(capsys, tmp_path / 'x.pth', tmp_path / 'out', '--base', folder / 'base')
    assert 'the checkpoint has tensors that the model of' in line and 'vision_tower' in line
