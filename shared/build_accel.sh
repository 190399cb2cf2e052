#!/bin/sh
# Builds the optional accelerators, each beside its source. Needs a C compiler and Python's headers.
# usage: PYTHON=.venv/bin/python CC=cc build_accel.sh
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
link=-shared
[ "$(uname)" = Darwin ] && link="-bundle -undefined dynamic_lookup"
for source in shared/reprise_core/_accel/block_hash.c services/worker/reprise_worker/_accel/block_copy.c; do
    module=$root/$(dirname "$source")/_$(basename "$source" .c)$suffix
    # shellcheck disable=SC2086
    ${CC:-cc} -O3 -std=c11 -Wall -Wextra -Wno-unused-parameter -fPIC $link "-I$include" \
        -o "$module" "$root/$source" -ldl
    echo "built $module"
done
