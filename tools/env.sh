# The Python environments of tools/demo.sh and tools/test.sh. Source this file in bash; it only defines functions. Call
# them from the root of the repository (make_env with `set -euo pipefail`):
#
#     source tools/env.sh
#     make_env .venv modern test
#     use_env .venv

# make_env DIR STACK [MORE...]: create the virtual environment DIR with the packages of requirements/STACK.txt (and of
# MORE, for example test), in the versions of requirements/STACK.lock.txt, and with this project.
# Does nothing if DIR is up to date; after an edit of one of these files it installs again. One script at a time: CI's
# have an environment in common.
make_env() {
    local lock
    exec {lock}<"requirements/$2.lock.txt"
    flock "$lock"
    _make_env "$@"
    exec {lock}<&-
}

_make_env() {
    local dir=$1 stack=$2 stamp=$1/installed.sha256
    shift
    local lock=requirements/$stack.lock.txt no_deps=requirements/${stack}_no_deps.txt
    local files=("${@/#/requirements/}") made wanted
    files=("${files[@]/%/.txt}")
    # Includes the path, since a moved or copied environment does not work
    made=$(realpath -m "$dir" && sha256sum "$lock")
    wanted=$(echo "$made" && sha256sum setup.py "${files[@]}" && { [[ ! -f $no_deps ]] || sha256sum "$no_deps"; })
    if [[ -x $dir/bin/python && -f $stamp ]] && ! grep -vqxFf "$stamp" <<<"$wanted"; then
        return
    fi
    # Creating it anew would empty what the link points to, which somebody else uses
    [[ ! -L $dir ]] || _fail "$dir is a link, and what it points to is not up to date: install it there, or remove the link."
    local python
    python=$(_find_python "$stack")
    _check_machine "$python"
    _tell_size "$dir" "$stack"
    if [[ ! -x $dir/bin/python || ! -f $stamp ]] || grep -vqxFf "$stamp" <<<"$made"; then
        # From scratch: packages of an older lock file would stay, and operators compiled for them
        _step "$dir: creating the environment" "$python" -m venv --clear "$dir"
        echo "$made" >"$stamp"
    fi

    # In variables, so that the lock file also applies to the tools that build packages. pip's own variables and
    # configuration (indexes, proxies, certificates) work as usual
    local -x PIP_CONSTRAINT="${PIP_CONSTRAINT-} $lock" PIP_BUILD_CONSTRAINT="${PIP_BUILD_CONSTRAINT-} $lock"
    # Python compiles what is imported (use_env); for pip, compiling all modules takes as long as the rest
    local torch pip=("$dir/bin/python" -m pip install -q --no-compile)
    # First and by name: pip then takes a CPU build if its indexes have one
    torch=$(grep -hom1 '^torch==[^ ;]*' "${files[@]}" | head -n1)
    _step "$dir: $torch" "${pip[@]}" "$torch"
    _step "$dir: ${files[*]}" "${pip[@]}" "${files[@]/#/-r}"
    [[ ! -f $no_deps ]] || _step "$dir: $no_deps" "${pip[@]}" --no-deps --ignore-requires-python "-r$no_deps"
    _step "$dir: xhf_hooks" "${pip[@]}" --no-deps --no-build-isolation -e .
    # Not again for further packages; a lock was left by an interrupted run
    if ! compgen -G "$dir/torch_extensions/*/*.so" >/dev/null || compgen -G "$dir/torch_extensions/*/lock" >/dev/null; then
        _compile_deepspeed "$dir"
    fi
    echo "$wanted" >"$stamp"
}

# make_overlay NAME ENVIRONMENT: the packages of requirements/NAME.txt, without their dependencies, in the folder
# .overlay-NAME. Put it first on PYTHONPATH, and they join or replace those of ENVIRONMENT. Does nothing if it is up to
# date.
make_overlay() {
    local dir=.overlay-$1 environment=$2 file=requirements/$1.txt wanted
    wanted=$(realpath -m "$dir" && sha256sum "$file")
    if [[ -f $dir/installed.sha256 && $(<"$dir/installed.sha256") == "$wanted" ]]; then
        return
    fi
    rm -rf "$dir"
    _step "$dir: $file" "$environment/bin/python" -m pip install -q --no-compile --no-deps --target "$dir" "-r$file"
    # On PYTHONPATH under this name, dill pickles what is in it by reference, as what is installed
    ln -s . "$dir/site-packages"
    echo "$wanted" >"$dir/installed.sha256"
}

