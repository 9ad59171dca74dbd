#!/usr/bin/env bash
# Every test, in one command, on both stacks: makes the environments that it needs.
#
#     bash tools/test.sh                          everything, as CI does
#     bash tools/test.sh --unit [PYTEST OPTIONS]  lint, types and tests/unit: no process, no root, no Debian packages
#     bash tools/test.sh --coverage               which lines of the package tests/unit runs
#     bash tools/test.sh --lm-eval                a run that lm_eval evaluates (0.6 GB more in .venv)
#     bash tools/test.sh --docs                   build the pages of docs/ into docs/_build
#     bash tools/test.sh PYTEST OPTIONS           some tests, for example a path, of the modern stack
#
# With everything, three runs of pytest go on at the same time, for half of a run is waiting: tests/stress on the modern
# stack, the other tests on it, and XTuner's stack, followed by the modern stack's tests of object stores. What the first
# and the last have to say is shown when all have ended.
#
# Needs Python 3.11 or 3.12 (--unit: 3.10 to 3.14), a C++ compiler, and root (small file systems are mounted, and Debian's
# packages that tests need are installed). Says how much it will download; a machine without a GPU needs a sixth of that:
# docs/versions.md.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

# Tests of the modern stack that come after XTuner's, whose run is the shortest
STORES=(tests/distributed/test_{upload_to,out_dir_store}.py tests/e2e/test_{object_stores,convert_to_store,upload_to_hub}.py)

logs=$(mktemp -d)
# Each job in the background has a process group of its own
trap 'for job in $(jobs -p); do kill -- -"$job" 2>/dev/null || true; done; rm -rf "$logs"' EXIT

# Install those of the Debian PACKAGES that are missing.
need_debian_packages() {
    local missing
    missing=$(for package in "$@"; do dpkg -s "$package" &>/dev/null || echo "$package"; done)
    [[ $missing ]] || return 0
    echo "== Debian packages:" $missing
    if ! command -v apt-get >/dev/null || ((EUID != 0)); then
        echo 'No apt-get here, or not root: install what they hold in your own way. What is not tested without, the end says.'
        return
    fi
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# What DeepSpeed reads NVMe with. It is compiled beside the first tests; those that need it wait for it.
compile_async_io() {
    use_env .venv
    rm -f "$TORCH_EXTENSIONS_DIR/async_io/lock"
    local CXX_ITSELF PRECOMPILED=$TORCH_EXTENSIONS_DIR/precompiled
    CXX_ITSELF=$(command -v c++)
    export CXX_ITSELF PRECOMPILED
    rm -rf "$PRECOMPILED" # of a run that was stopped
    mkdir -p "$PRECOMPILED"
    ln -sf "$PWD/tools/cxx_async_io.sh" "$PRECOMPILED/c++"
    # What it leaves half done nothing else can go on with
    PATH=$PRECOMPILED:$PATH nice python -c '
from deepspeed.ops.op_builder import AsyncIOBuilder
AsyncIOBuilder().load()' || rm -rf "$TORCH_EXTENSIONS_DIR/async_io"
    rm -r "$PRECOMPILED"
}

lint() {
    use_env .venv
    echo '== lint'
    ruff check .
    ruff format --check .
    codespell
    mypy
}

build_docs() {
    use_env .venv
    echo '== docs'
    python -m sphinx -q -W --keep-going -b html docs docs/_build
}

test_modern() {
    use_env .venv
    echo '== tests, modern stack'
    python -m pytest -q "$@"
}

test_xtuner() {
    make_env .venv-xtuner xtuner test
    use_env .venv-xtuner
    export PYTHONPATH=$PWD/tests/e2e/xtuner_stack
    echo "== tests, XTuner's stack"
    python -m pytest -q -m 'not modern_only' tests
}

# Which lines of the package the unit tier runs. Without the tests of signal handlers and threads: a handler that
# interrupts coverage waits for coverage's own lock for ever.
measure_coverage() {
    use_env .venv
    # Costs next to nothing where Python tells of each line once
    python -c 'import sys; sys.exit(sys.version_info < (3, 12))' && export COVERAGE_CORE=sysmon
    echo '== lines of the package that the unit tier runs, without the files that are run whole'
    python -m coverage run -m pytest -q tests/unit --ignore=tests/unit/concurrency --ignore=tests/unit/on_demand
    python -m coverage report
}

if [[ ${1-} == --unit ]]; then
    shift
    make_env .venv modern test stores
    lint
    test_modern tests/unit "$@"
    exit
fi

if [[ ${1-} == --coverage ]]; then
    make_env .venv modern test stores
    measure_coverage
    exit
fi

if [[ ${1-} == --lm-eval ]]; then
    make_env .venv modern test stores lm_eval
    test_modern tests/e2e/test_lm_eval.py
    exit
fi

if [[ ${1-} == --docs ]]; then
    make_env .venv modern test docs
    build_docs
    exit
fi

# What DeepSpeed reads NVMe with, a network file system, and file systems to be mounted
need_debian_packages libaio-dev moosefs-master moosefs-chunkserver moosefs-client xfsprogs btrfs-progs iproute2
make_env .venv modern test stores docs
set -m
(compile_async_io) >"$logs/async_io.log" 2>&1 &
if [[ $# -gt 0 ]]; then
    set +m
    (test_modern "$@")
    exit
fi

# Never in a condition, where bash would go on after a step that failed
set +e
(
    (set -e; test_xtuner) >"$logs/xtuner.log" 2>&1
    xtuner=$?
    (set -e; test_modern "${STORES[@]}") >"$logs/stores.log" 2>&1
    exit $((2 * ($? != 0) + (xtuner != 0)))
) &
second=$!
(set -e; build_docs; test_modern tests/stress) >"$logs/stress.log" 2>&1 &
stress=$!
set +m
failed=()
(set -e; lint; test_modern tests --ignore=tests/stress "${STORES[@]/#/--ignore=}") 2>&1 | tee "$logs/modern.log"
((PIPESTATUS[0] == 0)) || failed+=(modern)
wait $stress || failed+=(stress)
wait $second
status=$?
((status & 1)) && failed+=(xtuner)
((status & 2)) && failed+=(stores)
((status > 3)) && failed+=(xtuner stores) # it was killed
set -e
cat "$logs/stress.log" "$logs/xtuner.log" "$logs/stores.log"
for run in "${failed[@]}"; do
    echo "== failed: $run"
    grep -E '^(FAILED|ERROR) ' "$logs/$run.log" || tail -n 50 "$logs/$run.log"
done
exit ${#failed[@]}
