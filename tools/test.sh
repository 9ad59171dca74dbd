#!/usr/bin/env bash
# The tests, in two tiers. Creates the environments that they need.
#
#     bash tools/test.sh                       first tier: lint, types, and all that the modern environment alone can run
#     bash tools/test.sh --rest                second tier: kills, faults, file systems, stores, devices, older readers
#     bash tools/test.sh --xtuner [STACK]      tests with XTuner 0.2.0; CI runs them with xtuner-0.1
#     bash tools/test.sh --network-fs          saves on MooseFS, in neither tier
#     bash tools/test.sh --coverage            line coverage of tests/unit
#     bash tools/test.sh --trainers [NAME...]  real trainers, vLLM and LMDeploy (tests/trainers/test_NAME.py), in neither tier
#                                              (xtuner_v1 needs XTUNER_V1=FOLDER, a clone of InternLM/xtuner)
#     bash tools/test.sh --docs                build the pages of docs/ into docs/_build
#     bash tools/test.sh PYTEST OPTIONS        selected tests of the modern stack, for example a path
#
# .ci/run runs both tiers, and beside them XTuner 0.1. A tier's rows of runs go on at the same time, since half of a run
# is waiting. Both need Python 3.10 to 3.14 and a C++ compiler, the second also root, to mount small file systems and
# install Debian packages; XTuner 0.1 needs Python 3.10 or 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/env.sh

# What depends on the versions of transformers, peft and DeepSpeed that XTuner pins
XTUNERS=(tests/unit/{exporters,offline/model,system/test_versions.py} --ignore=tests/unit/exporters/assets)
XTUNERS+=(tests/distributed/test_{any_set,convert,llava,lora,untouched}.py tests/e2e/xtuner_stack)
TRAINERS=(trl axolotl swift llamafactory vllm sentence_transformers lmdeploy xtuner_v1)

logs=$(mktemp -d)
# Each background job has its own process group
trap 'for job in $(jobs -p); do kill -- -"$job" 2>/dev/null || true; done; rm -rf "$logs"' EXIT

# Install the Debian PACKAGES that are missing.
need_debian_packages() {
    local missing
    missing=$(for package in "$@"; do dpkg -s "$package" &>/dev/null || echo "$package"; done)
    [[ $missing ]] || return 0
    echo "== Debian packages:" $missing
    if command -v apt-get >/dev/null && ((EUID == 0)); then
        apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
    else
        echo 'apt-get is missing, or you are not root: install these in another way. The end lists what was not tested.'
    fi
}

# The simulated device, and DeepSpeed's operator for NVMe: compiled while the first tests run; those in need wait.
compile_operators() {
    use_env .venv
    rm -f .torch_extensions/*/lock "$TORCH_EXTENSIONS_DIR"/{async_io,pin_memory}/lock # left by an interrupted run
    python -c 'from tests.helpers.ranks.simulated_device import extension; extension()'
    python -c 'from tests.helpers.ranks.async_io import load_async_io; load_async_io()'
}

lint() {
    use_env .venv
    ruff check .
    ruff format --check .
    codespell
    mypy
}

build_docs() {
    use_env .venv
    python -m sphinx -q -W --keep-going -b html docs docs/_build
}

# test_with ENVIRONMENT NAME PYTEST_OPTIONS...: a run whose times go to NAME.xml.
test_with() {
    use_env "$1"
    python -m pytest -q --junitxml="$logs/$2.xml" -o junit_family=xunit1 "${@:3}"
}

# test_xtuner STACK: in the set that most of its users have, xtuner-0.1, or in xtuner, which is 0.2.0.
test_xtuner() {
    local left_out=()
    make_env ".venv-$1" "$1" test
    make_env .venv modern test # which reads what XTuner's runs wrote
    rm -f ".venv-$1"/torch_extensions/*/lock # left by an interrupted run; DeepSpeed would wait for it without an end
    [[ $1 == xtuner ]] || mapfile -t left_out < <(list_left_out xtuner-0.1.23)
    export PYTHONPATH=$PWD/tests/e2e/xtuner_stack
    # torch 2.4 starts processes that compile as soon as DeepSpeed is imported; nothing is compiled here
    export TORCHINDUCTOR_COMPILE_THREADS=1
    test_with ".venv-$1" xtuner --complete -m 'not modern_only' "${XTUNERS[@]}" "${left_out[@]}"
}

# Families that transformers 4.52 to 4.57 save under other names than they have in memory.
test_transformers4() {
    export PYTHONPATH=$PWD/.overlay-transformers-4.57.6
    test_with .venv transformers4 tests/unit/exporters/test_{families,golden}.py tests/distributed/test_zoo.py
}

# Line coverage of the unit tests, without those of signal handlers and threads: a handler that interrupts coverage
# waits forever for coverage's own lock.
measure_coverage() {
    use_env .venv
    # Nearly free if Python reports each line only once
    python -c 'import sys; sys.exit(sys.version_info < (3, 12))' && export COVERAGE_CORE=sysmon
    echo '== line coverage of the unit tests, without fully covered files'
    python -m coverage run -m pytest -q tests/unit --ignore=tests/unit/system --ignore=tests/unit/runs/ends
    python -m coverage report
}

