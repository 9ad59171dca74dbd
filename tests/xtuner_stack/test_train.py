"""The hook in real runs of `xtuner train`: one import of XTuner's own config style changed, nothing else.

Variable-length attention is not among the runs: XTuner asks for flash_attn before it reads the model, and
transformers finds flash_attn only where there is a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.compare import assert_loads_clean, assert_same_folder_tensors, folder_tensors
from tests.helpers.ranks import REPO_ROOT
from tests.xtuner_stack.base_models import FAMILIES, make_base_model, make_dataset

HERE = Path(__file__).parent
TIMEOUT_SECS = 300
OUTPUT_TAIL = 6000
PARTITIONED = 'partitioned.json'  # made from XTuner's deepspeed_zero3
TORCHRUN = [
    *(sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2'),
    *('-m', 'xtuner.tools.train'),
]
LAST = 4
RESUMED_FROM = 2


@dataclass(frozen=True)
class Launch:
    """One `xtuner train`.

    Attributes:
        deepspeed: What `--deepspeed` is given, with two processes; None is one process without DeepSpeed.
        settings: Name to value in PART 1 of the config.
    """

    family: str
    deepspeed: str | None
    settings: dict[str, Any] = field(default_factory=dict)


BESIDE_XTUNERS = {'with_xtuner_hook': True}
LAUNCHES = {
    'zero1': Launch('llama', 'deepspeed_zero1'),
    'zero2': Launch('llama', 'deepspeed_zero2', BESIDE_XTUNERS),
    'zero3': Launch('llama', 'deepspeed_zero3', BESIDE_XTUNERS),
    'zero3_offload': Launch('llama', 'deepspeed_zero3_offload'),
    'qwen2_zero3': Launch('qwen2', PARTITIONED, BESIDE_XTUNERS),
    'no_deepspeed': Launch('llama', None),
}
LORA_LAUNCHES = {
    'lora_zero2': Launch('llama', 'deepspeed_zero2', {'lora_rank': 4}),
    'lora_zero3': Launch('llama', PARTITIONED, {'lora_rank': 4}),
}
RESUMED = 'qwen2_zero3'  # once more, from its middle, by the config that it dumped
RESULTS = [*LAUNCHES, 'resumed']


class Runs:
    """Launches each run once, when its result is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._outcomes: dict[str, tuple[int | None, str]] = {}

    def work_dir(self, name: str) -> Path:
        """The folder of a finished run.

        Raises:
            AssertionError: It failed; the end of its output is in the message.
        """
        if name not in self._outcomes:
            command = self._resume() if name == 'resumed' else self._train({**LAUNCHES, **LORA_LAUNCHES}[name], name)
            self._outcomes[name] = self._run([*command, '--work-dir', str(self._root / name)], name)
        status, output = self._outcomes[name]
        assert status == 0, f'{name}: exit status {status} (None: more than {TIMEOUT_SECS} s)\n{output[-OUTPUT_TAIL:]}'
        return self._root / name

    def _train(self, launch: Launch, name: str) -> list[str]:
        base, data = str(self._root / launch.family), str(self._root / 'data.json')
        config = self._root / f'{name}.py'
        config.write_text(filled_in(pretrained_model_name_or_path=base, data_path=data, **launch.settings))
        if launch.deepspeed is None:
            return [sys.executable, '-m', 'xtuner.tools.train', str(config)]
        return [*TORCHRUN, str(config), '--launcher', 'pytorch', '--deepspeed', launch.deepspeed]

    def _resume(self) -> list[str]:
        started = self.work_dir(RESUMED)
        dumped, checkpoint = started / f'{RESUMED}.py', started / f'iter_{RESUMED_FROM}.pth'
        return [*TORCHRUN, str(dumped), '--launcher', 'pytorch', '--resume', str(checkpoint)]

    def _run(self, command: list[str], name: str) -> tuple[int | None, str]:
        """Exit status (None after a time-out) and output. Runs in the folder that holds the inputs."""
        file = self._root / f'{name}.output'
        with file.open('wb') as output:
            process = subprocess.Popen(
                command, cwd=self._root, env=environment(self._root), stdout=output, stderr=subprocess.STDOUT
            )
            try:
                status = process.wait(TIMEOUT_SECS)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                process.terminate()  # torchrun then ends its processes, too
                process.wait()
        return status, file.read_text(errors='replace')


def filled_in(**settings: Any) -> str:
    """The text of config.py with other values in PART 1."""
    text = (HERE / 'config.py').read_text()
    for name, value in settings.items():
        text, count = re.subn(rf'^{name} = .*$', f'{name} = {value!r}', text, flags=re.MULTILINE)
        assert count == 1, f'config.py sets {name} {count} times'
    return text


