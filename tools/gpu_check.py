"""Save a model at ZeRO-3 on all GPUs with every writer, and compare every byte.

    torchrun --standalone --nproc_per_node GPUS tools/gpu_check.py [--layers 16] [--bucket-size 128MB] [--out DIR]

With nccl, each writer saves in the foreground and in the background during training. The result is compared with
save_pretrained of the gathered model. Checks the bytes, and that a save uses at most one bucket of device memory.
Prints one line per case; exit status 1 for failures, 2 without a GPU. ``--cpu`` runs the same steps with gloo, to test
this script.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from itertools import product
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from xhf_hooks.collective import Collective
from xhf_hooks.options import SaveOptions, parse_size
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.saves.save import Saver
from xhf_hooks.saves.telemetry import RunLog
from xhf_hooks.saves.unwrap import unwrap

STEPS_MEANWHILE = 2


class Training:
    """A bf16 Llama at ZeRO-3 with AdamW. Runs on: all ranks."""

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self.device = device
        zero = {'stage': 3, 'stage3_param_persistence_threshold': 0}
        config = {
            'train_micro_batch_size_per_gpu': 1,
            'bf16': {'enabled': True},
            'zero_optimization': zero,
            'zero_allow_untested_optimizer': True,
        }
        small = dict(vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_attention_heads=16)
        self.architecture = LlamaConfig(num_hidden_layers=n_layers, num_key_value_heads=16, **small)
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = LlamaForCausalLM(self.architecture)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    @property
    def shard_nbytes(self) -> int:
        """Gives at least two files per rank: with 'parallel', a file has one writer."""
        nbytes = sum(parameter.ds_numel * parameter.element_size() for parameter in self.engine.module.parameters())
        return nbytes // (2 * dist.get_world_size())

    def step(self) -> None:
        tokens = torch.randint(32000, (1, 128), device=self.device)
        loss = self.engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.engine.backward(loss)
        self.engine.step()

    def save_pretrained(self, folder: Path) -> None:
        """Save the reference: gathered parameter by parameter, saved by transformers on rank 0."""
        weights = {}
        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if dist.get_rank() == 0:
                    weights[name] = parameter.data.to('cpu', copy=True)
        if dist.get_rank() == 0:
            with torch.device('meta'):
                whole = LlamaForCausalLM(self.architecture).to(torch.bfloat16)
            whole.save_pretrained(folder, state_dict=weights, max_shard_size=self.shard_nbytes)
        dist.barrier()


def save(training: Training, writer: str, in_background: bool, bucket_nbytes: int, out: Path) -> bool:
    """Save in one way, and print a line about it; returns whether all is well. Runs on: all ranks."""
    reference, folder = out / 'reference', CheckpointFolder(out / 'hf_model', 1)
    training.save_pretrained(reference)
    options = SaveOptions(bucket_size=bucket_nbytes, max_shard_size=training.shard_nbytes)
    log = RunLog(logging.getLogger('gpu_check'), 'saver')
    strategy = WriteStrategy(writer)
    saver = Saver(unwrap(training.engine), options, Collective(), log, strategy=strategy, in_background=in_background)
    with_gpu, device_nbytes = training.device.type == 'cuda', 0
    if in_background:
        saver.reserve_snapshot()
    if with_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        device_nbytes = -torch.cuda.memory_allocated()
    found = (saver.start if in_background else saver.save)(folder, Step('iter', 1, 1))
    if with_gpu:
        device_nbytes += torch.cuda.max_memory_allocated()
    if in_background:
        for _ in range(STEPS_MEANWHILE):
            training.step()
        found = found.result()
    saver.close()
    of_all_ranks = [0] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, device_nbytes)
    most = max(of_all_ranks)
    problems = []
    if not _same_files(reference, folder.path):
        problems.append('other bytes than save_pretrained')
    if most > (bucket := max(bucket_nbytes, saver.plan.largest_bucket_nbytes)):
        problems.append(f'more on the device than a bucket, which is {bucket / 1e6:.0f} MB')
    if dist.get_rank() == 0:
        cost = found.cost
        print(
            f'{writer}{", in the background" * in_background}: {cost.seconds:.2f} s, training stalled '
            f'{cost.stalled_secs:.2f} s, {most / 1e6:.0f} MB on the device, {cost.peak_extra_nbytes / 1e6:.0f} MB on '
            f'the host: {"; ".join(problems) or "the bytes of save_pretrained"}',
            flush=True,
        )
    return not problems


def _same_files(reference: Path, found: Path) -> bool:
    files = sorted(path.name for path in reference.glob('*.safetensors'))
    if files != sorted(path.name for path in found.glob('*.safetensors')):
        return False
    return all((reference / name).read_bytes() == (found / name).read_bytes() for name in files)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--layers', type=int, default=16, help='layers of the Llama, of width 2048 (default: 16)')
    parser.add_argument(
        '--bucket-size', type=parse_size, default='128MB', help='bucket_size of the saves (default: %(default)s)'
    )
    parser.add_argument('--out', type=Path, default=Path('work_dirs/gpu_check'), metavar='DIR', help='for the saves')
    parser.add_argument('--cpu', action='store_true', help='run the same steps on CPU with gloo, to test this script')
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if not args.cpu and not torch.cuda.is_available():
        print('gpu_check: no GPU found; expected at least one (torch.cuda.is_available())', file=sys.stderr)
        return 2
    device = torch.device('cpu' if args.cpu else f'cuda:{os.environ["LOCAL_RANK"]}')
    if not args.cpu:
        torch.cuda.set_device(device)  # before NCCL and DeepSpeed take the current one
    deepspeed.init_distributed(dist_backend='gloo' if args.cpu else 'nccl')
    training = Training(args.layers, device)
    training.step()
    ways = product(('positional', 'parallel', 'stream'), (False, True))
    good = [save(training, *way, args.bucket_size, args.out.absolute()) for way in ways]
    wrong = torch.tensor([good.count(False)], device=device)
    dist.all_reduce(wrong)  # every rank compares the files
    dist.destroy_process_group()
    return int(wrong.item() > 0)


if __name__ == '__main__':
    sys.exit(main())
