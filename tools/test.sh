#!/usr/bin/env bash
# Every test, in one command, on both stacks: makes the two environments that it needs.
#
#     bash tools/test.sh [PYTEST OPTIONS, for the modern stack alone]
#
# Needs Python 3.11 or newer, a C++ compiler, and root (small file systems are mounted, and Debian's
# libaio-dev is installed for the NVMe test when it is missing).
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

if [[ ! -e /usr/include/libaio.h ]]; then
    echo '== libaio-dev, for DeepSpeed on NVMe'
    apt-get update -qq && apt-get install -y -qq libaio-dev >/dev/null
fi

make_env .venv requirements/modern.txt requirements/test.txt
# What reads NVMe takes minutes to compile, so it is begun beside the first tests; those that need it wait for it
rm -f .venv/torch_extensions/async_io/lock
(use_env .venv && nice python -c 'import deepspeed
deepspeed.ops.op_builder.AsyncIOBuilder().load()' >/dev/null 2>&1) &
# So is the other environment
log=$(mktemp)
trap 'rm -f "$log"' EXIT
[[ $# -gt 0 ]] || make_env .venv-xtuner requirements/xtuner.txt requirements/test.txt >"$log" 2>&1 &
making=$!
(
    use_env .venv
    echo '== lint'
    ruff check .
    ruff format --check .
    echo '== tests, modern stack'
    python -m pytest -q "$@"
)
[[ $# -eq 0 ]] || exit 0

made=0
wait $making || made=$?
cat "$log"
[[ $made -eq 0 ]] || exit $made
(
    use_env .venv-xtuner
    export PYTHONPATH=$PWD/tests/xtuner_stack
    echo "== tests, XTuner's stack"
    python -m pytest -q -m 'not modern_only'
)
