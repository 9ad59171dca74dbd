#!/usr/bin/env bash
# The C++ compiler for DeepSpeed's async_io: its 12 files include torch/extension.h each, which takes most of a minute.
# Here it is compiled once, and debugging information for a test's operator not at all.
#
# Called as c++, which torch calls: with another name, the next process to load the operator would compile it again.
# PRECOMPILED is a folder for the header, CXX_ITSELF the compiler.
set -euo pipefail

if [[ " $* " != *' -c '* ]]; then
    exec "$CXX_ITSELF" "$@" # it links, or is asked for its version
elif [[ " $* " != *' -DTORCH_EXTENSION_NAME=async_io '* ]]; then
    exec "$CXX_ITSELF" "$@" -g0 # what async_io needs has a file or two
fi
header=$PRECOMPILED/all.h
exec 9>"$PRECOMPILED/lock"
flock 9
if [[ ! -e $header.gch ]]; then
    arguments=("$@") options=()
    while ((${#arguments[@]})); do
        case ${arguments[0]} in
            -c | -o | -MF) arguments=("${arguments[@]:2}") ;;
            -MMD) arguments=("${arguments[@]:1}") ;;
            *) options+=("${arguments[0]}") && arguments=("${arguments[@]:1}") ;;
        esac
    done
    echo '#include <torch/extension.h>' >"$header"
    "$CXX_ITSELF" "${options[@]}" -g0 -x c++-header "$header" -o "$header.tmp"
    mv "$header.tmp" "$header.gch"
fi
flock -u 9
exec "$CXX_ITSELF" -include "$header" "$@" -g0
