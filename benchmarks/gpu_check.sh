#!/usr/bin/env bash
# Checks and times what needs a GPU: bash benchmarks/gpu_check.sh OUT_DIR PART...
#
#   gpu-tests  tests marked gpu            cpu-tests  the other tests, on this machine's torch, GPU hidden
#   generate   README's command, and CPU   bench      `torch-replay bench ops`, table and JSON
#   sanitize   compute-sanitizer over small calls of every op
#
# Parts run one after the other, since they would slow each other down, and each writes OUT_DIR/PART.log, `generate` also a
# record, generate.json. They may take
# GPU_TESTS_SECONDS, CPU_TESTS_SECONDS, GENERATE_SECONDS, BENCH_SECONDS and SANITIZE_SECONDS. Run from a clone's root, on
# a machine with PyTorch, Triton and pytest-xdist; wheels of what else it lacks are installed from .whl/, if that exists.
# FlashInfer and flash-linear-attention are timed where they are installed. The exit status is 1 if any part failed.
set -u
usage() { echo "usage: gpu_check.sh OUT_DIR PART..., PART one of gpu-tests cpu-tests generate bench sanitize" >&2; exit 2; }

gpu_tests_seconds=${GPU_TESTS_SECONDS:-570}
cpu_tests_seconds=${CPU_TESTS_SECONDS:-570}
generate_seconds=${GENERATE_SECONDS:-570}
bench_seconds=${BENCH_SECONDS:-570}
sanitize_seconds=${SANITIZE_SECONDS:-570}

# SIGINT, so that pytest still tells what failed until then
within() { timeout -s INT -k 20 "$@"; }
tests() { within "$1" python3 -m pytest -q --tb=short --durations=10 -p no:cacheprovider "${@:2}"; }

gpu_tests() { tests "$gpu_tests_seconds" -n "$(nproc)" -m gpu tests compile_tests; }

# the interpreter's tests say nothing about this machine
cpu_tests() {
    CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 tests "$cpu_tests_seconds" -n "$(nproc)" -m "not gpu" compile_tests tests \
        --ignore-glob="tests/test_triton_*"
}

# The command that the README gives for a GPU, for one row, two rows and as many as it takes by itself.
generate() {
    local line command
    line=$(grep -m1 -- '^\.venv/bin/torch-replay generate .*--device cuda' "$(dirname "$0")/../README.md") || return
    read -ra command <<< "${line#.venv/bin/torch-replay }"
    one() {
        within $((generate_seconds / 4)) python3 -m torch_replay "${command[@]}" --json --max-tokens 100 "${@:2}" \
            > "$scratch/$1.json"
    }
    one cpu --device cpu && one "1 row" --batch 1 && one "2 rows" --batch 2 && one "all rows" || return
    python3 - "$scratch" "$line" "$out/generate.json" <<'PY'
import json, platform, subprocess, sys
import torch
scratch, command, output = sys.argv[1:]
runs = {name: json.load(open(f"{scratch}/{name}.json")) for name in ("cpu", "1 row", "2 rows", "all rows")}
cpu = runs.pop("cpu")
same = {name: [a["token_ids"] == b["token_ids"] for a, b in zip(cpu["requests"], run["requests"], strict=True)]
        for name, run in runs.items()}
stats = {name: {key: run["stats"][key] for key in ("graphs", "graph_breaks", "recompiles")}
         for name, run in runs.items()}
print("greedy text on the GPU equals the CPU's:", *same.values(), stats)
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
json.dump({"command": command, "equals_cpu": same, "stats": stats, "commit": commit,
           "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
           "torch": torch.__version__, "python": platform.python_version()}, open(output, "w"), indent=1)
sys.exit(not all(each and all(each) for each in same.values()))
PY
}

bench() {
    within "$bench_seconds" python3 -m torch_replay bench ops --time-limit $((bench_seconds * 4 / 5)) \
        --output "$scratch/ops.json"
    local status=$?
    cat "$scratch/ops.json" || return
    return $status
}

sanitize() {
    within "$sanitize_seconds" python3 -m benchmarks.sanitize --time-limit $((sanitize_seconds - 30))
}

[ $# -ge 2 ] || usage
out=$1
shift
for part in "$@"; do
    case $part in gpu-tests | cpu-tests | generate | bench | sanitize) ;; *) usage ;; esac
done
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONUNBUFFERED=1 CI=true
if compgen -G ".whl/*.whl" > /dev/null; then
    python3 -m pip install -q --no-index --no-deps --target "$scratch/site" .whl/*.whl || exit 1
    export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi

failed=0
for part in "$@"; do
    begin=$SECONDS
    ${part//-/_} > "$out/$part.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    echo "$part: exit status $status after $((SECONDS - begin)) s" | tee -a "$out/$part.log"
done
exit $failed
