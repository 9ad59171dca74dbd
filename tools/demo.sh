#!/usr/bin/env bash
# The demo in one command: installs its requirements, trains a small Llama with DeepSpeed ZeRO-3 while HFCheckpointHook
# saves it, compares the last save with MMEngine's checkpoint, and lets the saved model write.
#
#     bash tools/demo.sh
#     bash tools/demo.sh --kill                                   # a run that is killed while it saves, and a second start
#     bash tools/demo.sh --cfg-options train_cfg.max_iters=200    # options of tools/train.py
#
# Needs Python 3.10 or newer and a C++ compiler. Prints the size of the download; a machine without a GPU needs a
# sixth of it (docs/versions.md). The training config is configs/demo_zero3.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

make_env .venv modern
use_env .venv

# One process per GPU that torch can use, or two on the CPU
processes=2
! _has_gpu || processes=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')

# train CONFIG OPTIONS...: options of tools/train.py. --local-addr: the host name may not be resolvable.
train() {
    torchrun --standalone --local-addr localhost --nproc_per_node "$processes" tools/train.py "$@" | python tools/demo/show.py
}

# typed COMMAND...: show the command, and run it.
typed() {
    echo "\$ $*"
    "$@"
}

# The newest run of a work_dir, which is named by the time of its start
newest() {
    ls -d "$1"/2*/ | tail -n 1
}

kill_and_start_again() {
    local dir=work_dirs/demo_kill report=work_dirs/demo_kill.stderr
    local options=(--work-dir "$dir" --cfg-options train_cfg.max_iters=15 "custom_hooks.0.out_dir=$dir/hf_model")
    options+=(default_hooks.checkpoint.interval=5 default_hooks.logger.interval=5)
    rm -rf "$dir" # of an earlier demo
    echo "== training with $processes processes, saving every 5 iterations, until the second save"
    ! train configs/demo_kill.py "${options[@]}" 2>"$report" || _fail 'The run was not killed.'
    tail -n 200 "$dir"/2*/*.log | grep -q 'saved iter_5' || _fail "The run failed before its second save: see $report."
    echo "   torchrun's report of it is in $report"
    echo '== the folder: hf_model is the first save, whole; what the second save has written has no such name'
    typed ls -A "$dir"
    typed xhf-verify "$dir/hf_model"
    echo '== the same training, started again'
    train configs/demo_zero3.py --resume "${options[@]}"
    echo "== the folder: nothing is left of the save that was killed"
    typed ls -A "$dir"
    typed xhf-verify "$dir/hf_model"
}

echo -n '== making the base folder '
python tools/demo/task.py work_dirs/demo_base

if [[ ${1-} == --kill ]]; then
    kill_and_start_again
    exit
fi

echo "== training with $processes processes at ZeRO-3; the whole log is in work_dirs/demo/<timestamp>"
train configs/demo_zero3.py "$@"
run=$(newest work_dirs/demo)

echo "== comparing the last save with what MMEngine's checkpoint holds"
typed xhf-convert work_dirs/demo "${run}converted"
typed xhf-verify --compare "${run}converted" "${run}hf_model"

# In a new process, which needs nothing but transformers
python tools/demo/check.py "${run%/}"
