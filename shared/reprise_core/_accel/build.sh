#!/bin/sh
# Builds the optional accelerator beside this file. Needs a C compiler and Python's headers.
# usage: PYTHON=.venv/bin/python CC=cc build.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
link=-shared
[ "$(uname)" = Darwin ] && link="-bundle -undefined dynamic_lookup"
# shellcheck disable=SC2086
${CC:-cc} -O3 -std=c11 -Wall -Wextra -Wno-unused-parameter -fPIC $link "-I$include" \
    -o "$here/_block_hash$suffix" "$here/block_hash.c" -ldl
echo "built $here/_block_hash$suffix"
