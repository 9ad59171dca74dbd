"""fp32 masters of other parameters, without names or in 16 bits are never saved as what they are not."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.compare import assert_same_folder_tensors, folder_tensors
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.engines import train_one_step, zero_engine
from xhf_hooks import save_hf
from xhf_hooks.offline.commands.convert import main

NARROW = {'bf16': {'enabled': True, 'bf16_master_weights_and_grads': True, 'bf16_optimizer_states': True}}


def trained(stage: int, **options: Any) -> Any:
    engine = zero_engine(odd_llama(bf16=True), stage, **options)
    train_one_step(engine)
    return engine


def told_of(model: Any, folder: Path, **options: Any) -> str:
    """Save in fp32; returns the error, or else what was warned of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger('xhf_hooks').addHandler(handler)
    try:
        save_hf(model, folder, dtype='float32', **options)
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    finally:
        logging.getLogger('xhf_hooks').removeHandler(handler)
    return ' '.join(lines)


def at_stage_0(root: Path) -> list[str]:
    engine = trained(0)
    engine.save_checkpoint(str(root / 'checkpoint'))
    told = [type(engine.optimizer).__name__, told_of(engine, root / 'engine'), told_of(engine.module, root / 'module')]
    save_hf(engine, root / 'weights')
    engine.destroy()
    return told


def in_another_order(root: Path) -> str:
    engine = trained(2, round_robin_gradients=True, reduce_bucket_size=2000)
    told = told_of(engine.module, root / 'hf_model')
    engine.destroy()
    return told


def in_16_bits(stage: int, root: Path) -> list[str]:
    engine = trained(stage, sections=NARROW)
    told = [told_of(engine, root / writer, writer=writer) for writer in ('positional', 'gather')]
    save_hf(engine, root / 'weights')
    engine.destroy()
    return told


def in_inference_mode(root: Path) -> None:
    """Train on after a save; and as far without one."""
    for name in ('with', 'without'):
        engine = trained(3)
        if name == 'with':
            with torch.inference_mode():
                save_hf(engine, root / 'during', writer='gather')
        train_one_step(engine)
        save_hf(engine, root / name)
        engine.destroy()


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp('masters')
    scenarios: dict[str, Any] = {
        'stage_0': partial(at_stage_0, root / 'stage_0'),
        'round_robin': partial(in_another_order, root / 'round_robin'),
        'inference_mode': partial(in_inference_mode, root / 'inference_mode'),
    }
    scenarios |= {f'narrow_{stage}': partial(in_16_bits, stage, root / f'narrow_{stage}') for stage in (1, 2, 3)}
    return root, run_scenarios(scenarios, 2)


def test_those_of_stage_0_are_refused_by_the_name_of_their_optimizer(results, tmp_path, capsys):
    """Where the engine is not given, what is widened is counted. The converter refuses them, too."""
    root, outcomes = results
    (name, of_engine, of_module), _ = check(outcomes, 'stage_0')
    assert (
        f"expected ZeRO stage 1, 2 or 3 for 'float32' (zero_optimization in DeepSpeed's config; at stage 0, {name}"
        in of_engine
    )
    assert not (root / 'stage_0' / 'engine').exists()
    weights = folder_tensors(root / 'stage_0' / 'weights')
    assert f'no fp32 master weights were found of {len(weights)} trained 16-bit tensors' in of_module
    for key, tensor in folder_tensors(root / 'stage_0' / 'module').items():
        assert tensor.equal(weights[key].float())
    command = [str(root / 'stage_0' / 'checkpoint'), str(tmp_path / 'out'), '--base', str(root / 'stage_0' / 'weights')]
    assert main([*command, '--dtype', 'float32']) == 2
    assert 'at stage 0, DeepSpeed saves fp32 master weights without names' in capsys.readouterr().err
    assert main(command) == 0
    assert_same_folder_tensors(tmp_path / 'out', root / 'stage_0' / 'weights')


def test_those_of_other_parameters_are_refused_without_the_engine(results):
    root, outcomes = results
    for told in check(outcomes, 'round_robin'):
        assert 'expected an fp32 master that rounds to the 16-bit weights' in told and 'round_robin_gradients' in told
    assert not (root / 'round_robin' / 'hf_model').exists()


@pytest.mark.parametrize('stage', [1, 2, 3])
def test_those_in_16_bits_are_the_weights(results, stage):
    """Widened, which is told, as far as the installed DeepSpeed knows the option."""
    root, outcomes = results
    told, _ = check(outcomes, f'narrow_{stage}')
    weights = folder_tensors(root / f'narrow_{stage}' / 'weights')
    for writer in ('positional', 'gather'):
        saved = folder_tensors(root / f'narrow_{stage}' / writer)
        assert saved.keys() == weights.keys()
        assert all(tensor.bfloat16().equal(weights[key]) for key, tensor in saved.items())
        is_widened = all(tensor.equal(weights[key].float()) for key, tensor in saved.items())
        assert (f'{len(weights)} trained 16-bit tensors' in told[0]) == is_widened, told
    assert told[1] == '', 'said at the first call'


def test_a_save_in_inference_mode_does_not_end_training(results):
    root, outcomes = results
    check(outcomes, 'inference_mode')
    assert_same_folder_tensors(root / 'inference_mode' / 'with', root / 'inference_mode' / 'without')
