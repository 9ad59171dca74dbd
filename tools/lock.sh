#!/usr/bin/env bash
# Regenerates the lock files: requirements/STACK.lock.txt pins every package that requirements/STACK.txt and the tests
# require, for Linux, every supported Python version and both builds of torch.
#
#     bash tools/lock.sh [uv's options, for example --upgrade]
#
# Locked versions stay if they still fit. Needs uv (https://docs.astral.sh/uv) and the package index. Run tools/test.sh
# afterwards: a lock file records what was tested.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

# lock STACK PYTHON OPTIONS...: write STACK.lock.txt.
lock() {
    # Versions that a requirements file pins override those that XTuner requires
    uv pip compile -q --universal --python-version "$2" --override "$1.txt" --annotation-style line \
        --custom-compile-command 'bash tools/lock.sh' --output-file "$1.lock.txt" "${@:3}"
}

lock modern 3.10 modern.txt test.txt stores.txt docs.txt "$@"
# XTuner 0.1.23 itself is not for all of these Pythons, so its line is added
uv pip compile -q --universal --python-version 3.10 --annotation-style line --custom-compile-command 'bash tools/lock.sh' \
    --output-file xtuner-0.1.lock.txt xtuner-0.1.txt test.txt "$@"
grep '^xtuner==' xtuner-0.1_no_deps.txt >>xtuner-0.1.lock.txt
lock xtuner 3.11 xtuner.txt xtuner_no_deps.txt test.txt "$@"
