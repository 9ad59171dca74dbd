"""Models of very many small tensors: calls of a save for each of them are counted, since seconds vary."""

import gc
import json
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.runs.engines import Saver
from tests.helpers.runs.tallies import plan_of
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks.errors import AgreedError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.files.writer import Writer
from xhf_hooks.format.json_text import json_text
from xhf_hooks.model import module_tensors, modules_in, parameters_of
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Chunk
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs import preparation
from xhf_hooks.sources import host_memory
from xhf_hooks.sources.host_memory import MemoryMeter

#: Calls of Python functions for each tensor, in the thread that trains. They were 439 in 2026-11.
MOST_CALLS = 120


def calls_of_a_save(n_layers: int, root: Any) -> tuple[int, int]:
    """Calls of Python functions in the second save of a model, and its number of tensors."""
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=n_layers, num_attention_heads=2, vocab_size=32
    )
    saver = Saver(LlamaForCausalLM(config).bfloat16(), Collective.connect(), writer='positional')
    folder = CheckpointFolder(root / f'{n_layers}', 1)
    saver.save(folder, iteration(1))
    n_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal n_calls
        n_calls += event == 'call'

    sys.setprofile(count)
    try:
        saver.save(folder, iteration(2))
    finally:
        sys.setprofile(None)
    saver.close(), folder.unlock()
    return n_calls, len(saver.plan.placements)


def test_few_calls_for_each_tensor(tmp_path):
    (few_calls, n_few), (many_calls, n_many) = calls_of_a_save(2, tmp_path), calls_of_a_save(42, tmp_path)
    assert n_many - n_few == 40 * 9
    assert (many_calls - few_calls) / (n_many - n_few) < MOST_CALLS


@pytest.mark.parametrize('is_enabled', [True, False])
@pytest.mark.parametrize('fails', [True, False])
def test_planning_pauses_the_garbage_collector(is_enabled, fails, monkeypatch):
    enabled: list[bool] = []

    def watched(*args: Any, **options: Any) -> Any:
        enabled.append(gc.isenabled())
        return exporter_for(object() if fails else args[0], *args[1:], **options)

    monkeypatch.setattr(preparation, 'exporter_for', watched)
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(AgreedError) if fails else nullcontext():
            Saver(odd_llama(), Collective.connect()).close()
        assert (enabled, gc.isenabled()) == ([False], is_enabled)
    finally:
        gc.enable()


def test_small_tensors_go_to_the_thread_that_writes_in_batches(tmp_path, monkeypatch):
    """Within the limit of what may wait; a large one goes at once, and an error of the disk is told at the end."""
    batches: list[int] = []
    hand_over = Writer._hand_over_batch

    def watched(self: Writer) -> None:
        batches.append(len(self._batch))
        hand_over(self)

    monkeypatch.setattr(Writer, '_hand_over_batch', watched)
    plan = plan_of(*[10] * 150, 2**17, 10)
    writer = Writer(pending_nbytes=2**20).start()
    writer.open(plan, tmp_path, writer.create(plan, tmp_path))
    for number, placement in enumerate(plan.placements):
        writer.write(Chunk(placement, memoryview(bytes([number]) * placement.nbytes)))
    assert len(writer.finish().written()) == 152
    (large,) = (number for number, placement in enumerate(plan.placements, 1) if placement.nbytes == 2**17)
    assert batches == [large, 64, 152 - 64 - large]
    for number, placement in enumerate(plan.placements):
        data = (tmp_path / placement.file).read_bytes()
        assert data[placement.offset : placement.offset + placement.nbytes] == bytes([number]) * placement.nbytes
    writer.open(plan, tmp_path, {})  # no file was made
    writer.write(Chunk(plan.placements[0], memoryview(bytes(10))))
    with pytest.raises(KeyError):
        writer.finish()
    writer.abort(), writer.close()


def test_memory_is_not_asked_for_at_each_tensor(monkeypatch):
    found, times = iter([100, 700, 300, 900]), iter([0.0, 0.001, 0.004, 0.006, 0.02])
    monkeypatch.setattr(host_memory, '_anonymous_nbytes', lambda: next(found))
    monkeypatch.setattr(host_memory.time, 'monotonic', lambda: next(times))
    meter = MemoryMeter()
    assert [meter.sample() for _ in range(5)] == [600, 600, 600, 200, 800]
    assert meter.peak_extra_nbytes == 800


@pytest.mark.parametrize('sort_keys', [False, True])
def test_json_is_that_of_dumps(sort_keys):
    index = {'metadata': {'total_size': 3}, 'weight_map': {'b"': 'ü', 'a': 'x'}, 'empty': {}, 'none': None}
    assert json_text(index, indent=2, depth=2, sort_keys=sort_keys) == json.dumps(index, indent=2, sort_keys=sort_keys)
    deep = {'files': {'one': {'tensors': {'b': {'shape': [2, 3], 'a': 1}}}}}
    assert json_text(deep, indent=1, depth=3, sort_keys=sort_keys) == (
        '{\n "files": {\n  "one": {\n   "tensors": '
        + json.dumps(deep['files']['one']['tensors'], sort_keys=sort_keys)
        + '\n  }\n }\n}'
    )


def test_a_model_is_walked_as_torch_does():
    """Modules and tensors that are there twice, and None where a layer was removed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    model.again, model[2].also = model[0], model[1]
    model.nothing = None
    model.register_module('no_module', None)
    model[2].tied = model[0].weight
    assert {*map(id, modules_in(model))} == {*map(id, model.modules())}
    assert len([*modules_in(model)]) == len([*model.modules()])
    assert {*map(id, parameters_of(modules_in(model)))} == {*map(id, model.parameters())}
    expected = model.state_dict()
    assert [name for name, _ in module_tensors(model)] == [*expected]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module_tensors(model))
