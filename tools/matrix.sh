#!/usr/bin/env bash
# Tests the sets of versions that users have, each in an environment of its own below .venv-matrix.
#
#     bash tools/matrix.sh                     all sets of requirements/matrix
#     bash tools/matrix.sh torch-2.6 newest    some of them
#
# For each set: what `pip install .` would change there (it must add this package alone, since isal is there); tests/unit,
# in which test_families compares names, tensors and configs of more than 50 families with save_pretrained of that
# transformers; tests/distributed/test_any_set.py, which trains at ZeRO-3 on two ranks and compares bytes, async and with LoRA,
# converts and verifies; where XTuner is installed, tests/e2e/xtuner_stack, its real runs. Then the set's row of the
# table in docs/versions.md is written anew.
#
# A set needs 5 to 7 GB of disk (the CUDA build of torch), g++ and, for old versions of DeepSpeed, numactl. uv installs
# it, and a Python that the machine lacks; uv itself is installed into .venv-matrix if it is not on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

ROOT=.venv-matrix
PAGE=docs/versions.md

# make_set SET: create its environment unless it is there.
make_set() {
    local dir=$ROOT/$1 file=requirements/matrix/$1.txt wanted python no_deps
    wanted=$(realpath -m "$dir" && grep -v '^# without ' "$file" | sha256sum)
    [[ ! -f $dir/installed.sha256 || $(<"$dir/installed.sha256") != "$wanted" ]] || return 0
    python=$(sed -n 's/^# Python //p' "$file")
    _step "$dir: Python $python" "$uv" venv -q --seed --clear --python "$python" "$dir"
    _check_machine "$dir/bin/python"
    _step "$dir: $file" "$uv" pip install -q --python "$dir/bin/python" -r "$file"
    no_deps=$(sed -n 's/^# alone: //p' "$file")
    [[ ! $no_deps ]] || _step "$dir: $no_deps" "$dir/bin/python" -m pip install -q --no-deps --ignore-requires-python "$no_deps"
    _step "$dir: tests" "$uv" pip install -q --python "$dir/bin/python" ninja psutil isal \
        $(grep -E '^(pytest|hypothesis)==' requirements/test.txt)
    # DeepSpeed 0.13 and 0.14 import Intel's packages on a CPU, for which sitecustomize.py there fills in
    PYTHONPATH=$PWD/tests/e2e/xtuner_stack _compile_deepspeed "$dir"
    echo "$wanted" >"$dir/installed.sha256"
}

# run_tests SET NAME PYTEST_OPTIONS...: print pytest's summary; the log is .venv-matrix/SET-NAME.log.
run_tests() {
    local log=$ROOT/$1-$2.log
    (
        use_env "$ROOT/$1"
        # sitecustomize.py there makes XTuner run on a CPU
        export PYTHONPATH=$PWD/tests/e2e/xtuner_stack:$PWD
        python -m pytest -q -p no:cacheprovider "${@:3}"
    ) >"$log" 2>&1 || grep -E '^(FAILED|ERROR) ' "$log" >&2 || tail -n 20 "$log" >&2
    grep -E '^[0-9]+ (passed|failed|error)' "$log" | tail -n 1 | sed -E 's/ in [0-9.]+s.*//; s/, [0-9]+ (warnings?|deselected)//g'
}

# test_set SET: test it and write its row.
test_set() {
    local python=$ROOT/$1/bin/python left_out changed unit runs versions
    local modules=(tests/distributed/test_any_set.py)
    local passed='^[0-9]+ passed(, [0-9]+ skipped)?$'
    mapfile -t left_out < <(list_left_out "$1")
    changed=$("$python" -m pip install --dry-run . | sed -n 's/^Would install//p')
    [[ $changed == *xhf?hooks-* ]] || _fail "$1: pip install --dry-run . failed"
    changed=$(sed -E 's/ xhf.hooks-[^ ]+//; s/^ //' <<<"$changed")
    echo "== $1: tests/unit"
    # Without a test of the lock files of the two stacks
    unit=$(run_tests "$1" unit tests/unit --ignore=tests/unit/test_versions.py "${left_out[@]}")
    # XTuner's own runs, where it is installed
    [[ $1 == torch-* || $1 == newest ]] || modules+=(tests/e2e/xtuner_stack)
    echo "== $1: $unit; ${modules[*]}"
    runs=$(run_tests "$1" runs "${modules[@]}" "${left_out[@]}")
    echo "== $1: $runs; pip install . changes: ${changed:-nothing}"
    versions=$("$python" -c '
import platform
from importlib.metadata import version
packages = ("torch", "transformers", "deepspeed", "mmengine", "peft")
print(platform.python_version(), *map(version, packages), sep=" | ")')
    grep -q "^| $1 |" "$PAGE" || _fail "$PAGE: the table has no row of $1"
    sed -i "s~^| $1 |.*~| $1 | $versions | ${changed:-nothing} | $unit | $runs | $(date +%F) |~" "$PAGE"
    [[ ! $changed && $unit =~ $passed && $runs =~ $passed ]]
}

command -v numactl >/dev/null || echo 'numactl is missing, which DeepSpeed 0.15 calls. On Debian: apt-get install numactl'
mkdir -p "$ROOT"
if ! uv=$(command -v uv); then
    uv=$PWD/$ROOT/uv/bin/uv
    [[ -x $uv ]] || { python3 -m venv "$ROOT/uv" && "$ROOT/uv/bin/pip" install -q uv; }
fi
sets=("$@")
((${#sets[@]})) || mapfile -t sets < <(basename -s .txt requirements/matrix/*.txt)
failed=()
for set in "${sets[@]}"; do
    [[ -f requirements/matrix/$set.txt ]] || _fail "No set $set; there are: $(basename -s .txt requirements/matrix/*.txt | xargs)"
    make_set "$set"
    test_set "$set" || failed+=("$set")
done
((${#failed[@]} == 0)) || _fail "Failed: ${failed[*]}; logs are in $ROOT"
echo "== all of ${sets[*]} passed; $PAGE has the results"
