# The Python environments of tools/demo.sh and tools/test.sh. Source this file; it only defines
# functions, for bash with `set -euo pipefail`, called from the root of the repository:
#
#     source tools/env.sh
#     make_env .venv requirements/modern.txt requirements/test.txt
#     use_env .venv

# Make the virtual environment DIR with what the REQUIREMENTS files pin, and this project in it.
# Costs nothing when DIR has all of that already; an edit of one of the files installs again.
make_env() {
    local dir=$1 stamp=$1/installed.sha256
    shift
    local wanted
    # With its place, since an environment that was moved or copied does not work
    wanted=$(sha256sum setup.py "$@" && realpath "$dir")
    if [[ -x $dir/bin/python && -f $stamp ]] && ! grep -vqxFf "$stamp" <<<"$wanted"; then
        return
    fi
    _check_machine
    rm -f "$stamp"
    [[ -x $dir/bin/python ]] || _step "$dir: making it" python3 -m venv "$dir"

    # Before the rest and by name: pip then takes a CPU build where its indexes have one
    local torch
    torch=$(grep -hom1 '^torch==[^ ;]*' "$@" | head -n1)
    _step "$dir: $torch" "$dir/bin/python" -m pip install -q "$torch"

    local options=() file
    for file in "$@"; do
        options+=(-r "$file")
    done
    _step "$dir: $*" "$dir/bin/python" -m pip install -q "${options[@]}"
    _step "$dir: xhf_hooks" \
        "$dir/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
    _compile_deepspeed "$dir"
    echo "$wanted" >"$stamp"
}

# Make DIR's programs the ones that this shell runs, with the settings that DeepSpeed needs here.
use_env() {
    local dir
    dir=$(cd "$1" && pwd)
    export PATH="$dir/bin:$PATH"
    # Two DeepSpeed versions that share compiled operators rebuild them for ever
    export TORCH_EXTENSIONS_DIR="$dir/torch_extensions"
    # One process per core or GPU: more threads would only get in each other's way
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
    # Everything is made on this machine: nothing is to be looked up on the hub
    export HF_HUB_OFFLINE=1
    if ! _has_gpu; then
        export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=''
    fi
}

_has_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# Refuse a machine that lacks something, before minutes of installing.
_check_machine() {
    command -v python3 >/dev/null || _fail 'python3 not found. Install Python 3.10 or newer.'
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        _fail "Python 3.10 or newer is needed; python3 is $(python3 --version 2>&1)."
    python3 -c 'import ensurepip, venv' 2>/dev/null ||
        _fail "python3 cannot make virtual environments. On Debian: apt-get install python3-venv"
    # DeepSpeed compiles a small communication operator for CPU runs: g++ and Python's C headers
    command -v c++ >/dev/null || _fail 'No C++ compiler found. On Debian: apt-get install g++'
    python3 -c 'import os, sysconfig
raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        _fail "Python's C headers not found. On Debian: apt-get install python3-dev"
}

# Compile that operator now, in one process: training would stop for it, all processes at once,
# and a training run killed in the middle of it leaves a lock that the next one waits for.
_compile_deepspeed() {
    ! _has_gpu || return 0
    rm -rf "$1/torch_extensions"
    (
        use_env "$1"
        _step "$1: DeepSpeed's operator (compiling)" python -c '
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)'
    )
}

# Say what happens, run it, and show its output only when it fails.
_step() {
    echo "== $1"
    shift
    local output
    output=$("$@" 2>&1) || _fail "$output" "Failed: $*"
}

_fail() {
    printf '%s\n' "$@" >&2
    exit 1
}
