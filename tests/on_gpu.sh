#!/bin/sh
# The checks that need an NVIDIA GPU: the test suite, compute-sanitizer, the timings. ptxrt/modules must have been
# built, here or elsewhere. Usage: sh tests/on_gpu.sh [suite|sanitize|time]..., all of them by default.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1
steps=${*:-suite sanitize time}
python=${PYTHON:-python3}

# A build for tests without a GPU lacks the GPU's code; a complete build needs no compiler here.
$python build.py

for step in $steps; do
    case $step in
    suite)
        $python -m pytest -q -m gpu tests
        ;;
    sanitize)
        for tool in memcheck racecheck initcheck synccheck; do
            echo "== compute-sanitizer $tool"
            # PTXRT_POOL=0 gives every array its own allocation, so that accesses out of bounds or after free are found.
            # Sixteen processes share the cases: most of the time goes into instrumenting code on the host.
            start=$(date +%s) pids=
            for part in $(seq 0 15); do
                PTXRT_POOL=0 PTXRT_MACHINE=portable PTXRT_PART=$part/16 compute-sanitizer --tool $tool --error-exitcode 9 \
                    $python -m pytest -q -m sanitize --durations=2 tests/test_kernels.py &
                pids="$pids $!"
            done
            failed=0
            for pid in $pids; do
                wait $pid || failed=1
            done
            echo "== $tool took $(($(date +%s) - start)) s"
            test $failed = 0
        done
        ;;
    time)
        for what in quantize dequantize attention launch; do
            $python cli.py bench $what
        done
        $python benchmarks/quantize_vs_torch.py
        $python benchmarks/attention_vs_torch.py
        ;;
    *)
        echo "unknown step $step: suite, sanitize or time" >&2
        exit 2
        ;;
    esac
done
