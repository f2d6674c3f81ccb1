#!/usr/bin/env bash
# Checks kvferry on the GPU of this machine, then prints one table of what it is worth there; under six
# minutes on an H200 where nothing has to be built. Fails if a test has, or if nothing was measured.
#
#     benches/gpu/run.sh [FOLDER]
#
# FOLDER holds wheels: kvferry's, and those of whatever PYTHON (python3) lacks; nothing is downloaded
# then. Without it a wheel is built here, and what the tests need is installed, beside PYTHON's own.
set -euo pipefail
folder=${1:+$(realpath "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -n "$folder" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$work/site" "$folder"/*.whl
else
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheel" .
    wheel=$(echo "$work"/wheel/kvferry-*.whl)
    if "$python" -c "import hypothesis, numpy, pytest, torch" 2>/dev/null; then
        "$python" -m pip install --quiet --no-deps --target "$work/site" "$wheel" "msgspec>=0.18.6"
    else
        "$python" -m pip install --quiet --target "$work/site" "$wheel[test]"
    fi
fi
export PYTHONPATH="$work/site"

"$python" - <<'END'
import sys
from kvferry import cuda
if reason := cuda.unavailable_reason():
    sys.exit(f"nothing to measure: {reason}")
import torch
print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda} of torch {torch.__version__}")
END

# A test that fails is no reason to measure nothing. Warnings of other versions than the project's own
# environment has are no failures here. What runs too long is interrupted, so that it tells what it has
# found, and killed where even that does not end it.
export PYTHONUNBUFFERED=1 HYPOTHESIS_PROFILE=unshrunk
# Streams that are to run beside one another have queues of their own.
export CUDA_DEVICE_MAX_CONNECTIONS=32
failed=0
KVFERRY_EXAMPLES="${KVFERRY_EXAMPLES:-1000}" timeout -k 10 -s INT 150 \
    "$python" -m pytest -q -p no:cacheprovider -o filterwarnings= -o faulthandler_timeout=60 \
    tests/gpu || failed=$?
timeout -k 10 -s INT 120 "$python" benches/gpu/table.py || failed=$?
exit "$failed"
