"""Model families: what is saved at ZeRO-3, gathered or in slices, is what ``save_pretrained`` writes of it.

Families that transformers 4.52 to 4.57 rename are also saved with an adapter merged, and converted. tools/test.sh runs
this file with such a transformers, too.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.checks.config_fields import assert_same_config
from tests.helpers.checks.converted import convert
from tests.helpers.models.adapted import adapted, merged_by_peft
from tests.helpers.models.own_classes import CounterConfig, HasWidth
from tests.helpers.models.zoo import FAMILIES, available, build
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import save_folder, zero_engine
from xhf_hooks.offline.commands.verify import main as verify

#: Left out, since they are Llamas here; tests/unit/exporters/test_families.py has many more.
ALIKE = ('qwen3', 'gemma2', 'gemma3_text', 'phi3', 'olmo2')
AVAILABLE = [family for family in FAMILIES if available(family) and family not in ALIKE]
WEIGHTS = 'model.safetensors'
#: Renamed by transformers 4.52 to 4.57; gemma3 is tied.
RENAMED = [family for family in ('llava', 'qwen2_vl', 'gemma3') if available(family)]
#: For every other family the first ones, for those between the second ones.
WRITERS = (('gather', 'positional'), ('gather', 'stream'))


def writers_of(family: str) -> tuple[str, ...]:
    return WRITERS[AVAILABLE.index(family) % len(WRITERS)]


def save_family(family: str, root: Path) -> None:
    model = build(family)
    for parameter in model.parameters():  # not the buffers: DeepSpeed leaves those in fp32, too
        parameter.data = parameter.data.to(torch.bfloat16)
    if dist.get_rank() == 0:
        model.save_pretrained(root / family / 'expected')
    engine = zero_engine(model, stage=3)
    for writer in writers_of(family):
        plan, _ = save_folder(engine.module, root / family / writer, writer=writer)
        assert writer == 'gather' or not plan.buckets, 'every family goes out in slices, fused experts, too'
    if family in RENAMED:
        engine.save_checkpoint(str(root / family / 'checkpoint'))
    engine.destroy()


def save_adapted(family: str, root: Path) -> None:
    model = adapted(family, torch.float32)
    if dist.get_rank() == 0:
        merged_by_peft(model, root / family / 'expected_merge')
        model.save_pretrained(root / family / 'expected_adapter')
    engine = zero_engine(model, stage=3, bf16=False)
    save_folder(engine.module, root / family / 'merge', lora='both')
    engine.destroy()


def save_own_class(root: Path) -> None:
    """At ZeRO-3 a rank has slices, and the class cannot be built to learn the shapes."""
    model = HasWidth(CounterConfig(tie_word_embeddings=True), 8).bfloat16()
    if dist.get_rank() == 0:
        model.save_pretrained(root / 'own_class' / 'expected')
    engine = zero_engine(model, stage=3)
    for writer in ('gather', 'positional'):
        save_folder(engine.module, root / 'own_class' / writer, writer=writer)
    engine.destroy()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp('zoo')
    scenarios = {family: partial(save_family, family, root) for family in AVAILABLE}
    scenarios['own_class'] = partial(save_own_class, root)
    scenarios |= {f'{family}-adapted': partial(save_adapted, family, root) for family in RENAMED}
    return run_scenarios(scenarios, 2, root=root)


@pytest.mark.parametrize('family', AVAILABLE)
def test_same_as_save_pretrained(saved, family):
    check(saved, family)
    expected, found = saved.root / family / 'expected', saved.root / family / 'gather'
    for writer in writers_of(family):
        assert (expected / WEIGHTS).read_bytes() == (saved.root / family / writer / WEIGHTS).read_bytes(), writer
    assert_loads_clean(found, type(build(family)))
    assert_same_config(found, expected)
    generation = [json.loads(p.read_text()) for f in (expected, found) for p in f.glob('generation_config.json')]
    assert not generation or generation == [generation[0]] * 2


@pytest.mark.parametrize('writer', ['gather', 'positional'])
def test_a_class_that_its_config_alone_does_not_build(saved, writer):
    check(saved, 'own_class')
    expected, found = (saved.root / 'own_class' / name / WEIGHTS for name in ('expected', writer))
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize('family', RENAMED)
def test_merged_adapter(saved, family):
    check(saved, f'{family}-adapted')
    folder = saved.root / family
    assert_same_folder_tensors(folder / 'expected_merge', folder / 'merge')
    adapter = 'adapter_model.safetensors'
    assert (folder / 'merge' / 'adapter' / adapter).read_bytes() == (folder / 'expected_adapter' / adapter).read_bytes()
    assert_loads_clean(folder / 'merge', type(build(family)))


@pytest.mark.parametrize('family', RENAMED)
def test_converted(saved, family, tmp_path):
    folder = saved.folder(family)
    found = convert(folder / 'checkpoint', tmp_path / 'out', '--base', folder / 'expected', '--verify', 'full')
    assert (found / WEIGHTS).read_bytes() == (folder / 'expected' / WEIGHTS).read_bytes()
    assert verify([str(found)]) == 0
