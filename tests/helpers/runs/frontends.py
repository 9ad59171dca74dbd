"""Tiny models under Accelerate, Trainer, DDP and FSDP, for real ranks. Runs on: all ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tests.helpers.models.zoo.llamas import VOCAB, odd_llama


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


class Doubling(TrainerCallback):
    """Doubles all weights when training ends, as a callback that averages weights replaces them; exact in any dtype."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs['model'].parameters():
            getattr(parameter, 'ds_tensor', parameter).data.mul_(2)  # at ZeRO-3, this rank's partition


@contextmanager
def fresh_accelerate(**environment: str) -> Iterator[None]:
    """Reset the state in which Accelerate and transformers remember whether DeepSpeed is used."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def forget() -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._shared_state.clear()
        unset_hf_deepspeed_config()

    with mock.patch.dict(os.environ, environment):
        forget()
        try:
            yield
        finally:
            forget()


def train_steps(model: Any, optimizer: Any, steps: int = 2) -> None:
    """Train with plain torch."""
    for _ in range(steps):
        model(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def make_trainer(
    root: Path,
    options: dict[str, Any] | None,
    *callbacks: Any,
    model: Any = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer that trains four steps in fp32 on a CPU and saves nothing itself, unless ``arguments`` say otherwise.

    Args:
        options: Of the callback that saves; None goes without it.
    """
    from transformers import Trainer, TrainingArguments

    from xhf_hooks.integrations.transformers import HFCheckpointCallback

    torch.manual_seed(0)
    short: dict[str, Any] = dict(max_steps=4, save_strategy='no', report_to=[], per_device_train_batch_size=1)
    machine: dict[str, Any] = dict(use_cpu=True, ddp_backend='gloo', disable_tqdm=True)
    model = odd_llama() if model is None else model
    given = {**short, **machine, **arguments}
    if 'eval_strategy' in given and 'eval_strategy' not in signature(TrainingArguments).parameters:
        given['evaluation_strategy'] = given.pop('eval_strategy')
    processor = 'processing_class' if 'processing_class' in signature(Trainer).parameters else 'tokenizer'
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(root), **given),
        train_dataset=Sequences(),
        eval_dataset=Sequences(),
        optimizers=(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), None),
        callbacks=[*([] if options is None else [HFCheckpointCallback(**options)]), *callbacks],
        **{processor: tokenizer},
    )


def trainer_run(
    options: dict[str, Any] | None, arguments: dict[str, Any], zero: dict[str, Any], root: Path
) -> list[str]:
    """Train in bf16 under DeepSpeed; returns what is in output_dir at the end.

    Args:
        zero: The DeepSpeed config.
    """
    with fresh_accelerate(ACCELERATE_USE_DEEPSPEED='true'):
        trainer = make_trainer(root, options, bf16=True, deepspeed=zero, **arguments)
        trainer.train()
        trainer.model_wrapped.destroy()
    dist.barrier()
    return sorted(path.name for path in root.iterdir())
