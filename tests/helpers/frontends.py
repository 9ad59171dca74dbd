"""Tiny models under Accelerate, Trainer, DDP and FSDP, for real ranks. Runs on: all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.helpers.zoo.llamas import VOCAB


def batch() -> dict[str, torch.Tensor]:
    """One sequence, which is also its labels."""
    tokens = torch.arange(8).reshape(1, -1)
    return {'input_ids': tokens, 'labels': tokens}


class Sequences(torch.utils.data.Dataset):
    """Sixteen sequences of random tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCAB, (8,), generator=torch.Generator().manual_seed(index))
        return {'input_ids': tokens, 'labels': tokens}


@contextmanager
def fresh_accelerate(**environment: str) -> Iterator[None]:
    """Reset the state in which Accelerate and transformers remember whether DeepSpeed is used."""
    import os

    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def forget() -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
        unset_hf_deepspeed_config()

    before = dict(os.environ)
    os.environ.update(environment)
    forget()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget()


def train_steps(model: Any, optimizer: Any, steps: int = 2) -> None:
    """Train with plain torch."""
    for _ in range(steps):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def verify_folder(folder: Path) -> int:
    """Compare every file with the manifest, by size and CRC-32; returns the number of files."""
    import json
    import zlib

    files = json.loads((folder / 'xhf_manifest.json').read_text())['files']
    assert sorted(files) == sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob('*')
        if path.is_file() and path.name != 'xhf_manifest.json'
    )
    for name, said in files.items():
        data = (folder / name).read_bytes()
        assert (len(data), f'{zlib.crc32(data):08x}') == (said['nbytes'], said['crc32']), name
    return len(files)
