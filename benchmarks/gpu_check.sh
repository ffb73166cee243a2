#!/usr/bin/env bash
# Checks and times everything that needs a GPU, in one go: bash benchmarks/gpu_check.sh OUT_DIR [SECONDS_FOR_BENCH]
# Run from a clone's root, on a machine with PyTorch, Triton and pytest-xdist. What is installed besides is used:
# FlashInfer and flash-linear-attention as peers, compute-sanitizer for memory and race checks.
set -u
out=$1
limit=${2:-165}
export PYTHONUNBUFFERED=1 CI=true

note() { echo "[$SECONDS s] $*"; }
tests() { timeout 240 python3 -m pytest -q --tb=short -p no:cacheprovider "$@"; }

(CUDA_VISIBLE_DEVICES= tests -n 6 -m "not gpu" compile_tests tests/test_{mamba2,gdn,kda,conv,ring,ring_commit,tokens}.py \
    tests/test_{attention,replay_context,models,scan,sampling,engine}.py > "$out/cpu_tests.log" 2>&1) &
(for device in cpu cuda; do
    timeout 120 python3 -m torch_replay generate --json --spec 3 --max-tokens 100 --device $device \
        > "$out/generate_$device.json" 2> "$out/generate_$device.err"
done) &
tests -n 8 -m gpu tests > "$out/gpu_tests.log" 2>&1
note "GPU tests: $(tail -1 "$out/gpu_tests.log")"
wait
note "CPU tests on this torch: $(tail -1 "$out/cpu_tests.log")"
python3 - "$out" <<'PY'
import json, sys
cpu, cuda = (json.load(open(f"{sys.argv[1]}/generate_{device}.json")) for device in ("cpu", "cuda"))
same = [a["token_ids"] == b["token_ids"] for a, b in zip(cpu["requests"], cuda["requests"])]
print("greedy text on the GPU equals the CPU's:", same, "graphs, breaks, recompiles:",
      [cuda["stats"][key] for key in ("graphs", "graph_breaks", "recompiles")])
PY

python3 -m torch_replay bench ops --time-limit "$limit" --output "$out/ops.json" > "$out/ops.txt" 2> "$out/ops.err"
note "bench ops: exit $?"

if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        timeout 110 compute-sanitizer --tool $tool --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider -m gpu \
            tests/test_triton_ops.py -k "against_truth and float32 and (typical or one_row)" \
            > "$out/$tool.log" 2>&1 && note "$tool: clean" || note "$tool: exit $?" &
    done
    wait
fi
