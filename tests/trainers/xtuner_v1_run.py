"""A model of XTuner V1 on two ranks, and V1's own Trainer, whose schedule, retention and hooks save it.

Trainer's ``__init__`` and ``fit`` need a GPU, so that its steps are counted here, and weights are changed in their
place. ``xtuner_v1_run.py MODEL OUT TOKENIZER``: in each folder in OUT, ``theirs`` is what V1's own ``save_hf`` writes.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.trainers import xtuner_v1_cpu  # before V1

# isort: split
from transformers import AutoTokenizer
from xtuner.v1.config import AdamWConfig, FSDPConfig
from xtuner.v1.engine.train_engine import TrainEngine
from xtuner.v1.model.dense.qwen3 import Qwen3DenseConfig
from xtuner.v1.model.moe.moe import BalancingLossConfig
from xtuner.v1.model.moe.qwen3 import Qwen3MoEConfig
from xtuner.v1.module.attention import MHAConfig
from xtuner.v1.module.router.greedy import GreedyRouterConfig
from xtuner.v1.train.trainer import ExpInfo, HooksConfig, Trainer, XTunerMeta

from xhf_hooks.integrations.xtuner_v1 import HFCheckpoint

_SIZES = dict(
    vocab_size=131,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    num_hidden_layers=2,
    max_window_layers=2,
    hidden_size=32,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    hidden_act='silu',
    compile_cfg=False,
)


def config_of(name: str, **sizes: Any) -> Any:
    """``dense``, ``tied``, ``moe`` (under FSDP) or ``ep`` (with expert parallelism)."""
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    heads.update((key, sizes.pop(key)) for key in [*sizes] if key in heads)
    sizes = {**_SIZES, 'attention': MHAConfig(**heads, qk_norm=True), **sizes}
    if name in ('dense', 'tied'):
        return Qwen3DenseConfig(**sizes, tie_word_embeddings=name == 'tied')
    experts = dict(n_routed_experts=4, n_shared_experts=0, num_experts_per_tok=2, moe_intermediate_size=16)
    router = GreedyRouterConfig(scoring_func='softmax', norm_topk_prob=True, router_scaling_factor=1.0)
    return Qwen3MoEConfig(
        **{**experts, **sizes},
        router=router,
        balancing_loss_cfg=BalancingLossConfig(),
        model_type='qwen3_moe',
        ep_size=2 if name == 'ep' else 1,
    )


def engine_of(name: str, **sizes: Any) -> TrainEngine:
    """V1's engine, with the same weights whatever the number of ranks is."""
    ep_size = 2 if name == 'ep' else 1
    with mock.patch('torch.tensor', xtuner_v1_cpu.tensor_on_cpu):
        engine = TrainEngine(config_of(name, **sizes), AdamWConfig(), FSDPConfig(ep_size=ep_size, torch_compile=False))
    engine.model.init_weights()
    return engine


class StepsOnly(Trainer):
    """V1's Trainer without data: it counts steps, and saves."""

    def __init__(self, engine: TrainEngine, work_dir: Path, tokenizer: Any, hooks: HooksConfig, **options: Any) -> None:
        self._engine, self._work_dir, self.tokenizer = engine, work_dir, tokenizer
        exp_dir, meta_path = work_dir / '20261128', work_dir / self._META_PATH
        if dist.get_rank() == 0:
            exp_dir.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if meta_path.is_file():  # resumed, as Trainer does it: the saves of the run before count
            self._meta = XTunerMeta.model_validate_json(meta_path.read_text())
        else:
            self._meta = XTunerMeta(exps=[ExpInfo(history=[], exp_dir=str(exp_dir))])
        self._cur_step, self._cur_epoch = options.pop('resumed_at', 0), 0
        self._total_step, self._total_epoch = 5, None
        self._can_save_hf = True
        self._hf_interval, self._hf_max_keep = options.pop('hf_interval', 2), options.pop('hf_max_keep', 2)
        if hasattr(self, '_init_async_save_resources'):  # not in V1.0.1
            self._init_async_save_resources(
                async_hf_export=options.pop('async_hf_export', False), async_checkpoint=False
            )
        self.hooks_config = self._setup_hooks(hooks_config=hooks)

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._engine.model.parameters():
                local = parameter.to_local() if hasattr(parameter, 'to_local') else parameter
                local.add_(torch.randn(local.shape, generator=_generator(self._cur_step)))
        self._cur_step += 1
        self._maybe_save_hf()


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


class Recorder:
    """A user's hook ``after_save_hf``: which folders it was called with, and whether they were complete."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __call__(self, checkpoint: Path, step: int, **others: Any) -> None:
        assert (checkpoint / 'config.json').is_file()
        self.seen.append((checkpoint.name, step))


def main() -> None:
    name, out, base = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group('gloo')
    engine, tokenizer = engine_of(name), AutoTokenizer.from_pretrained(base)
    modes = (False, True) if hasattr(Trainer, '_wait_for_pending_async_hf') else (False,)  # not in V1.0.1
    for writer, in_background in itertools.product(('positional', 'stream'), modes):
        work_dir, recorder = out / f'{writer}_{in_background}', Recorder()
        for resumed_at, until in ((0, 4), (4, 5)):
            hook = HFCheckpoint(writer=writer)
            hooks = HooksConfig(after_save_hf=[hook, recorder])
            options = dict(async_hf_export=in_background, resumed_at=resumed_at)
            trainer = StepsOnly(engine, work_dir, tokenizer, hooks, **options)
            while trainer.cur_step < until:
                trainer.step()
            if in_background:
                trainer._wait_for_pending_async_hf()
            dist.barrier()
            hook.close()
        type(engine).save_hf(engine, str(work_dir / 'theirs'))  # V1's own, of the last step
        if writer == 'stream' and not in_background:
            engine.save_dcp(out.parent / 'ckpt-step-5' / 'weights')
        assert recorder.seen == [('hf-2', 2), ('hf-4', 4), ('hf-5', 5)], recorder.seen
        dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
