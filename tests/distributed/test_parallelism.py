"""DeepSpeed's other ways to use many ranks: AutoTP and Ulysses are saved as it gathers them, others are refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.models.adapted import adapt, assert_rounded_once
from tests.helpers.models.zoo import DECODER, ODD, build
from tests.helpers.models.zoo.llamas import llama
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.engines import names_read, save_folder, train_one_step, zero_engine
from tests.helpers.runs.zero_config import zero_config

pytestmark = [pytest.mark.modern_only, pytest.mark.needs()]  # four ranks, half a minute of CPU time
N_RANKS = 4
WAYS = {
    'positional': dict(writer='positional'),
    'stream': dict(writer='stream'),
    'in the background': dict(writer='parallel', in_background=True),
    'gather': dict(writer='gather'),
}


def build_model(tied: bool = False, fused: bool = False) -> Any:
    """With heads and rows that are not even over the ranks, and biases; or with one matrix for gates and values."""
    if fused:
        return build('', models={'': ('Phi3ForCausalLM', {'intermediate_size': 78})})
    config = {**ODD, 'num_key_value_heads': 5, 'tie_word_embeddings': tied}
    return build('', models={'': ('Qwen2ForCausalLM', config)})


def split(*layer_specs: dict[str, Any]) -> dict[str, Any]:
    """The section of the config that splits these layers, and no others."""
    return dict(autotp_size=2, partition_config=dict(use_default_specs=False, layer_specs=list(layer_specs)))


#: The layers of an MLP, also where they have an adapter.
MLP_LAYERS = [
    {'patterns': [r'.*\.down_proj\.weight$'], 'partition_type': 'row'},
    {'patterns': [r'.*\.(gate|up)_proj\.weight$'], 'partition_type': 'column'},
]
FUSED_LAYERS = [
    {'patterns': [r'.*\.(o_proj|down_proj)\.weight$'], 'partition_type': 'row'},
    {'patterns': [r'.*\.qkv_proj\.weight$'], 'partition_type': 'column', 'shape': [[40, 20, 20], -1]},
    {'patterns': [r'.*\.gate_up_proj\.weight$'], 'partition_type': 'column', 'shape': [2, -1]},
]
#: The model, the ZeRO stage, the section tensor_parallel. All of the same size: DeepSpeed makes its groups only once.
SPLIT: dict[str, tuple[Callable[[], Any], int, dict[str, Any]]] = {
    'zero-0': (build_model, 0, dict(autotp_size=2)),
    'zero-1': (build_model, 1, dict(autotp_size=2)),
    'zero-2, tied': (partial(build_model, tied=True), 2, dict(autotp_size=2)),
    'sub-parameters': (partial(build_model, fused=True), 1, split(*FUSED_LAYERS)),
}


def save_split(name: str, root: Path) -> tuple[Any, Any]:
    """Save before and after training. Returns where parameters lie before these saves and after."""
    build, stage, section = SPLIT[name]
    model = build()
    if dist.get_rank() == 0:
        build().bfloat16().save_pretrained(root / 'before splitting')
    engine = zero_engine(model, stage, sections={'tensor_parallel': section})
    save_folder(engine, root / 'untrained')
    if name != 'sub-parameters':  # no model of transformers computes with its parts of them
        train_one_step(engine)
    before = places(engine.module)
    for way, how in WAYS.items():
        save_folder(engine, root / way, **how)
    if stage:
        save_folder(engine.module, root / 'masters', dtype='float32')
    after = places(engine.module)
    state = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(root / 'theirs', state_dict=state)
    engine.destroy()
    return before, after


def save_adapted(root: Path) -> None:
    """Train adapters of layers beside those that are split."""
    model = adapt(build_model(), torch.bfloat16)
    engine = zero_engine(model, 1, sections={'tensor_parallel': split(*MLP_LAYERS)})
    train_one_step(engine)
    for way, how in WAYS.items():
        save_folder(engine.module, root / way, lora='both', **how)
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if dist.get_rank() == 0:
        whole = adapt(build_model(), torch.bfloat16)
        whole.load_state_dict(trained, strict=False)
        whole.save_pretrained(root / 'expected_adapter')
        whole.double().merge_and_unload().save_pretrained(root / 'exact_merge')
    engine.destroy()


def save_with_trainer(root: Path) -> None:
    """Train with Trainer and its callback, whose own checkpoint has no weights under AutoTP."""
    config = zero_config(1, sections={'tensor_parallel': {'autotp_size': 2}})
    with doors.fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        trainer = doors.make_trainer(root, {}, bf16=True, deepspeed=config)
        trainer.train()
        state = trainer.model_wrapped._consolidated_16bit_state_dict()
        if dist.get_rank() == 0:
            trainer.model.save_pretrained(root / 'theirs', state_dict=state)
        trainer.model_wrapped.destroy()
        dist.barrier()


def places(model: Any) -> dict[str, tuple[Any, ...]]:
    return {n: (p.data_ptr(), tuple(p.shape), p.dtype, p._version) for n, p in model.named_parameters()}


def save_sequence_parallel(root: Path) -> set[str]:
    """Train with Ulysses (ALST) at ZeRO-3, each rank with half of a sequence; returns what was not saved in slices."""
    model, n_parts = llama(num_key_value_heads=2), 2
    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping):
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, 'sdpa', n_parts, micro_batch_size=1)
        engine = zero_engine(model, 3, mpu=mpu)
        part = mpu.get_sequence_parallel_rank()
        tokens = torch.arange(8).reshape(1, -1).chunk(n_parts, 1)[part]
        logits = engine(input_ids=tokens, position_ids=tokens, use_cache=False).logits
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), (tokens + 1).flatten()))
        engine.step()
    gathered = set()
    for way, how in WAYS.items():
        plan, _ = save_folder(engine.module, root / way, **how)
        gathered |= names_read(plan) if way == 'positional' else set()
    state = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(root / 'theirs', state_dict=state)
    engine.destroy()
    return gathered


# What is refused


def with_autotp_at_zero_3() -> Any:
    return zero_engine(build_model(), 3, sections={'tensor_parallel': {'autotp_size': 2}})


def with_adapters_of_split_layers() -> Any:
    model = adapt(build_model(), target_modules='all-linear')
    return zero_engine(model, 0, sections={'tensor_parallel': split(*MLP_LAYERS)})


def with_auto_ep() -> Any:
    model = MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4))
    section = dict(enabled=True, autoep_size=2, preset_model='mixtral')
    registry = output_capturing._CanRecordRegistry
    own = registry.get
    # DeepSpeed 0.19.6 takes the registry of transformers 5.23 for a plain dict
    with mock.patch.object(registry, 'get', lambda self, *a: own(self, *a) if len(a) == 1 else dict.get(self, *a)):
        return zero_engine(model, 0, sections={'expert_parallel': section})


def with_experts() -> Any:
    model = llama()
    block = model.model.layers[1]
    block.mlp = MoE(model.config.hidden_size, block.mlp, num_experts=4, ep_size=2)
    return zero_engine(model, 0)


def in_a_pipeline() -> Any:
    model = deepspeed.pipe.PipelineModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, loss_fn=nn.MSELoss())
    return zero_engine(model, 0)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    'AutoEP': (with_auto_ep, 'expert parallelism of DeepSpeed'),
    'experts': (with_experts, 'expert parallelism of DeepSpeed'),
    'pipeline': (in_a_pipeline, 'pipeline parallelism of DeepSpeed'),
    'AutoTP at ZeRO-3': (with_autotp_at_zero_3, 'AutoTP with ZeRO-0 to 2'),
    'adapters': (with_adapters_of_split_layers, ': model.layers.0.mlp.gate_proj: expected an adapter'),
}


def refusal(name: str, root: Path) -> str:
    engine = REFUSED[name][0]()
    try:
        return error_of(save_folder, engine, root)
    finally:
        engine.destroy()


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('split')
    # AutoTP last: after it, DeepSpeed (0.19.6) makes no engine without it
    scenarios: dict[str, Any] = {'ulysses': partial(save_sequence_parallel, root / 'ulysses')}
    scenarios |= {name: partial(refusal, name, root / name) for name in REFUSED}
    scenarios |= {name: partial(save_split, name, root / name) for name in SPLIT}
    scenarios['adapted'] = partial(save_adapted, root / 'adapted')
    scenarios['trainer'] = partial(save_with_trainer, root / 'trainer')
    return run_scenarios(scenarios, N_RANKS, root=root)


def test_sequence_parallelism(results):
    """It splits no weights: everything is saved in slices."""
    assert check(results, 'ulysses') == [set()] * N_RANKS
    for way in WAYS:
        assert_same_folder_tensors(results.root / 'ulysses' / way, results.root / 'ulysses' / 'theirs')


@pytest.mark.parametrize('name', SPLIT)
def test_autotp(results, name):
    for before, after in check(results, name):
        assert before == after
    assert_same_folder_tensors(results.root / name / 'untrained', results.root / name / 'before splitting')
    for way in WAYS:
        assert_same_folder_tensors(results.root / name / way, results.root / name / 'theirs')
    trained = folder_tensors(results.root / name / 'theirs')
    if name == 'zero-0':
        return  # DeepSpeed shows no masters
    masters = folder_tensors(results.root / name / 'masters')
    assert masters.keys() == trained.keys()
    assert all(tensor.bfloat16().equal(trained[key]) for key, tensor in masters.items())
    assert name == 'sub-parameters' or not all(t.equal(trained[key].float()) for key, t in masters.items())


def test_autotp_beside_adapters(results):
    check(results, 'adapted')
    for way in WAYS:
        saved = results.root / 'adapted' / way
        assert_same_folder_tensors(saved / 'adapter', results.root / 'adapted' / 'expected_adapter')
        assert_rounded_once(folder_tensors(saved), folder_tensors(results.root / 'adapted' / 'exact_merge'))


def test_autotp_of_trainer(results):
    check(results, 'trainer')
    assert_same_folder_tensors(results.root / 'trainer' / 'hf_model', results.root / 'trainer' / 'theirs')


@pytest.mark.parametrize('name', REFUSED)
def test_refused(results, name):
    for said in check(results, name):
        assert REFUSED[name][1] in said and 'ZeRO-3' in said
    assert not (results.root / name).exists()
