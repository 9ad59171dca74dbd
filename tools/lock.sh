#!/usr/bin/env bash
# Makes the lock files anew: requirements/STACK.lock.txt pins every package that requirements/STACK.txt comes to,
# and the tests' tools, for Linux on every supported Python and for both builds of torch.
#
#     bash tools/lock.sh [uv's options, for example --upgrade]
#
# Versions that a lock file has stay where they still fit. Needs uv (https://docs.astral.sh/uv) and the package index.
# Run tools/test.sh afterwards: a lock file says what was tested.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

lock() {
    local stack=$1 python=$2
    shift 2
    # What a requirements file pins wins over what XTuner requires
    uv pip compile -q --universal --python-version "$python" --override "$stack.txt" --annotation-style line \
        --custom-compile-command 'bash tools/lock.sh' --output-file "$stack.lock.txt" "$@"
}

lock modern 3.10 modern.txt test.txt stores.txt docs.txt "$@"
lock xtuner 3.11 xtuner.txt xtuner_no_deps.txt test.txt "$@"
