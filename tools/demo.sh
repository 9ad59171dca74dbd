#!/usr/bin/env bash
# The demo in one command: installs its requirements, trains a small Llama with DeepSpeed ZeRO-3 while HFCheckpointHook
# saves it, then loads the last save in a new process and generates text.
#
#     bash tools/demo.sh
#     bash tools/demo.sh --cfg-options train_cfg.max_iters=100    # options of tools/train.py
#
# Needs Python 3.10 or newer and a C++ compiler. Prints the size of the download; a machine without a GPU needs a
# sixth of it (docs/versions.md). The training config is configs/demo_zero3.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

make_env .venv modern
use_env .venv

# One process per GPU that torch can use, or two on the CPU
processes=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')

echo '== making the base folder: tokenizer, config, tokens'
python tools/demo/task.py work_dirs/demo_base

echo "== training with $processes processes"
# --local-addr: the host name may not be resolvable
torchrun --standalone --local-addr localhost --nproc_per_node "$processes" \
    tools/train.py configs/demo_zero3.py "$@"

echo '== checking the last save in a new process'
python tools/demo/check.py work_dirs/demo
