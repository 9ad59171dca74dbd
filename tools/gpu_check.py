"""Save a model at ZeRO-3 on all GPUs with every writer, and compare every byte.

    torchrun --standalone --nproc_per_node GPUS tools/gpu_check.py [--layers 16] [--bucket-size 128MB] [--out DIR]

With nccl, each writer saves in the foreground and in the background during training. The result is compared with
save_pretrained of the gathered model. Checks the bytes, and that a save uses at most one bucket of device memory.
Prints one line per case; exit status 1 for failures, 2 without a GPU. ``--cpu`` runs the same steps with gloo, to test
this script.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from itertools import product
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.runs.engines import Saver
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks.options import parse_size
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.preflight import reserve_snapshot

STEPS_MEANWHILE = 2
SMALL = dict(hidden_size=2048, intermediate_size=5504, num_attention_heads=16, num_key_value_heads=16)


class Training:
    """A bf16 Llama at ZeRO-3 with AdamW. Runs on: all ranks.

    Attributes:
        shard_nbytes: Gives at least two files per rank: with 'parallel', a file has one writer.
    """

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self.device = device
        config = zero_config(3)
        self.architecture = LlamaConfig(vocab_size=32000, num_hidden_layers=n_layers, **SMALL)
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = LlamaForCausalLM(self.architecture)
        self.shard_nbytes = sum(parameter.ds_numel for parameter in model.parameters()) // dist.get_world_size()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

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
    """Save in one way. Runs on: all ranks; rank 0 prints a line about it, and returns whether all is well."""
    reference, folder = out / 'reference', CheckpointFolder(out / 'hf_model', 1)
    training.save_pretrained(reference)
    how = dict(bucket_size=bucket_nbytes, max_shard_size=training.shard_nbytes, in_background=in_background)
    saver = Saver(training.engine, Collective.connect(), writer=writer, **how)
    if in_background:
        reserve_snapshot(saver.context)
    if training.device.type == 'cuda':
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before_nbytes = torch.cuda.memory_allocated()  # 0 without a GPU
    found = (saver.start if in_background else saver.save)(folder, Step('iter', 1, 1))
    device_nbytes = torch.cuda.max_memory_allocated() - before_nbytes
    if in_background:
        for _ in range(STEPS_MEANWHILE):
            training.step()
        found = found.result()
    saver.close()
    of_all_ranks = [0] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, device_nbytes)
    if dist.get_rank() > 0:
        return True
    problems = []
    if digests(reference) != digests(folder.path):
        problems.append('other bytes than save_pretrained')
    if max(of_all_ranks) > (bucket := max(bucket_nbytes, saver.plan.largest_bucket_nbytes)):
        problems.append(f'more on the device than a bucket, which is {bucket / 1e6:.0f} MB')
    print(
        f'{writer}{", in the background" * in_background}: {found.cost.seconds:.2f} s, training stalled '
        f'{found.cost.stalled_secs:.2f} s, {max(of_all_ranks) / 1e6:.0f} MB on the device, '
        f'{found.cost.peak_extra_nbytes / 1e6:.0f} MB on the host: '
        f'{"; ".join(problems) or "the bytes of save_pretrained"}',
        flush=True,
    )
    return not problems


def digests(folder: Path) -> dict[str, bytes]:
    """File name of weights to a digest of the file."""
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in folder.glob('*.safetensors')}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--layers', type=int, default=16, help='layers of the Llama, of width 2048 (default: 16)')
    parser.add_argument('--bucket-size', type=parse_size, default='128MB', help='of the saves (default: %(default)s)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/gpu_check'), metavar='DIR', help='for the saves')
    parser.add_argument('--cpu', action='store_true', help='run the same steps on CPU with gloo, to test this script')
    args = parser.parse_args()
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
    dist.destroy_process_group()
    return int(not all(good))


if __name__ == '__main__':
    sys.exit(main())