def partitioning_config() -> dict[str, Any]:
    """XTuner's deepspeed_zero3, but tiny parameters, too, are partitioned and not kept whole on every rank."""
    (xtuner,) = find_spec('xtuner').submodule_search_locations
    config = json.loads(Path(xtuner, 'configs', 'deepspeed', 'deepspeed_zero3.json').read_text())
    config['zero_optimization']['stage3_param_persistence_threshold'] = 0
    return config


def environment(cache: Path) -> dict[str, str]:
    python_path = [str(HERE), str(REPO_ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    return os.environ | {
        'PYTHONPATH': os.pathsep.join(python_path),
        'DS_ACCELERATOR': 'cpu',
        'CUDA_VISIBLE_DEVICES': '',
        'OMP_NUM_THREADS': '1',
        'HF_HOME': str(cache / 'hf_home'),
        'HF_HUB_OFFLINE': '1',
        'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1',  # XTuner 0.2.0 reads the seed of what it resumes as torch 2.5 did
    }


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp('xtuner')
    for family in FAMILIES:
        make_base_model(root / family, family)
    make_dataset(root / 'data.json')
    (root / PARTITIONED).write_text(json.dumps(partitioning_config()))
    return Runs(root)


def export_of(work_dir: Path) -> Path:
    """The one export of a run: work_dir/<timestamp>/hf_model."""
    (folder,) = work_dir.glob('*/hf_model')
    return folder


def log_of(work_dir: Path) -> str:
    log_dir = export_of(work_dir).parent
    return (log_dir / f'{log_dir.name}.log').read_text()


def saves_in(log: str) -> list[str]:
    return re.findall(r'HFCheckpointHook: saved (\w+) to', log)


def trained_weights(work_dir: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint, read by DeepSpeed's own converter where DeepSpeed wrote it, under Hugging Face names."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    checkpoint = work_dir / f'iter_{LAST}.pth'
    if checkpoint.is_dir():
        weights = get_fp32_state_dict_from_zero_checkpoint(str(work_dir), tag=checkpoint.name)
    else:
        weights = torch.load(checkpoint, weights_only=False)['state_dict']
    assert all(name.startswith('llm.') for name in weights)
    return {name.removeprefix('llm.'): tensor for name, tensor in weights.items()}


@pytest.mark.parametrize('name', RESULTS)
def test_saves_on_the_schedule_of_checkpoint_hook(runs, name):
    work_dir = runs.work_dir(name)
    expected = [f'iter_{LAST}'] if name == 'resumed' else ['iter_2', f'iter_{LAST}']
    assert saves_in(log_of(work_dir)) == expected
    assert sorted(path.stem for path in work_dir.glob('iter_*.pth')) == expected
    assert json.loads((export_of(work_dir) / 'xhf_manifest.json').read_text())['iteration'] == LAST


@pytest.mark.parametrize('name', RESULTS)
def test_weights_are_those_of_the_checkpoint(runs, name):
    work_dir = runs.work_dir(name)
    expected, saved = trained_weights(work_dir), folder_tensors(export_of(work_dir))
    if name in ('qwen2_zero3', 'resumed'):  # tied
        assert torch.equal(expected.pop('lm_head.weight'), expected['model.embed_tokens.weight'])
    assert saved.keys() == expected.keys()
    dtype = torch.float32 if name == 'no_deepspeed' else torch.bfloat16
    for key, tensor in saved.items():
        assert tensor.dtype == dtype, key
        assert torch.equal(tensor, expected[key].to(dtype)), key


@pytest.mark.parametrize(
    ('name', 'n_whole'), [('zero3', 19), ('zero3_offload', 19), ('qwen2_zero3', 0), ('resumed', 0)]
)
def test_zero3_partitioned_what_was_saved(runs, name, n_whole):
    """DeepSpeed's log says how many parameters it did not partition: of Llama's 21 all but the embeddings."""
    output = runs.work_dir(name).with_suffix('.output').read_text()
    assert re.findall(r'Total persistent parameters: \d+ in (\d+) params', output) == [str(n_whole)]


@pytest.mark.parametrize('name', [name for name in LAUNCHES if name != 'no_deepspeed'])
def test_training_moved_every_weight(runs, name):
    """Else equal weights would prove little."""
    work_dir = runs.work_dir(name)
    trained, base = folder_tensors(export_of(work_dir)), folder_tensors(work_dir.parent / LAUNCHES[name].family)
    assert [key for key, tensor in base.items() if torch.equal(trained[key], tensor.to(torch.bfloat16))] == []


@pytest.mark.parametrize('name', [name for name, launch in LAUNCHES.items() if launch.settings])
def test_same_bytes_as_xtuners_own_hook(runs, name):
    work_dir = runs.work_dir(name)
    assert_same_folder_tensors(export_of(work_dir), work_dir / 'hf_model')


@pytest.mark.parametrize('name', RESULTS)
def test_loads_and_generates(runs, name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = export_of(runs.work_dir(name))
    model = assert_loads_clean(folder, AutoModelForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    prompt = tokenizer('The sum of 3 and 4 is', return_tensors='pt')
    generated = model.generate(**prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.shape[1] == prompt['input_ids'].shape[1] + 5


@pytest.mark.parametrize('name', RESULTS)
def test_config_says_to_use_the_cache(runs, name):
    config = json.loads((export_of(runs.work_dir(name)) / 'config.json').read_text())
    assert config['use_cache'] is True, 'XTuner sets it to False on the live config'


def test_resumed_run_saves_what_the_whole_run_saved(runs):
    assert_same_folder_tensors(export_of(runs.work_dir('resumed')), export_of(runs.work_dir(RESUMED)))


def test_hook_survives_the_dump_of_the_config(runs):
    """MMEngine writes the config of a run to its work_dir, classes as dotted names, to be run again."""
    from mmengine.config import Config
    from mmengine.registry import HOOKS

    from xhf_hooks import HFCheckpointHook

    dumped = Config.fromfile(runs.work_dir('zero1') / 'zero1.py')
    assert [hook['type'] for hook in dumped.custom_hooks][-1] == 'xhf_hooks.HFCheckpointHook'
    assert type(HOOKS.build(dumped.custom_hooks[-1])) is HFCheckpointHook


def convert(*args: str | Path) -> None:
    """`xhf-convert`, which is given nothing that a user would not have."""
    from xhf_hooks.cli.convert import main

    assert main([str(arg) for arg in args]) == 0


def assert_same_files(folder: Path, expected: Path, but: Collection[str] = ()) -> None:
    """All but the manifest, which tells how a folder came about."""
    names = [{path.name for path in each.iterdir()} - {'xhf_manifest.json'} for each in (folder, expected)]
    assert names[0] == names[1]
    differing = [
        name for name in names[0].difference(but) if (folder / name).read_bytes() != (expected / name).read_bytes()
    ]
    assert differing == []


@pytest.mark.parametrize('name', RESULTS)
def test_a_converted_checkpoint_is_the_hooks_export(runs, name, tmp_path):
    """The config is the checkpoint's own text; the last one is found through `last_checkpoint`."""
    convert(runs.work_dir(name), tmp_path / 'converted', '--verify')
    assert_same_files(tmp_path / 'converted', export_of(runs.work_dir(name)))


def test_an_older_checkpoint_by_a_config_that_nobody_ran(runs, tmp_path):
    """The lazy config that the user wrote is read, and xtuner's names in it are not imported."""
    work_dir = runs.work_dir('zero3')
    config = work_dir.parent / 'zero3.py'
    convert(work_dir / 'iter_2.pth', tmp_path / 'converted', '--config', config)
    converted = tmp_path / 'converted'
    assert json.loads((converted / 'xhf_manifest.json').read_text())['iteration'] == 2
    for name in ('config.json', 'tokenizer_config.json', 'generation_config.json'):
        assert (converted / name).read_bytes() == (export_of(work_dir) / name).read_bytes()


@pytest.mark.parametrize('name', LORA_LAUNCHES)
def test_a_lora_checkpoint(runs, name, tmp_path):
    """The adapter as the hook saved it; merged, with the base model's weights, as peft merges it."""
    from peft import AutoPeftModelForCausalLM

    work_dir = runs.work_dir(name)
    convert(work_dir, tmp_path / 'adapter')
    adapter_configs = []
    for folder in (tmp_path / 'adapter', export_of(work_dir)):
        config = json.loads((folder / 'adapter_config.json').read_text())
        config['target_modules'].sort()  # a set, which each process lists in its own order
        adapter_configs.append(config)
    assert adapter_configs[0] == adapter_configs[1]
    assert_same_files(tmp_path / 'adapter', export_of(work_dir), but={'adapter_config.json'})
    convert(work_dir, tmp_path / 'merged', '--lora', 'merge', '--dtype', 'float32')
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / 'adapter', torch_dtype=torch.float32)
    merged = adapted.merge_and_unload().state_dict()
    found = folder_tensors(tmp_path / 'merged')
    assert found.keys() == merged.keys()
    moved = 0
    for key, tensor in found.items():
        assert torch.allclose(tensor, merged[key], atol=1e-2), key
        moved += int('proj' in key)
    assert moved == 14
