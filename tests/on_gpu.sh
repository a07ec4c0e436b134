#!/bin/sh
# The GPU side of the proof, on a machine with an NVIDIA GPU: the suite, compute-sanitizer, the timings. ptxrt/modules must
# have been built (here or elsewhere). Usage: sh tests/on_gpu.sh [suite|sanitize|time]..., all of them by default.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1
steps=${*:-suite sanitize time}
python=${PYTHON:-python3}

# Units that were built for tests without a GPU lack the code for it; where all is there this takes no compiler.
$python build.py

for step in $steps; do
    case $step in
    suite)
        $python -m pytest -q -m gpu tests
        ;;
    sanitize)
        for tool in memcheck racecheck initcheck synccheck; do
            echo "== compute-sanitizer $tool"
            # Every array its own allocation, so that uses past its end or its life are seen.
            # Sixteen processes, each with a part of the cases: most of the time goes into instrumenting code, on the host.
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
