#!/usr/bin/env bash
# The C++ compiler for DeepSpeed's async_io. Nine of its files instantiate the same templates of torch/extension.h,
# which takes nearly all of the time. Here they are compiled as one file, and without debugging information, since tests
# do not need it.
#
# Named c++, as torch calls it: with another name, the next process that loads the operator would compile it again.
# PRECOMPILED is a folder for the file that includes all others, CXX_ITSELF the real compiler.
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
    '') exec "$CXX_ITSELF" "${all[@]}" ;; # it links, or prints its version
    */py_lib/py_ds_aio.cpp)
        # Their headers have no guards. Included as a system header, so that ninja does not track it
        {
            printf '#import "%s"\n' "${source%/*}"/*.h
            printf '#include "%s"\n' "${source%/*}"/*.cpp | grep -v '/py_ds_aio\.cpp"'
        } >"$PRECOMPILED/all_of_async_io.h"
        exec "$CXX_ITSELF" -isystem "$PRECOMPILED" -include all_of_async_io.h "${all[@]}" -g0
        ;;
    */aio/py_lib/*.cpp) # already compiled in py_ds_aio.cpp
        "$CXX_ITSELF" -x c++ -fPIC -c - -o "$object" </dev/null
        echo "$object: $source" >"$dependencies"
        ;;
    *) exec "$CXX_ITSELF" "${all[@]}" -g0 ;;
esac
