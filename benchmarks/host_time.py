"""Host and total time of decode steps and of their attention metadata, under CUDA-graph trees and beside a plain graph.

    python -m benchmarks.host_time [--metadata] [--small] [--engine] [--preset hybrid-8b] [--output FILE]

Three ways to run the same kernels: (a) eagerly, (b) as torch_replay does, one compiled function under CUDA-graph trees,
(c) one graph captured by hand, which is the least that there can be and is done nowhere outside this folder. Host time
is how long a call keeps the Python thread while the device is idle; total time is that of back-to-back calls, the last
one waited for. All of one table are taken in one run.
"""

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.timing import capture
from torch_replay import Engine, EngineConfig, HybridModel, SamplingParams
from torch_replay.graphs.compiled import compile_alone
from torch_replay.graphs.step import DecodeStep
from torch_replay.models import small_model_dir
from torch_replay.models.presets import PRESETS
from torch_replay.request_state import RequestState
from torch_replay.scheduler import KVGroup
from torch_replay.specialized_decode import SpecializedDecodeModelState

BATCHES = (1, 8, 64, 256)
REPEATS = 200


def host_us(call: Callable[[], object]) -> float:
    """Median microseconds until `call` returns, each begun on an idle device."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def total_us(call: Callable[[], object], rounds: int = 5, least: float = 0.1) -> float:
    """Median microseconds of a call among back-to-back ones, over rounds of at least `least` seconds each."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = max(10, int(least / max(time.perf_counter() - begin, 1e-6)))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / count)
    return statistics.median(times)


def both(call: Callable[[], object]) -> dict[str, float]:
    return {"host_us": host_us(call), "total_us": total_us(call)}


def metadata_times(batch: int, groups: int, device: str) -> dict:
    """Metadata of a decode step over `groups` KV groups, every second one of a sliding window, block size 16."""
    names = [f"{'swa' if group % 2 else 'full'}.{group}" for group in range(groups)]
    config = SimpleNamespace(max_num_seqs=batch, block_size=16, num_snapshots=0, state_block_size=16)
    memory = SimpleNamespace(
        config=config, device=torch.device(device), attention_window=128, engram=None, states={},
        kv=dict.fromkeys(names), kv_kinds={name: name.split(".")[0] for name in names})
    requests = RequestState(memory, 2048)
    kv_groups = [KVGroup(name, 64, 128 if name.startswith("swa") else None) for name in names]
    state = SpecializedDecodeModelState(memory, requests, kv_groups, [batch], tokens=1)
    host = requests.host
    host.num_computed[:] = 1000
    host.tables[:] = torch.randint(1, 1 << 20, host.tables.shape).numpy()
    host.filled[:] = host.tables.shape[2]
    state.warm_up(quiet=True)
    key = state.key(batch)
    rows = [(index, [1]) for index in range(batch)]
    inputs = state.inputs(key)
    state.fill(inputs, rows)
    metadata = state._metadata(key)
    return {"eager": both(metadata.build), "trees": both(lambda: state.replay(key)),
            "plain_graph": both(capture([compile_alone(metadata.fill_tensors)]).replay),
            "upload_host_us": host_us(lambda: state.fill(inputs, rows))}


