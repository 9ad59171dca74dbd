"""Sources of other engines, as docs/extending.md describes them: what they save is what ``save_pretrained`` writes.

The engine gives each rank a block of the rows of each parameter. With three ranks the blocks are of unequal size, or
empty.
"""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.models.adapted import merged_by_peft
from tests.helpers.models.zoo.llamas import NormedLlama, odd_llama
from tests.helpers.ranks.scenarios import Results, check, error_of, run_scenarios
from tests.helpers.runs.engine_of_rows import partition, source_of_the_page
from tests.helpers.runs.engines import save_folder
from xhf_hooks import save_hf
from xhf_hooks.extending import SOURCES, LocalElements
from xhf_hooks.format import strict_json

WAYS: dict[str, dict[str, Any]] = {
    writer: dict(writer=writer) for writer in ('gather', 'positional', 'stream', 'parallel')
}
WAYS['stream, in the background'] = dict(writer='stream', in_background=True)


def wrapped() -> nn.Module:
    """A model with tied embeddings and persistent buffers, activation checkpointing in one layer and a compiled one."""
    model = odd_llama(tied=True, bf16=True, batch_norm=True)
    if dist.get_rank() == 0:
        for buffer in model.buffers():  # those of rank 0 are saved
            buffer.add_(1)
    first, second = model.model.layers
    model.model.layers[0], model.model.layers[1] = checkpoint_wrapper(first), torch.compile(second)
    return model


def save_wrapped(root: Path) -> None:
    if dist.get_rank() == 0:
        model = odd_llama(tied=True, bf16=True, batch_norm=True)
        for buffer in model.buffers():
            buffer.add_(1)
        model.save_pretrained(root / 'expected')
    model = partition(wrapped())
    with mock.patch.dict(SOURCES.module_dict):
        source_of_the_page()
        for way, how in WAYS.items():
            plan, _ = save_folder(model, root / way, **how)
            assert bool(plan.buckets) == (way == 'gather'), 'ranks write their slices'


def save_merged(root: Path) -> None:
    model = odd_llama(lora=True)
    if dist.get_rank() == 0:
        merged_by_peft(model, root / 'expected')
    model = partition(model)
    with mock.patch.dict(SOURCES.module_dict):
        source_of_the_page()
        save_folder(model, root / 'stream', writer='stream', lora='merge')


def save_masters(root: Path) -> None:
    """The engine keeps this rank's rows in fp32, too."""
    model = odd_llama()
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    partition(model)
    for parameter in model.parameters():
        parameter.master = parameter.detach().clone()
        parameter.data = parameter.data.bfloat16()
    with mock.patch.dict(SOURCES.module_dict):

        class MasteredSource(source_of_the_page()):
            def has_master(self, tensor):
                return hasattr(tensor, 'master')

            def local_elements(self, spec):
                found, tensor = super().local_elements, self.tensors[spec.name]
                if not spec.from_master:
                    return found(spec)
                return LocalElements(self.local_range(tensor).start, tensor.master.reshape(-1))

            def weights_and_master(self, spec):
                tensor = self.tensors[spec.name]
                return tensor.detach().reshape(-1), tensor.master.reshape(-1)

        SOURCES.register_module()(MasteredSource)
        for way in ('gather', 'positional', 'stream'):
            save_folder(model, root / way, writer=way, dtype='float32')
        model.get_parameter('model.norm.weight').master += 1
        error = error_of(save_folder, model, root / 'stale', writer='stream', dtype='float32')
        if model.get_parameter('model.norm.weight').numel():
            assert 'model.norm.weight: expected an fp32 master that rounds' in error


def save_columns(root: Path) -> None:
    """A rank's elements are not consecutive, so that its source gathers."""
    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    model = partition(model, dim=1)
    with mock.patch.dict(SOURCES.module_dict):

        class ColumnsSource(source_of_the_page()):
            def spread_of(self, tensor):
                return None if tensor.dim() > 1 else super().spread_of(tensor)

            def gather(self, spec):
                if len(spec.shape) == 1:
                    return super().gather(spec)
                blocks: list[Any] = [None] * self.world_size
                dist.all_gather_object(blocks, self.tensors[spec.name].detach())
                return torch.cat(blocks, 1)

        SOURCES.register_module()(ColumnsSource)
        for way, how in WAYS.items():
            save_folder(model, root / way, **how)


