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
(
    use_env .venv
    echo '== lint'
    ruff check .
    ruff format --check .
    echo '== tests, modern stack'
    python -m pytest -q "$@"
)
[[ $# -eq 0 ]] || exit 0

make_env .venv-xtuner requirements/xtuner.txt requirements/test.txt
(
    use_env .venv-xtuner
    export PYTHONPATH=$PWD/tests/xtuner_stack
    echo "== tests, XTuner's stack"
    python -m pytest -q -m 'not modern_only'
)
