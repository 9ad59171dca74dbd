"""What is wrong with a checkpoint is said in one line that names the file and what to do; never a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checks.read_checkpoint import open_checkpoint, read_all
from tests.helpers.runs.made_checkpoint import MadeCheckpoint, model3, optim
from xhf_hooks.errors import CheckpointError

MODEL = 'mp_rank_00_model_states.pt'
HALF = torch.randn(6, 2).half()


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str, share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def from_another(name: str, **options: Any) -> Callable[[Path], None]:
    """The file of another save in its place."""

    def put(folder: Path) -> None:
        stage = 3 if (folder / model3(0)).exists() else 1
        other = MadeCheckpoint(**{'stage': stage, 'world_size': 3, **options}).write(folder.parent / 'other')
        shutil.copy(other / name, folder / name)

    return put


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        state = torch.load(folder / name, weights_only=False)
        change(state)
        torch.save(state, folder / name)

    return put


def shapes(state: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    state['param_shapes'][0][name] = torch.Size(shape)


FLAT = 'single_partition_of_fp32_groups'
#: Stage, what is done to the folder, the file that the message names, part of the message.
CASES: dict[str, tuple[int, Callable[[Path], Any], str, str]] = {
    'rank missing': (1, remove(optim(1)), optim(1), 'missing'),
    'model file of a rank missing': (3, remove(model3(1)), model3(1), 'missing'),
    'model file missing': (1, remove(MODEL), 'model_states.pt', 'is missing'),
    'all optimizer files missing': (3, lambda f: [remove(optim(r))(f) for r in range(3)], model3(0), 'copy them'),
    'truncated': (3, cut(optim(1), 0.7), optim(1), 'truncated'),
    'empty': (1, cut(optim(0), 0), optim(0), 'empty file'),
    'another world size': (1, from_another(optim(1), world_size=2), optim(1), 'number of ranks 2'),
    'a rank too many': (1, lambda f: shutil.copy(f / optim(2), f / optim(3)), optim(3), 'left over from another run'),
    'another step': (1, from_another(optim(1), step=6), optim(1), 'optimizer step 6'),
    'another model file at 3': (3, from_another(model3(2), step=6), model3(2), 'global_steps 6'),
    'another stage': (1, from_another(optim(1), stage=2), optim(1), 'ZeRO stage 2'),
    'leftovers of stage 3': (1, from_another(model3(0), stage=3), MODEL, 'files of several runs'),
    'other shape': (1, edit(MODEL, lambda s: shapes(s, 'b.weight', (12,))), optim(0), 'in equal parts'),
    'other shape at 3': (3, edit(model3(0), lambda s: shapes(s, 'b.weight', (99,))), model3(1), 'shapes of parameters'),
    'same size, other shape': (1, edit(MODEL, lambda s: shapes(s, 'a.weight', (3, 5))), MODEL, 'another one in'),
    'short frozen slice': (
        3, edit(model3(1), lambda s: s['frozen_param_fragments'].update(frozen=HALF[0])), model3(1), 'elements'),
    'lost frozen slice': (
        3, edit(model3(1), lambda s: s['frozen_param_fragments'].clear()), model3(1), 'lacks the frozen'),
    'no fp32 weights': (
        1, edit(optim(0), lambda s: s['optimizer_state_dict'].pop(FLAT)), optim(0), 'not an optimizer file'),
    'unknown stage': (1, edit(optim(0), lambda s: s['optimizer_state_dict'].update(zero_stage=7)), optim(0), 'unknown'),
    'another model file': (1, edit(MODEL, lambda s: s.pop('buffer_names')), MODEL, 'not a model file'),
    'tensor parallel': (1, edit(MODEL, lambda s: s.update(mp_world_size=2)), MODEL, 'tensor or expert parallelism'),
    'experts of AutoEP': (1, edit(MODEL, lambda s: s.update(ds_autoep_layers=[{'a': 1}])), MODEL, 'expert parallelism'),
}  # fmt: skip


@pytest.mark.parametrize('case', CASES)
def test_is_refused(tmp_path, case):
    stage, spoil, file, words = CASES[case]
    folder = MadeCheckpoint(stage=stage, world_size=3, frozen={'frozen': HALF}).write(tmp_path / 'global_step5')
    read_all(open_checkpoint(folder))  # fine so far
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert words in message and file in message and '\n' not in message
    assert str(folder) in message
    assert ';' in message or 'not supported' in message  # what to do comes last