def step_times(model: HybridModel, batches, dtype: torch.dtype, max_model_len: int) -> list[dict]:
    """The whole greedy decode step, in the midst of that many requests. `launch` is what an engine calls: it fills and
    sends the upload, launches the graph and starts the results' way back; `total` waits for each step's results, and
    `ahead` for those of the step before."""
    engine = Engine(model, None, EngineConfig(max_num_seqs=max(batches), max_model_len=max_model_len, dtype=dtype,
                                              decode_sizes=tuple(batches), prefill_rows=min(32, max(batches))))
    begin = time.perf_counter()
    engine.warm_up(sampling=False)
    warm_up_seconds = time.perf_counter() - begin
    results = []
    for step in engine.steps:
        while len(engine.scheduler.running) < step.rows:
            prompt = [(len(engine.scheduler.running) + place) % 97 + 1 for place in range(16)]
            engine.add_request(prompt, SamplingParams(max_tokens=max_model_len // 2, ignore_eos=True))
            engine.step()
        results.append(time_step(step, [(request.index, [1]) for request in engine.scheduler.running[: step.rows]]))
        print(json.dumps(results[-1]), flush=True)
    return [{"warm_up_seconds": warm_up_seconds, "parameters": sum(1 for _ in model.parameters())}, *results]


def time_step(step: DecodeStep, rows: list) -> dict:
    """One size. The plain graph holds the code that Inductor made for the same function."""
    flights = []

    def ahead():
        flights.append(step.launch(rows, "greedy"))
        if len(flights) > 1:
            flights.pop(0).result()

    step.launch(rows, "greedy").result()
    result = {"batch": step.rows, "inputs": len(step.run["greedy"].inputs),
              "launch_host_us": host_us(lambda: step.launch(rows, "greedy")), "trees": both(step.run["greedy"]),
              "total_us": total_us(lambda: step.launch(rows, "greedy").result()), "ahead_us": total_us(ahead)}
    with torch.no_grad():
        result["plain_graph"] = both(capture([compile_alone(step.greedy_step, guarded=False)]).replay)
        result["trees_again"] = both(step.run["greedy"])
    result["kernels"] = kernel_counts(step)
    trees = min(result[name]["total_us"] for name in ("trees", "trees_again"))
    result["over_plain_graph"] = trees / result["plain_graph"]["total_us"] - 1
    return result


def engine_rates(model: HybridModel, batch: int = 8, steps: int = 100) -> dict[str, float]:
    """Tokens a second of an engine's steps, results and text included, with and without `run_ahead`."""
    engine = Engine(model, None, EngineConfig(max_num_seqs=batch, max_model_len=512, dtype=torch.bfloat16,
                                              decode_sizes=(batch,), run_ahead=True))
    engine.warm_up(sampling=False)
    for first in range(batch):
        engine.add_request([first + 1] * 16, SamplingParams(max_tokens=400, ignore_eos=True))
        engine.step()
    rates = {}
    for name, ahead in (("waiting", False), ("ahead", True)):
        engine.runs_ahead = ahead
        before, begin = engine.stats.decode_tokens, time.perf_counter()
        for _ in range(steps):
            engine.step()
        rates[name] = (engine.stats.decode_tokens - before) / (time.perf_counter() - begin)
    return rates


def kernel_counts(step: DecodeStep) -> dict[str, int]:
    """Kernels of one step: those of this project's ops, those that Inductor generated, and others (products)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.run["greedy"]()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    names = [name for name in names if not name.startswith("Mem")]
    ours = sum(bool(re.fullmatch(r"_\w+_kernel", name)) for name in names)
    generated = sum(name.startswith("triton_") for name in names)
    return {"all": len(names), "ops": ours, "generated": generated, "others": len(names) - ours - generated}


def plot(results: dict, path: Path) -> None:
    """Host time of metadata by number of requests: eager, trees, plain graph; one panel for each number of groups."""
    from matplotlib import pyplot

    labels = {"eager": "eager build", "trees": "CUDA-graph trees", "plain_graph": "graph captured by hand"}
    counts = sorted({row["groups"] for row in results["metadata"]})
    figure, panels = pyplot.subplots(1, len(counts), figsize=(9, 3.6), sharey=True, squeeze=False)
    for panel, groups in zip(panels[0], counts):
        rows = [row for row in results["metadata"] if row["groups"] == groups]
        for name, label in labels.items():
            panel.plot([str(row["batch"]) for row in rows], [row[name]["host_us"] for row in rows], "o-", label=label)
        panel.set(yscale="log", xlabel="requests", title=f"{groups} KV groups")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("host time of one build, us")
    panels[0][0].legend(loc=(0.42, 0.28))
    figure.suptitle(f"Attention metadata of a decode step, {results['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metadata", action="store_true", help="attention metadata at 4 and 40 groups")
    parser.add_argument("--small", action="store_true", help="the whole step of the shipped small model")
    parser.add_argument("--engine", action="store_true", help="tokens a second of the small model's engine, 8 requests")
    parser.add_argument("--preset", choices=PRESETS, help="the whole step of a preset with random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--output", type=Path, help="what was measured, as JSON")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"), help="draw an earlier output instead")
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.plot[0].read_text()), options.plot[1])
        return
    if not torch.cuda.is_available():
        parser.error("no CUDA device: CUDA graphs are what this measures")
    import triton

    results = {"commit": os.environ.get("TORCH_REPLAY_COMMIT"), "device": torch.cuda.get_device_name(),
               "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    torch.manual_seed(0)

    def save():
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if options.metadata:
        results["metadata"] = []
        for groups in (4, 40):
            for batch in options.batches:
                times = metadata_times(batch, groups, "cuda")
                results["metadata"].append({"groups": groups, "batch": batch, **times})
                print(json.dumps(results["metadata"][-1]), flush=True)
                save()
    if options.small or options.engine:
        model = HybridModel.from_pretrained(small_model_dir(), device="cuda", dtype=torch.bfloat16)
        model.requires_grad_(False)
    if options.engine:
        results["tokens_per_second"] = engine_rates(model)
        save()
    if options.small:
        results["small"] = step_times(model, options.batches, torch.bfloat16, 512)
        save()
    if options.preset:
        config = PRESETS[options.preset]()
        with torch.no_grad():
            model = HybridModel(config, "cuda", torch.bfloat16).eval().requires_grad_(False)
        results[options.preset] = step_times(model, options.batches, torch.bfloat16, 1024)
        save()


if __name__ == "__main__":
    main()
