#!/usr/bin/env bash
# The C++ compiler for DeepSpeed's async_io. Nine of its files make the same templates of torch/extension.h, which takes
# nearly all of the time: here they are compiled as one, and without debugging information, which a test has no use for.
#
# Called as c++, which torch calls: with another name, the next process to load the operator would compile it again.
# PRECOMPILED is a folder for the file that names them all, CXX_ITSELF the compiler.
set -euo pipefail

source='' object='' dependencies='' all=("$@")
while (($#)); do
    case $1 in
        -c) source=${2-} ;;
        -o) object=${2-} ;;
        -MF) dependencies=${2-} ;;
    esac
    shift
done

case $source in
    '') exec "$CXX_ITSELF" "${all[@]}" ;; # it links, or is asked for its version
    */py_lib/py_ds_aio.cpp)
        # Their headers have no guards. A folder of system headers, so that ninja does not look for this one again
        {
            printf '#import "%s"\n' "${source%/*}"/*.h
            printf '#include "%s"\n' "${source%/*}"/*.cpp | grep -v '/py_ds_aio\.cpp"'
        } >"$PRECOMPILED/all_of_async_io.h"
        exec "$CXX_ITSELF" -isystem "$PRECOMPILED" -include all_of_async_io.h "${all[@]}" -g0
        ;;
    */aio/py_lib/*.cpp) # in that one
        "$CXX_ITSELF" -x c++ -fPIC -c - -o "$object" </dev/null
        echo "$object: $source" >"$dependencies"
        ;;
    *) exec "$CXX_ITSELF" "${all[@]}" -g0 ;;
esac