# list_files_that_need FOLDER...: modules below tests/FOLDER with tests of the second tier.
list_files_that_need() {
    grep -rlE 'mark\.needs\(|split_tiers\(' "${@/#/tests/}" --include='test_*.py' --exclude-dir=xtuner_stack
}

# run NAME COMMAND...: a run whose output goes to a log.
run() {
    (set -e; "${@:2}") >"$logs/$1.log" 2>&1
    # Not as a condition, since bash would ignore failed steps there
    (($? == 0)) || echo "$1" >>"$logs/failed"
}

# Rows that take about as long: when the last one runs alone, a core is idle. Unit tests that start processes from the
# server of ranks, which itself takes 10 s to start, are in a row that has it.
first_tier() {
    local start=(tests/unit/{integrations/test_own_loop,runs/test_trainings}.py)
    (run lint lint; run unit test_with .venv unit -m 'not needs' tests/unit "${start[@]/#/--ignore=}" --ignore=tests/unit/offline) &
    run e2e test_with .venv e2e -m 'not needs' tests/e2e --ignore=tests/e2e/xtuner_stack tests/unit/offline "${start[@]}" &
    show ranks test_with .venv ranks -m 'not needs' tests/distributed
}

second_tier() {
    # For DeepSpeed's NVMe operator, and file systems to mount
    need_debian_packages libaio-dev xfsprogs btrfs-progs iproute2
    make_env .venv modern test stores docs
    make_overlay transformers-4.48.0 .venv
    make_overlay transformers-4.57.6 .venv
    compile_operators >"$logs/operators.log" 2>&1 &
    local compiling=$!
    (
        run transformers4 test_transformers4
        run distributed test_with .venv distributed --complete -m needs $(list_files_that_need distributed)
    ) &
    (
        run programs test_with .venv programs --complete -m needs $(list_files_that_need e2e unit)
        run docs build_docs
    ) &
    show stress test_with .venv stress --complete -m needs tests/stress --ignore=tests/stress/test_network_fs.py
    wait "$compiling"
}

# show NAME COMMAND...: a run that is shown as it goes.
show() {
    set +m
    (set -e; "${@:2}") 2>&1 | tee "$logs/$1.log"
    ((PIPESTATUS[0] == 0)) || echo "$1" >>"$logs/failed"
    set -m
}

# run_tier TIER: run it, show the logs and the times; fails if a run did.
run_tier() {
    local name
    set +e -m
    SECONDS=0
    "$1"
    wait
    echo "$1 $SECONDS" >"$logs/tier"
    set -e +m
    for name in lint unit e2e transformers4 distributed programs docs; do
        [[ ! -s $logs/$name.log ]] || { echo "== $name" && cat "$logs/$name.log"; }
    done
    .venv/bin/python tools/test_times.py "$logs"
    [[ -f $logs/failed ]] || exit 0
    for name in $(<"$logs/failed"); do
        echo "== failed: $name"
        grep -E '^(FAILED|ERROR) ' "$logs/$name.log" || tail -n 50 "$logs/$name.log"
    done
    exit 1
}

case ${1-} in
    '')
        make_env .venv modern test
        run_tier first_tier
        ;;
    --rest)
        run_tier second_tier
        ;;
    --coverage)
        make_env .venv modern test
        measure_coverage
        ;;
    --trainers)
        shift
        make_env .venv modern test stores
        # Each in an overlay of its own, since they pin different versions
        for trainer in "${@:-${TRAINERS[@]}}"; do
            environment=.venv
            if [[ $trainer == lmdeploy ]]; then
                environment=.venv-xtuner-0.1 # its last version that converts without a GPU needs that set
                make_env "$environment" xtuner-0.1 test
            fi
            [[ $trainer != xtuner_v1 || -d ${XTUNER_V1-}/xtuner/v1 ]] ||
                _fail 'xtuner_v1 was not tested: set XTUNER_V1 to the folder of a clone of https://github.com/InternLM/xtuner.'
            make_overlay "$trainer" "$environment"
            (
                export PYTHONPATH=$PWD/.overlay-$trainer/site-packages
                # Stands in for the compiled part of torchvision, where torch is a CPU build
                [[ $trainer != vllm ]] || PYTHONPATH+=:$PWD/tests/e2e/xtuner_stack
                [[ $trainer != xtuner_v1 ]] || PYTHONPATH+=:$(realpath "$XTUNER_V1")
                test_with "$environment" "$trainer" "tests/trainers/test_$trainer.py"
            )
        done
        ;;
    --network-fs)
        need_debian_packages moosefs-master moosefs-chunkserver moosefs-client iproute2
        make_env .venv modern test
        test_with .venv network_fs --complete tests/stress/test_network_fs.py "${@:2}"
        ;;
    --xtuner)
        test_xtuner "${2:-xtuner}"
        ;;
    --docs)
        make_env .venv modern test docs
        build_docs
        ;;
    *)
        make_env .venv modern test
        test_with .venv selected "$@"
        ;;
esac
