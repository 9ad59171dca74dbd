"""Models under torch's FSDP1 and FSDP2: what is saved is what the whole model gives, and so are converted checkpoints.

On four ranks there are two replicas (HSDP), or tensor parallelism: each rank saves its slice.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.checks.config_fields import assert_same_config
from tests.helpers.checks.converted import assert_same_files, convert
from tests.helpers.checks.read_checkpoint import open_checkpoint
from tests.helpers.models import xtuner_v1, zoo
from tests.helpers.models.model_folder import edit_json
from tests.helpers.models.zoo.llamas import larger_llama, odd_llama
from tests.helpers.ranks.scenarios import check, error_of, run_scenarios
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.engines import save_folder
from tests.helpers.runs.fsdp_runs import (
    accelerates,
    build,
    config_alone,
    plain_dcp,
    save_whole,
    shard,
    strategy_run,
    whole_state,
)
from xhf_hooks import save_hf
from xhf_hooks.errors import CheckpointError
from xhf_hooks.offline.commands.verify import main as verify

#: Slices that ranks send, slices that they write, and whole tensors; the first two in the background here or there. For
#: every other case the first ways, for those between the second ones, as in test_equivalence, which has the others.
WAYS: tuple[dict[str, dict[str, Any]], ...] = (
    {
        'send': dict(writer='stream', in_background=True),
        'write': dict(writer='positional'),
        'gather': dict(writer='gather'),
    },
    {
        'send': dict(writer='parallel'),
        'write': dict(writer='positional', in_background=True),
        'gather': dict(writer='gather'),
    },
)
#: For slices and whole tensors of other origin.
FEW_WAYS = {way: WAYS[0][way] for way in ('write', 'gather')}
WRITERS = ('stream', 'parallel', 'positional', 'gather')
MEMORY = [('fsdp1', 'gather'), ('fsdp2', 'stream')]
#: Model and how it is sharded; over three ranks the rows of no weight are shared out evenly.
ON_THREE = (
    *('tied-fsdp2', 'tied-fsdp2_root_only', 'tied-fsdp1', 'tied-fsdp1_grad_op'),
    *('untied-fsdp2_columns', 'lora-fsdp1', 'lora-fsdp2'),
)
ON_FOUR = ('tied-hsdp2', 'untied-hsdp1', 'even-tp')
CASES = [*ON_THREE, *ON_FOUR]
#: Of each source one case.
ROUNDED = ('tied-fsdp2', 'tied-fsdp1')
REPLICAS = ON_FOUR[:2]
#: Runs that write checkpoints, with the hook's export beside them. The first three are folders of DCP.
RUNS: dict[str, Any] = {
    'accelerate_fsdp1_tied': partial(accelerates, 'tied', 1, 'SHARDED_STATE_DICT'),
    'accelerate_fsdp2_untied': partial(accelerates, 'untied', 2, 'SHARDED_STATE_DICT'),
    'plain_bf16': partial(plain_dcp, 'bf16'),
    'accelerate_fsdp2_full': partial(accelerates, 'tied', 2, 'FULL_STATE_DICT'),
    'strategy_full': partial(strategy_run, 'full'),
    'strategy_local': partial(strategy_run, 'local'),
    'accelerate_fsdp2_lora': partial(accelerates, 'lora', 2, 'SHARDED_STATE_DICT'),
}


def trained_briefly(model: Any) -> Any:
    """With the simplest optimizer: of DTensors, each operation takes long."""
    doors.train_steps(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0), steps=1)
    return model


def save_case(case: str, root: Path) -> dict[str, set[str]]:
    """The names of the tensors that each way has gathered. Runs on: all ranks."""
    kind, how = case.split('-')
    model = trained_briefly(shard(build(kind), how))
    with torch.no_grad():
        model(**doors.batch())  # what it gathered for this, it keeps until the next step
    gathered = {}
    for way, options in WAYS[CASES.index(case) % len(WAYS)].items():
        plan, _ = save_folder(model, root / way, max_shard_size=20_000, **options)
        gathered[way] = {spec.name for group in plan.gathered for spec in group.reads}
    if case in ROUNDED:
        save_folder(model, root / 'bf16', dtype='bfloat16')
    if kind == 'lora':
        save_folder(model, root / 'merged', lora='merge')
    save_whole(model, build(kind), root / 'theirs')
    return gathered


def untouched(kind: str, saves: bool, root: Path) -> dict[str, Any]:
    """The weights after some steps, with a save after each or without."""
    model = shard(odd_llama(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for writer in WRITERS:
        doors.train_steps(model, optimizer, steps=1)
        if saves:
            save_hf(model, root / 'untouched', writer=writer)
    return whole_state(model)


def memory(kind: str, writer: str, root: Path) -> tuple[int, int]:
    """Bytes that were saved, and extra memory of the busiest rank."""
    model = shard(larger_llama(), kind)
    save_hf(model, root / 'memory', writer=writer, bucket_size='8MB')  # what the first save brings with it
    cost = save_hf(model, root / 'memory', writer=writer, bucket_size='8MB').cost
    return cost.nbytes, cost.peak_extra_nbytes


def flat_only(root: Path) -> str:
    model = FullyShardedDataParallel(odd_llama(), device_id=torch.device('cpu'), use_orig_params=False)
    return error_of(save_hf, model, root / 'flat')


def fsdp1_tp(root: Path) -> str:
    return error_of(save_folder, shard(build('even'), 'fsdp1_tp'), root)


def save_differing(case: str, root: Path) -> list[str]:
    """Save; then one element differs on the last rank: the errors of two more saves. Runs on: all ranks."""
    kind, way = case.split('-')
    model = shard(build(kind), way)
    save_folder(model, root / 'hf_model')
    if dist.get_rank() == dist.get_world_size() - 1:
        held = (p if way == 'hsdp1' else p.to_local() for p in model.parameters())
        next(tensor for tensor in held if tensor.numel()).data.flatten()[-1] += 1
    how = (dict(in_background=in_background) for in_background in (False, True))
    return [error_of(save_folder, model, root / 'hf_model', **options) for options in how]


# As transformers splits them


def of_transformers() -> dict[str, tuple[str, dict[str, Any]]]:
    """Models, and the arguments of ``from_pretrained`` that split them, if the installed transformers does so."""
    try:
        from transformers.distributed import DistributedConfig

        return {
            'tensor parallelism': ('Qwen2Moe', dict(tp_plan='auto')),
            'with fsdp': ('Qwen2', dict(distributed_config=DistributedConfig(tp_size=2, fsdp_size=2))),
            'replicas': ('Qwen2', dict(distributed_config=DistributedConfig(dp_replicate_size=2, fsdp_size=2))),
            'experts': ('Qwen2Moe', dict(distributed_config=DistributedConfig(ep_size=4, tp_size=2, fsdp_size=2))),
        }
    except (ImportError, TypeError):
        return {}


def save_of_transformers(name: str, root: Path) -> set[str]:
    """The names of the tensors that 'write' has gathered. Runs on: all ranks."""
    family, how = of_transformers()[name]
    sizes = dict(vocab_size=132, hidden_size=32, intermediate_size=36, num_key_value_heads=4)
    if family == 'Qwen2Moe':
        sizes |= dict(num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=24)
    if dist.get_rank() == 0:
        models = {'': (f'{family}ForCausalLM', sizes)}
        zoo.build('', models=models).save_pretrained(root / 'base')
    dist.barrier()
    model = trained_briefly(AutoModelForCausalLM.from_pretrained(root / 'base', **how))
    plans = {way: save_folder(model, root / way, **options)[0] for way, options in FEW_WAYS.items()}
    model.save_pretrained(root / 'theirs')  # all ranks gather
    return {spec.name for group in plans['write'].gathered for spec in group.reads}


def save_of_xtuner_v1(root: Path) -> set[str]:
    """The names of the tensors that 'write' has gathered. Experts are split twice, as by V1. Runs on: all ranks."""
    if dist.get_rank() == 0:
        zoo.build('qwen3_moe').to(torch.bfloat16).save_pretrained(root / 'theirs')
    dist.barrier()
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('fsdp', 'ep'))
    with xtuner_v1.imported():
        model = xtuner_v1.of_folder(root / 'theirs').float()
        for name, module in model.named_modules():
            if 'fused' in name:
                module.weight = torch.nn.Parameter(distribute_tensor(module.weight, mesh['ep'], [Shard(0)]))
        fully_shard(model, mesh=mesh['fsdp'])
        plans = {way: save_folder(model, root / way, max_shard_size=20_000, **how)[0] for way, how in FEW_WAYS.items()}
    return {spec.name for group in plans['write'].gathered for spec in group.reads}


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('fsdp')
    scenarios: dict[str, Any] = {case: partial(save_case, case, root / case) for case in ON_THREE}
    for kind in ('fsdp2', 'fsdp1'):
        scenarios |= {f'untouched-{kind}-{saves}': partial(untouched, kind, saves, root / kind) for saves in (0, 1)}
    scenarios |= {f'memory-{kind}-{writer}': partial(memory, kind, writer, root) for kind, writer in MEMORY}
    scenarios['flat_only'] = partial(flat_only, root)
    scenarios |= {name: partial(run, root / name) for name, run in RUNS.items()}
    on_four: dict[str, Any] = {case: partial(save_case, case, root / case) for case in ON_FOUR}
    on_four |= {f'{case}-differing': partial(save_differing, case, root / f'{case}-differing') for case in REPLICAS}
    on_four |= {name: partial(save_of_transformers, name, root / name) for name in of_transformers()}
    on_four['xtuner_v1'] = partial(save_of_xtuner_v1, root / 'xtuner_v1')
    on_four['fsdp1_tp'] = partial(fsdp1_tp, root / 'fsdp1_tp')
    on_three = run_scenarios(scenarios, 3, root=root)
    on_three.update(run_scenarios(on_four, 4))
    return on_three


def test_experts_of_xtuner_v1_are_written_by_the_ranks_that_hold_them(results):
    assert check(results, 'xtuner_v1')[0] == set()
    for way in FEW_WAYS:
        assert_same_folder_tensors(results.root / 'xtuner_v1' / way, results.root / 'xtuner_v1' / 'theirs')


@pytest.mark.parametrize('case', CASES)
def test_every_writer_writes_what_the_whole_model_gives(results, case):
    gathered = check(results, case)[0]
    folder, is_lora = results.root / case, case.startswith('lora')
    for way in gathered:
        assert_same_folder_tensors(folder / way, folder / 'theirs')
        assert_whole(folder / way)
    if not is_lora:
        assert_same_config(folder / 'gather', folder / 'theirs')
    if case in ROUNDED:
        rounded = folder_tensors(folder / 'bf16')
        assert all(tensor.bfloat16().equal(rounded[name]) for name, tensor in folder_tensors(folder / 'theirs').items())
    assert not is_lora or 'model.embed_tokens.weight' in folder_tensors(folder / 'merged')
    if case in ON_FOUR:
        columns = {name for name in gathered['gather'] if 'o_proj' in name or 'down_proj' in name}
        for way in ('send', 'write'):
            assert gathered[way] == (columns if case == 'even-tp' else set()), way


@pytest.mark.parametrize('name', of_transformers())
def test_what_transformers_splits_is_what_it_saves_itself(results, name):
    for gathered in check(results, name):
        assert 'model.layers.0.mlp.gate.weight' not in gathered and 'model.embed_tokens.weight' not in gathered
    for way in FEW_WAYS:
        assert_same_folder_tensors(results.root / name / way, results.root / name / 'theirs')


def test_fsdp1_with_tensor_parallelism_is_refused(results):
    for message in check(results, 'fsdp1_tp'):
        assert 'FullyShardedDataParallel over DTensors of tensor parallelism' in message
    assert not (results.root / 'fsdp1_tp').exists()


@pytest.mark.parametrize('case', REPLICAS)
def test_replicas_that_differ_are_refused(results, case):
    """The save before that stays, and nothing else is left."""
    for messages in check(results, f'{case}-differing'):
        assert len(messages) == 2
        for message in messages:
            assert message.startswith('RanksDifferError')
            assert 'found other values on ranks [3] than on rank 1 (in 1 of ' in message
    folder = results.root / f'{case}-differing'
    assert [path.name for path in folder.iterdir() if path.name != '.hf_model.lock'] == ['hf_model']
    build(case.partition('-')[0]).save_pretrained(results.root / f'{case}-untrained')
    assert_same_folder_tensors(folder / 'hf_model', results.root / f'{case}-untrained')
    assert_whole(folder / 'hf_model')


@pytest.mark.parametrize('kind', ['fsdp2', 'fsdp1'])
def test_training_is_untouched(results, kind):
    without, with_saves = (check(results, f'untouched-{kind}-{saves}')[0] for saves in (0, 1))
    assert without and all(tensor.equal(with_saves[name]) for name, tensor in without.items())


@pytest.mark.parametrize(('kind', 'writer'), MEMORY)
def test_memory_is_that_of_buckets_or_a_unit(results, kind, writer):
    nbytes, extra_nbytes = check(results, f'memory-{kind}-{writer}')[0]
    assert nbytes > 100e6 and extra_nbytes < 0.45 * nbytes, (nbytes, extra_nbytes)


def test_flat_parameters_alone_are_refused(results):
    assert all('use_orig_params=True' in message for message in check(results, 'flat_only'))


# Checkpoints


def run_of(results: Any, name: str) -> Path:
    return results.folder(name)


@pytest.mark.parametrize('name', [*RUNS][:5])
def test_conversion_gives_the_hooks_bytes(results, name, tmp_path):
    folder = run_of(results, name)
    checkpoint, hook = folder / ('run' if 'strategy' in name else 'state'), folder / 'hook'
    if 'full' not in name:
        source = open_checkpoint(checkpoint)
        assert source.manifest_fields['engine'] == 'torch' and source.manifest_fields['layout'] == 'dcp'
        assert len(source.unproven) == 1 and source.unproven[0].startswith('not checked: ')
    base = config_alone(hook, tmp_path / 'base')
    assert_same_files(convert(checkpoint, tmp_path / 'out', '--base', base, '--verify', 'full'), hook)
    assert verify(['--compare', str(checkpoint), str(hook), '--base', str(base)]) == 0
    rounded = folder_tensors(convert(checkpoint, tmp_path / 'half', '--base', base, '--dtype', 'bfloat16'))
    assert all(rounded[name].equal(tensor.bfloat16()) for name, tensor in folder_tensors(hook).items())


def test_trainers_folder_needs_no_base(results, tmp_path):
    """``checkpoint-500`` of an FSDP run: Accelerate's folders, beside Trainer's config.json."""
    folder = run_of(results, 'accelerate_fsdp2_untied')
    checkpoint = tmp_path / 'checkpoint-500'
    shutil.copytree(folder / 'state', checkpoint)
    shutil.copy(folder / 'hook' / 'config.json', checkpoint)
    assert {path.name for path in checkpoint.iterdir()} == {'pytorch_model_fsdp_0', 'optimizer_0', 'config.json'}
    found = convert(checkpoint, tmp_path / 'out')
    assert_same_folder_tensors(found, folder / 'hook')
    assert json.loads((found / 'xhf_manifest.json').read_text())['iteration'] == 500
    with pytest.raises(CheckpointError, match=r"expected one model's state dict.*give the model's folder"):
        open_checkpoint(checkpoint / 'optimizer_0')


def test_lora_under_fsdp(results, tmp_path):
    folder = run_of(results, 'accelerate_fsdp2_lora')
    base = config_alone(folder / 'hook', tmp_path / 'base')
    model = config_alone(run_of(results, 'accelerate_fsdp2_untied') / 'hook', tmp_path / 'model')
    edit_json(base / 'adapter_config.json', base_model_name_or_path=str(model))
    found = convert(folder / 'state', tmp_path / 'out', '--base', base)
    assert_same_folder_tensors(found, folder / 'hook')


def test_who_reads_local_state_dicts(results):
    folder = run_of(results, 'strategy_local') / 'run'
    with pytest.raises(CheckpointError, match=r"one part of an FSDP.*load_state.*state_dict_cfg='full'") as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value)