class Engine:
    """The wrapper of an engine."""

    def __init__(self, model: nn.Module) -> None:
        self.net = model


def save_in_wrapper(root: Path) -> None:
    model = odd_llama(bf16=True)
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'expected')
    with mock.patch.dict(SOURCES.module_dict):

        class WrappedSource(source_of_the_page()):
            @classmethod
            def open_wrapper(cls, wrapper):
                return (wrapper.net, {'engine': 'rows', 'blocks': 2}) if isinstance(wrapper, Engine) else None

        SOURCES.register_module()(WrappedSource)
        save_hf(Engine(partition(model)), root / 'found', writer='positional')


def save_with_errors(root: Path) -> list[str]:
    """What a source may get wrong on one rank alone: all get the error, in slices and in a gather."""
    model, found = partition(odd_llama(bf16=True)), []
    with mock.patch.dict(SOURCES.module_dict):

        class Wrong(source_of_the_page()):
            def local_elements(self, spec):
                found = super().local_elements(spec)
                if self.rank == 1 and spec.name == 'model.embed_tokens.weight':
                    return self.wrong(found.elements, spec)
                return found

        SOURCES.register_module()(Wrong)
        for wrong in (
            lambda elements, spec: elements,
            lambda elements, spec: LocalElements(0, elements.reshape(-1, spec.shape[1])),
            lambda elements, spec: LocalElements(0, elements.float()),
            lambda elements, spec: LocalElements(0, elements[:1]),
        ):
            Wrong.wrong = staticmethod(wrong)
            found += [error_of(save_folder, model, root / 'out', writer=writer) for writer in ('stream', 'gather')]
    return found


#: By the number of ranks. Two have blocks of equal size of many parameters.
SCENARIOS = {
    2: {'merged': save_merged, 'in_wrapper': save_in_wrapper},
    3: {'wrapped': save_wrapped, 'masters': save_masters, 'columns': save_columns, 'errors': save_with_errors},
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root, results = tmp_path_factory.mktemp('extending'), Results()
    results.root = root
    for n_ranks, scenarios in SCENARIOS.items():
        results.update(run_scenarios({name: partial(save, root / name) for name, save in scenarios.items()}, n_ranks))
    return results


@pytest.mark.parametrize('way', WAYS)
def test_rows_of_a_wrapped_model(saved, way):
    check(saved, 'wrapped')
    folder = saved.root / 'wrapped'
    assert_same_folder_tensors(folder / way, folder / 'expected')
    assert_loads_clean(folder / way, NormedLlama)


@pytest.mark.parametrize(
    ('scenario', 'ways'), [('merged', ['stream']), ('columns', [*WAYS]), ('in_wrapper', ['found'])]
)
def test_other_outputs(saved, scenario, ways):
    check(saved, scenario)
    for way in ways:
        assert_same_folder_tensors(saved.root / scenario / way, saved.root / scenario / 'expected')


def test_masters(saved):
    check(saved, 'masters')
    for way in ('gather', 'positional', 'stream'):
        assert_same_folder_tensors(saved.root / 'masters' / way, saved.root / 'masters' / 'expected')


def test_the_manifest_names_the_engine(saved):
    check(saved, 'in_wrapper')
    manifest = strict_json.read(saved.root / 'in_wrapper' / 'found' / 'xhf_manifest.json')
    assert (manifest['engine'], manifest['blocks']) == ('rows', 2)


def test_each_rank_gets_what_is_wrong_on_one(saved):
    first, *others = check(saved, 'errors')
    expected = [
        'Wrong.local_elements(): expected LocalElements with a tensor, found Tensor',
        'expected elements in one dimension (reshape(-1)) and in torch.bfloat16, found the shape',
        'in one dimension (reshape(-1)) and in torch.bfloat16, found the shape',
        'model.embed_tokens.weight: ',
    ]
    for messages, words in zip(zip(first[::2], first[1::2], strict=True), expected, strict=True):
        assert all(words in message and 'rank 1' in message for message in messages), messages
    assert all(other == first for other in others)