# list_left_out SET: pytest's options for the tests that fail in this set by the library's own fault, which its file names.
list_left_out() {
    sed -n -E 's/^# without ([^ ]+): .*/--deselect=\1/p' "requirements/matrix/$1.txt"
}

# Use DIR's programs in this shell, with the settings that DeepSpeed needs here.
use_env() {
    local dir
    dir=$(cd "$1" && pwd -P) || return # behind a link: by another path, DeepSpeed would compile its operators again
    export PATH="$dir/bin:$PATH"
    unset PYTHONDONTWRITEBYTECODE # make_env has compiled nothing
    # Two DeepSpeed versions that share compiled operators would rebuild them again and again
    export TORCH_EXTENSIONS_DIR="$dir/torch_extensions"
    # One process per core or GPU: more threads would slow each other down
    export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
    # Everything is made on this machine; nothing is looked up on the Hub
    export HF_HUB_OFFLINE=1
    if ! _has_gpu; then
        export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=''
    fi
}

_has_gpu() {
    nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# Print the name of a Python that can run STACK.
_find_python() {
    local versions python
    case $1 in
        xtuner) versions='(3, 11) <= sys.version_info < (3, 13)' ;; # XTuner 0.2.0 refuses 3.13
        xtuner-0.1) versions='(3, 10) <= sys.version_info < (3, 12)' ;; # torch 2.4 and tokenizers 0.15 have no wheels for 3.13
        *) versions='(3, 10) <= sys.version_info < (3, 15)' ;;
    esac
    for python in python3 python3.{14,13,12,11,10}; do
        if "$python" -c "import sys; sys.exit(not $versions)" 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    _fail "No suitable Python found: expected $versions, as python3 or for example python3.11; found $(python3 --version 2>&1)."
}

# Check the machine before minutes of installing.
_check_machine() {
    local python=$1
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        _fail "$python cannot create virtual environments. On Debian: apt-get install $python-venv"
    # DeepSpeed compiles a small communication operator for CPU runs, which needs g++ and Python's C headers
    command -v c++ >/dev/null || _fail 'No C++ compiler found. On Debian: apt-get install g++'
    "$python" -c 'import os, sysconfig
raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        _fail "Python's C headers not found. On Debian: apt-get install $python-dev"
}

# Print the size of STACK before it is downloaded into DIR. Measured with `pip download` of the lock files and `du`.
_tell_size() {
    local cuda cpu
    case $2 in
        xtuner) cuda='3.1 GB to download, 6.3 GB' cpu='0.6 GB, 2.3 GB' ;;
        xtuner-0.1) cuda='2.8 GB to download, 6.0 GB' cpu='0.6 GB, 2.3 GB' ;;
        *) cuda='3.0 GB to download, 5.8 GB' cpu='0.4 GB, 1.8 GB' ;;
    esac
    echo "== $1: about $cuda on disk; with the CPU build of torch $cpu; free here: $(df -h --output=avail . | tail -n1)"
    if ! _has_gpu; then
        echo '   This machine has no GPU, so the CPU build is enough. If pip is not configured for it, start again with'
        echo "   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu bash $0"
    fi
}

# Compile that operator now, in one process. Otherwise all training processes would wait for it, and a run killed while
# compiling would leave a lock that blocks the next one.
_compile_deepspeed() {
    ! _has_gpu || return 0
    rm -rf "$1/torch_extensions"
    (
        use_env "$1"
        _step "$1: compiling DeepSpeed's operator" python -c '
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if type(builder).__name__ != "NotImplementedBuilder":  # DeepSpeed 0.13 and 0.14 have no such operator
    builder.load(verbose=False)'
    )
}

# Print what happens, run it, and show its output only if it fails.
_step() {
    local output
    echo "== $1"
    output=$("${@:2}" 2>&1) || _fail "$output" "Failed: ${*:2}"
}

_fail() {
    printf '%s\n' "$@" >&2
    exit 1
}
