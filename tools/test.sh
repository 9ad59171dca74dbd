#!/usr/bin/env bash
# All tests in one command, on both stacks. Creates the environments that they need.
#
#     bash tools/test.sh                          everything, as CI does
#     bash tools/test.sh --unit [PYTEST OPTIONS]  lint, types and tests/unit; needs neither root nor Debian packages
#     bash tools/test.sh --coverage               line coverage of tests/unit
#     bash tools/test.sh --trainers [NAME...]     real trainers (tests/trainers/test_NAME.py), not among everything
#     bash tools/test.sh --docs                   build the pages of docs/ into docs/_build
#     bash tools/test.sh PYTEST OPTIONS           selected tests of the modern stack, for example a path
#
# Without arguments, three rows of runs go on at the same time, since half of a run is waiting: tests/unit and
# tests/distributed on the modern stack; tests/stress and the tests of object stores on it; and XTuner's stack, followed
# by the model families with transformers 4.57 and tests/e2e. The first is shown as it goes.
#
# Needs Python 3.11 or 3.12 (--unit: 3.10 to 3.14), a C++ compiler, and root, to mount small file systems and to install
# Debian packages that tests need. Prints the size of the download; a machine without a GPU needs a sixth of it
# (docs/versions.md).
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

# What depends on the versions of transformers, peft and DeepSpeed that XTuner pins
XTUNERS=(tests/e2e/xtuner_stack tests/unit/{exporters,meta_model,test_installed.py})
XTUNERS+=(tests/distributed/test_{any_set,convert,equivalence,llava,lora,untouched}.py)
TRAINERS=(trl axolotl swift llamafactory)
# Runs with object stores go with tests/stress, since that run is shorter
STORES=(tests/distributed/test_stores.py)

logs=$(mktemp -d)
# Each background job has its own process group
trap 'for job in $(jobs -p); do kill -- -"$job" 2>/dev/null || true; done; rm -rf "$logs"' EXIT

# Install the Debian PACKAGES that are missing.
need_debian_packages() {
    local missing
    missing=$(for package in "$@"; do dpkg -s "$package" &>/dev/null || echo "$package"; done)
    [[ $missing ]] || return 0
    echo "== Debian packages:" $missing
    if ! command -v apt-get >/dev/null || ((EUID != 0)); then
        echo 'apt-get is missing, or you are not root: install these in another way. The end lists what was not tested.'
        return
    fi
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# The simulated device, and DeepSpeed's operator for NVMe: compiled while the first tests run; those in need wait.
compile_operators() {
    use_env .venv
    rm -f .torch_extensions/*/lock
    nice python -c 'from tests.helpers.ranks.simulated_device import extension; extension()'
    rm -f "$TORCH_EXTENSIONS_DIR/async_io/lock"
    local CXX_ITSELF PRECOMPILED=$TORCH_EXTENSIONS_DIR/precompiled
    CXX_ITSELF=$(command -v c++)
    export CXX_ITSELF PRECOMPILED
    rm -rf "$PRECOMPILED" # left by an interrupted run
    mkdir -p "$PRECOMPILED"
    ln -sf "$PWD/tools/cxx_async_io.sh" "$PRECOMPILED/c++"
    # Nothing can continue from a partial build
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
    rm -f "$TORCH_EXTENSIONS_DIR"/*/lock # left by an interrupted run; DeepSpeed would wait for it without an end
    export PYTHONPATH=$PWD/tests/e2e/xtuner_stack
    echo "== tests, XTuner's stack"
    python -m pytest -q -m 'not modern_only' "${XTUNERS[@]}"
}

# Families that transformers 4.52 to 4.57 save under other names than they have in memory.
test_transformers4() {
    use_env .venv
    export PYTHONPATH=$PWD/.overlay-transformers-4.57.6
    echo '== model families, transformers 4.57'
    python -m pytest -q tests/unit/exporters/test_families.py tests/distributed/test_zoo.py
}

# Line coverage of the unit tests, without those of signal handlers and threads: a handler that interrupts coverage
# waits forever for coverage's own lock.
measure_coverage() {
    use_env .venv
    # Nearly free if Python reports each line only once
    python -c 'import sys; sys.exit(sys.version_info < (3, 12))' && export COVERAGE_CORE=sysmon
    echo '== line coverage of the unit tests, without fully covered files'
    python -m coverage run -m pytest -q tests/unit --ignore=tests/unit/system --ignore=tests/unit/background
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

if [[ ${1-} == --trainers ]]; then
    shift
    make_env .venv modern test stores
    # Each in an overlay of its own, since they pin different versions
    for trainer in "${@:-${TRAINERS[@]}}"; do
        make_overlay "$trainer"
        (
            export PYTHONPATH=$PWD/.overlay-$trainer/site-packages
            test_modern "tests/trainers/test_$trainer.py"
        )
    done
    exit
fi

if [[ ${1-} == --docs ]]; then
    make_env .venv modern test docs
    build_docs
    exit
fi

# For DeepSpeed's NVMe operator, a network file system, and file systems to mount
need_debian_packages libaio-dev moosefs-master moosefs-chunkserver moosefs-client xfsprogs btrfs-progs iproute2
make_env .venv modern test stores docs
# tests/e2e/test_older_readers.py reads with both
make_overlay transformers-4.48.0
make_overlay transformers-4.57.6
set -m
(compile_operators) >"$logs/operators.log" 2>&1 &
if [[ $# -gt 0 ]]; then
    set +m
    (test_modern "$@")
    exit
fi

# run NAME COMMAND...: a run whose output goes to a log
run() {
    local name=$1
    shift
    (set -e; "$@") >"$logs/$name.log" 2>&1
    # Not as a condition, since bash would ignore failed steps there
    [[ $? -eq 0 ]] || echo "$name" >>"$logs/failed"
}

set +e
(run xtuner test_xtuner; run transformers4 test_transformers4; run e2e test_modern tests/e2e) &
(run docs build_docs; run stress test_modern tests/stress "${STORES[@]}") &
set +m
(set -e; lint; test_modern tests/unit tests/distributed "${STORES[@]/#/--ignore=}") 2>&1 | tee "$logs/modern.log"
((PIPESTATUS[0] == 0)) || echo modern >>"$logs/failed"
# Not for the compiler, which nothing needs any more
wait %2 %3
set -e
cat "$logs"/{docs,stress,xtuner,transformers4,e2e}.log
[[ -f $logs/failed ]] || exit 0
for run in $(<"$logs/failed"); do
    echo "== failed: $run"
    grep -E '^(FAILED|ERROR) ' "$logs/$run.log" || tail -n 50 "$logs/$run.log"
done
exit 1
