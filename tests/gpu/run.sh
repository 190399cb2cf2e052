#!/usr/bin/env bash
# The worker's CUDA tests and measurements, on a machine with an NVIDIA GPU.
#
#   tests/gpu/run.sh                  the tests
#   tests/gpu/run.sh measure          then tokens/s and GB/s, against plain transformers and bare copies
#
# It runs the `python3` of PATH (or $PYTHON) from the checkout, without installing it: that Python needs torch
# with CUDA, transformers, the packages of pyproject's `dependencies`, and pytest with pytest-timeout and pytest-asyncio.
# About 3 minutes and 70 GB of GPU memory; PYTEST_ARGS are handed to pytest.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="shared:services/worker:tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
# shellcheck disable=SC2086
"$python" -m pytest -v -p no:cacheprovider --durations=8 ${PYTEST_ARGS:-} tests/gpu
status=$?
if [ "${1:-}" = measure ]; then
    "$python" tests/gpu/measure.py ${PROFILE:+--profile "$PROFILE"} || status=1
fi
exit "$status"
