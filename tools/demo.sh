#!/usr/bin/env bash
# The demo, in one command: installs what it needs, trains a small Llama with DeepSpeed ZeRO-3 while
# HFCheckpointHook saves it, then loads the last save in a fresh process and generates text.
#
#     bash tools/demo.sh
#     bash tools/demo.sh --cfg-options train_cfg.max_iters=100    # options of tools/train.py
#
# Needs Python 3.10 or newer and a C++ compiler, and says how much it will download. A machine without a GPU needs a
# sixth of that: docs/versions.md. What it trains: configs/demo_zero3.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

make_env .venv modern
use_env .venv

# One process for each GPU that torch can use, or two on the CPU
processes=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')

echo '== base folder: tokenizer, config, token blocks'
python tools/demo/task.py work_dirs/demo_base

echo "== training with $processes processes"
# --local-addr: this machine's own name need not be resolvable
torchrun --standalone --local-addr localhost --nproc_per_node "$processes" \
    tools/train.py configs/demo_zero3.py "$@"

echo '== the last save, in a fresh process'
python tools/demo/check.py work_dirs/demo
