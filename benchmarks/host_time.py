"""Host and total time of decode steps and of their attention metadata, under CUDA-graph trees and beside a plain graph.

    python -m benchmarks.host_time [--metadata] [--small] [--preset hybrid-8b] [--output FILE]

Three ways to run the same kernels: (a) eagerly, (b) as torch_replay does, one compiled function under CUDA-graph trees,
(c) one graph captured by hand, which is the least that there can be and is done nowhere outside this folder. Host time
is how long a call keeps the Python thread while the device is idle; total time is that of back-to-back calls, the last
one waited for. All of one table are taken in one run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

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


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """`call` as one plain CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


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
            "plain_graph": both(captured(compile_alone(metadata.fill_tensors))),
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
        result["plain_graph"] = both(captured(compile_alone(step.greedy_step, guarded=False)))
        result["trees_again"] = both(step.run["greedy"])
    trees = min(result[name]["total_us"] for name in ("trees", "trees_again"))
    result["over_plain_graph"] = trees / result["plain_graph"]["total_us"] - 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metadata", action="store_true", help="attention metadata at 4 and 40 groups")
    parser.add_argument("--small", action="store_true", help="the whole step of the shipped small model")
    parser.add_argument("--preset", choices=PRESETS, help="the whole step of a preset with random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: CUDA graphs are what this measures")
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
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
    if options.small:
        model = HybridModel.from_pretrained(small_model_dir(), device="cuda", dtype=torch.bfloat16)
        results["small"] = step_times(model.requires_grad_(False), options.batches, torch.bfloat16, 512)
        save()
    if options.preset:
        config = PRESETS[options.preset]()
        with torch.no_grad():
            model = HybridModel(config, "cuda", torch.bfloat16).eval().requires_grad_(False)
        results[options.preset] = step_times(model, options.batches, torch.bfloat16, 1024)
        save()


if __name__ == "__main__":
    main()
