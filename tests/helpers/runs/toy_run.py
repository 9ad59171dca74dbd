"""A tiny but real MMEngine training run, under FlexibleRunner + DeepSpeedStrategy or under Runner."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.registry import DATASETS, METRICS, MODELS
from torch.utils.data import Dataset

from tests.helpers.models.zoo.llamas import VOCAB, odd_llama
from tests.helpers.runs.zero_config import zero_config

LENGTH = 12
_DEEPSPEED_OPTIMIZERS = ('DeepSpeedCPUAdam', 'FusedAdam', 'FusedLamb', 'OnebitAdam', 'OnebitLamb', 'ZeroOneAdam')


@MODELS.register_module()
class ToyLM(BaseModel):
    """A Llama of a few thousand parameters as ``llm``, like XTuner's models.

    Args:
        freeze (str): Freeze parameters whose name contains this; '' freezes none. If that leaves nothing to
            train, a parameter is added beside ``llm``.
        base (str): Folder that the model claims to be loaded from.
        lora (bool): Train an adapter instead.
        pretrained_pth (str): Not loaded.
    """

    def __init__(
        self, tied: bool = False, freeze: str = '', base: str = '', lora: bool = False, pretrained_pth: str = ''
    ) -> None:
        super().__init__()
        self.llm = odd_llama(tied=tied, lora=lora, base=base)
        self.llm.config.use_cache = False  # as training code does
        for name, parameter in self.llm.named_parameters():
            if freeze and freeze in name:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.llm.parameters()):
            self.beside = torch.nn.Parameter(torch.zeros(3))

    def init_weights(self) -> None:
        """Does nothing: transformers initialises the weights."""

    def forward(self, input_ids: torch.Tensor, mode: str = 'loss') -> Any:
        output = self.llm(input_ids=input_ids, labels=input_ids, use_cache=False)
        return {'loss': output.loss} if mode == 'loss' else [output.loss]


@MODELS.register_module()
def toy_lm_in_ddp(**options: Any) -> MMDistributedDataParallel:
    """A ToyLM in DDP, as Runner wraps it with a launcher (which needs a GPU)."""
    return MMDistributedDataParallel(ToyLM(**options))


@DATASETS.register_module()
class ToyTokens(Dataset):
    """Random token ids, the same in every process."""

    def __init__(self, length: int = 64) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {'input_ids': torch.randint(VOCAB, (LENGTH,), generator=generator)}


@METRICS.register_module()
class ScriptedMetric(BaseMetric):
    """Reports the next of the given scores at each validation, whatever the model outputs.

    Args:
        scores: Values of ``acc``, or of several metrics by name.
    """

    def __init__(self, scores: list[float | dict[str, float]]) -> None:
        super().__init__()
        self._scores = list(scores)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0.0)

    def compute_metrics(self, results: list) -> dict[str, float]:
        score = self._scores.pop(0)
        return dict(score) if isinstance(score, dict) else {'acc': score}


def run_config(
    work_dir: Path,
    *,
    hook: dict[str, Any] | None,
    stage: int | None,
    ddp: bool = False,
    max_iters: int = 4,
    epochs: int | None = None,
    checkpoint: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    zero: dict[str, Any] | None = None,
    bf16: bool = True,
    accumulate: int = 1,
    scores: list[float | dict[str, float]] | None = None,
    hooks: list[dict[str, Any]] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """The config of a run.

    Args:
        hook: Options of HFCheckpointHook; None runs without it.
        epochs: Train by epochs of 4 iterations instead of ``max_iters`` iterations.
        stage: DeepSpeed ZeRO stage under FlexibleRunner; None: a plain Runner without DeepSpeed.
        ddp: Use DDP in a plain Runner; otherwise each rank trains its own model.
        scores: Validation results, one every two iterations.
        hooks: More hooks.
        extra: More fields of the config, such as ``resume``.
    """
    config: dict[str, Any] = dict(
        model={'type': 'toy_lm_in_ddp' if ddp else 'ToyLM', **(model or {})},
        work_dir=str(work_dir),
        experiment_name=f'run_{work_dir.parent.name}_{work_dir.name}_{len(list(work_dir.glob("*")))}',
        train_dataloader=_dataloader(length=64 if epochs is None else 16),
        train_cfg=_loop(max_iters, epochs),
        default_hooks=dict(checkpoint=checkpoint or dict(type='CheckpointHook', by_epoch=False, interval=2)),
        custom_hooks=[*([] if hook is None else [{'type': 'HFCheckpointHook', **hook}]), *(hooks or [])],
        custom_imports=dict(imports=['xhf_hooks']),
        randomness=dict(seed=0),
        log_level='INFO',
        env_cfg=dict(cudnn_benchmark=False),
        launcher='none',
        **extra,
    )
    if scores is not None:
        config.update(
            val_dataloader=_dataloader(length=16),
            val_cfg=dict(type='ValLoop'),
            val_evaluator=dict(type='ScriptedMetric', scores=scores),
        )
    optimizer = dict(type='AdamW', lr=1e-2)
    if stage is None:
        config['optim_wrapper'] = dict(type='OptimWrapper', optimizer=optimizer)
        return config
    sections = dict(gradient_accumulation_steps=accumulate, train_micro_batch_size_per_gpu=2)
    deepspeed = zero_config(stage, bf16=bf16, sections=sections, **(zero or {}))
    config.update(
        runner_type='FlexibleRunner',
        optim_wrapper=dict(type='DeepSpeedOptimWrapper', optimizer=optimizer),
        strategy=dict(type='DeepSpeedStrategy', config=deepspeed),
    )
    return config


def train(config: dict[str, Any]) -> Any:
    """Train to the end; returns the runner. Runs on: all ranks."""
    from mmengine.config import Config
    from mmengine.registry import RUNNERS
    from mmengine.runner import Runner
    from mmengine.utils import import_modules_from_strings

    cfg = Config(config)
    import_modules_from_strings(**cfg.custom_imports)  # as Config.fromfile does
    while Path(cfg.work_dir, time.strftime('%Y%m%d_%H%M%S')).exists():
        time.sleep(0.05)  # the previous run began in this second: MMEngine would use the same folder
    # Runners and checkpoints dump the config, formatted: a quarter of the time of such a run
    with mock.patch('mmengine.config.config.FormatCode', lambda text, **_: (text, True), create=True):
        if 'runner_type' not in cfg:
            runner = Runner.from_cfg(cfg)
        else:
            _allow_another_deepspeed_strategy()
            runner = RUNNERS.build(cfg)
        runner.train()
    return runner


def _allow_another_deepspeed_strategy() -> None:
    """MMEngine registers DeepSpeed's optimizers for each strategy, which raises the second time; allow it."""
    from mmengine.registry import OPTIMIZERS

    for name in [name for name in OPTIMIZERS.module_dict if name in _DEEPSPEED_OPTIMIZERS]:
        del OPTIMIZERS.module_dict[name]


def _loop(max_iters: int, epochs: int | None) -> dict[str, Any]:
    if epochs is None:
        return dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=2)
    return dict(type='EpochBasedTrainLoop', max_epochs=epochs)


def _dataloader(**dataset: Any) -> dict[str, Any]:
    return dict(
        batch_size=2,
        num_workers=0,
        dataset=dict(type='ToyTokens', **dataset),
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate'),
    )
