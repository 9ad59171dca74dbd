"""Meshes of four ranks, FSDP in two replicas (HSDP) or with tensor parallelism: each rank saves its slice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.models.zoo.llamas import llama, odd_llama
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.engines import save_folder
from tests.helpers.runs.fsdp_runs import save_whole, shard

N_RANKS = 4
#: Every writer, every other one in the background; test_equivalence has the others.
WAYS: dict[str, dict[str, Any]] = {
    'stream, in the background': dict(writer='stream', in_background=True),
    'parallel': dict(writer='parallel'),
    'positional': dict(writer='positional'),
    'positional, in the background': dict(writer='positional', in_background=True),
    'gather': dict(writer='gather'),
}
WAYS_OF_EACH_KIND = ('stream, in the background', 'positional', 'gather')
KINDS = ('hsdp2', 'hsdp1', 'tp')


def build(kind: str) -> Any:
    return llama(num_key_value_heads=2) if kind == 'tp' else odd_llama(tied=kind == 'hsdp2')


def save_all_ways(kind: str, root: Path) -> dict[str, list[str]]:
    """Runs on: all ranks.

    Returns:
        The names of the tensors that each way has gathered.
    """
    import torch

    model = shard(build(kind), kind)
    doors.train_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with torch.no_grad():
        model(**doors.batch())  # what it gathered for this, it keeps until the next step
    gathered = {}
    for way, options in WAYS.items():
        plan, _ = save_folder(model, root / way, max_shard_size=20_000, **options)
        gathered[way] = [spec.name for group in plan.gathered for spec in group.reads]
    save_whole(model, build(kind), root / 'theirs')
    return gathered


def of_transformers() -> dict[str, tuple[str, dict[str, Any]]]:
    """Models, and the arguments of ``from_pretrained`` that split them, if the installed transformers does so."""
    try:
        from transformers.distributed import DistributedConfig

        return {
            'tensor parallelism': ('Qwen2', dict(tp_plan='auto')),
            'tensor parallelism of experts': ('Qwen2Moe', dict(tp_plan='auto')),
            'with fsdp': ('Qwen2', dict(distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))),
            'replicas': ('Qwen2', dict(distributed_config=DistributedConfig(dp_replicate_size=2, fsdp_size=2))),
            'experts': ('Qwen2Moe', dict(distributed_config=DistributedConfig(ep_size=4, tp_size=2, fsdp_size=2))),
        }
    except (ImportError, TypeError):
        return {}


def save_all_ways_of_transformers(name: str, root: Path) -> set[str]:
    """Runs on: all ranks.

    Returns:
        The names of the tensors that 'positional' has gathered.
    """
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from tests.helpers.models.zoo import DECODER, build

    family, how = of_transformers()[name]
    sizes = dict(vocab_size=132, hidden_size=32, intermediate_size=36, num_key_value_heads=4)
    if family == 'Qwen2Moe':
        sizes |= dict(num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24)
    if dist.get_rank() == 0:
        models = {'': (f'{family}ForCausalLM', f'{family}Config', DECODER | sizes)}
        build('', models=models).save_pretrained(root / 'base')
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(root / 'base', **how)
    doors.train_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    plans = {way: save_folder(model, root / way, **WAYS[way])[0] for way in WAYS_OF_EACH_KIND}
    model.save_pretrained(root / 'theirs')  # all ranks gather
    return {spec.name for group in plans['positional'].gathered for spec in group.reads}


def refusal_of_fsdp1_with_tensor_parallelism(root: Path) -> str:
    """Runs on: all ranks."""
    from xhf_hooks import save_hf
    from xhf_hooks.errors import XhfError

    try:
        save_hf(shard(build('tp'), 'fsdp1_tp'), root)
    except XhfError as error:
        return str(error)
    return 'saved'


def save_differing(kind: str, root: Path) -> list[str]:
    """Save; then one element differs on the last rank from that of the other replica. Runs on: all ranks.

    Returns:
        The errors of two more saves, the second one in the background.
    """
    import torch.distributed as dist

    from xhf_hooks.errors import RanksDifferError

    model, said = shard(build(kind), kind), []
    save_folder(model, root / 'hf_model')
    if dist.get_rank() == N_RANKS - 1:
        held = (p if kind == 'hsdp1' else p.to_local() for p in model.parameters())
        next(tensor for tensor in held if tensor.numel()).data.flatten()[-1] += 1
    for in_background in (False, True):
        try:
            save_folder(model, root / 'hf_model', in_background=in_background)
        except RanksDifferError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('meshes')
    scenarios: dict[str, Any] = {kind: partial(save_all_ways, kind, root / kind) for kind in KINDS}
    scenarios |= {
        f'{kind}, differing': partial(save_differing, kind, root / f'{kind}, differing') for kind in KINDS[:2]
    }
    for name in of_transformers():
        scenarios[name] = partial(save_all_ways_of_transformers, name, root / name)
    scenarios['fsdp1_tp'] = partial(refusal_of_fsdp1_with_tensor_parallelism, root / 'fsdp1_tp')
    return root, run_scenarios(scenarios, N_RANKS)


@pytest.mark.parametrize('kind', KINDS)
def test_every_writer_writes_what_the_whole_model_gives(results, kind):
    root, outcomes = results
    gathered = check(outcomes, kind)[0]
    for way in WAYS:
        assert_same_folder_tensors(root / kind / way, root / kind / 'theirs')
        assert_whole(root / kind / way)
    columns = {name for names in gathered.values() for name in names if 'o_proj' in name or 'down_proj' in name}
    for way, names in gathered.items():
        assert 'gather' in way or set(names) == (columns if kind == 'tp' else set()), way


@pytest.mark.parametrize('name', of_transformers())
def test_what_transformers_splits_is_what_it_saves_itself(results, name):
    root, outcomes = results
    for gathered in check(outcomes, name):
        assert 'model.layers.0.mlp.gate.weight' not in gathered and 'model.embed_tokens.weight' not in gathered
    for way in WAYS_OF_EACH_KIND:
        assert_same_folder_tensors(root / name / way, root / name / 'theirs')


def test_fsdp1_with_tensor_parallelism_is_refused(results):
    root, outcomes = results
    for message in check(outcomes, 'fsdp1_tp'):
        assert 'FullyShardedDataParallel over DTensors of tensor parallelism' in message
    assert not (root / 'fsdp1_tp').exists()


@pytest.mark.parametrize('kind', KINDS[:2])
def test_replicas_that_differ_are_refused(results, kind):
    """The save before that stays, and nothing else is left."""
    root, outcomes = results
    for messages in check(outcomes, f'{kind}, differing'):
        assert len(messages) == 2
        for message in messages:
            assert 'found other values on ranks [3] than on rank 1 (in 1 of ' in message
    left = [path.name for path in (root / f'{kind}, differing').iterdir() if path.name != '.hf_model.lock']
    assert left == ['hf_model']
    build(kind).save_pretrained(root / f'{kind}, untrained')
    assert_same_folder_tensors(root / f'{kind}, differing' / 'hf_model', root / f'{kind}, untrained')
    assert_whole(root / f'{kind}, differing' / 'hf_model')
