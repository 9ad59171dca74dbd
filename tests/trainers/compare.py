"""Runs of a real trainer, on two ranks: what the callback saves is what the trainer itself saves at the end.

They run in the overlays that ``bash tools/test.sh --trainers`` makes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.ranks.launch import run_program

HERE = Path(__file__).parent


def run(program: str | Path, *arguments: str | Path) -> str:
    """Run a program (a name is of this folder) on two ranks; returns what rank 0 printed."""
    finished = run_program(HERE / program, *arguments, world_size=2)
    for done in finished:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert 'HFCheckpointCallback: saved' not in finished[1].stdout + finished[1].stderr
    return finished[0].stdout + finished[0].stderr


def assert_saved(
    out: Path, theirs: Path, base: Path, said: str, engine: tuple[str, int | None] = ('deepspeed', 3)
) -> None:
    """``out`` has the saves of iterations 2 and 4; ``theirs`` is the trainer's own, of 4."""
    newest = out / 'hf_model'
    assert [assert_whole(out / name) for name in ('hf_model_iter_2', 'hf_model')] == [2, 4]
    assert_same_folder_tensors(newest, theirs)
    manifest = json.loads((newest / 'xhf_manifest.json').read_text())
    assert (manifest['engine'], manifest.get('zero_stage')) == engine
    assert (newest / 'config.json').exists() is (theirs / 'config.json').exists()
    if (newest / 'config.json').exists():  # adapters have none
        # Trainers turn it off for training
        configs = [json.loads((folder / 'config.json').read_text()) for folder in (newest, base)]
        assert configs[0]['use_cache'] is configs[1]['use_cache'] is True
        settings = [json.loads((folder / 'generation_config.json').read_text()) for folder in (newest, base)]
        if settings[0]['eos_token_id'] == [settings[1]['eos_token_id']]:  # Trainer of transformers 5.6 to 5.16
            settings[0]['eos_token_id'] = settings[1]['eos_token_id']
        assert settings[0] == settings[1]
    for line in ('ready to save', 'positional', 'saved iter_2 to hf_model', 'saved iter_4 to hf_model'):
        assert line in said, said
