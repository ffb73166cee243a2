"""Host and total time of decode steps and of their attention metadata, under CUDA-graph trees and beside a plain graph.

    python -m benchmarks.host_time [--metadata] [--packing] [--engine] [--prefill] [--small] [--preset hybrid-8b]
        [--output FILE]

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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.timing import capture
from torch_replay import Engine, EngineConfig, HybridModel, SamplingParams
from torch_replay.engine.decode_step import DecodeStep
from torch_replay.engine.prefill_step import prefill, warm_up_prefill
from torch_replay.graphs.compiled import compile_alone, mark_static
from torch_replay.graphs.packing import pack_parameters
from torch_replay.models import small_model_dir
from torch_replay.models.presets import PRESETS
from torch_replay.states.groups import KVGroup
from torch_replay.states.request_state import RequestState
from torch_replay.states.specialized_decode import SpecializedDecodeModelState

BATCHES = (1, 8, 64, 256)
REPEATS = 200


def host_us(call: Callable[[], object], name: str = "host") -> dict[str, float]:
    """Microseconds until `call` returns, each begun on an idle device: the median, and what a tenth of them stay below,
    which tells more where other work shares the processor."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return {f"{name}_us": statistics.median(times), f"{name}_low_us": statistics.quantiles(times, n=10)[0]}


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
    return {**host_us(call), "total_us": total_us(call)}


def metadata_times(batch: int, groups: int, device: str) -> dict:
    """Metadata of a decode step over `groups` KV groups, every second one of a sliding window, block size 16."""
    names = [f"{'swa' if group % 2 else 'full'}.{group}" for group in range(groups)]
    memory = SimpleNamespace(
        device=torch.device(device), max_num_seqs=batch, num_snapshots=0, states={}, engram=None,
        groups=[KVGroup(name, 1 << 20, 128 if name.startswith("swa") else None) for name in names])
    requests = RequestState(memory, 2048)
    state = SpecializedDecodeModelState(memory, requests, None, [batch], tokens=1)
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
            "plain_graph": both(plain_graph(metadata.fill_tensors)),
            **host_us(lambda: state.fill(inputs, rows), "upload_host")}


class Layers:
    """A step that writes 40 caches, with `count` parameters between. `run` is compiled."""

    def __init__(self, count: int, packed: bool):
        self.weights = torch.nn.ParameterList(torch.ones(64, device="cuda") for _ in range(count)).requires_grad_(False)
        self.caches, self.x = [torch.zeros(64, device="cuda") for _ in range(40)], torch.ones(64, device="cuda")
        mark_static(self)
        self._run = pack_parameters(self.weights, call=lambda: None).bind(self._write) if packed else self._write

    def _write(self) -> None:
        x, weights = self.x, list(self.weights)
        for place, cache in enumerate(self.caches):
            for weight in weights[place::40]:
                x = x * weight
            cache.add_(x)

    def run(self) -> None:
        self._run()


def packing_times(count: int) -> dict[str, float]:
    """Host time of `Layers` under trees: as torch.compile does it, without guards, packed too, and past Dynamo too."""
    ways = {"guarded": {}, "no_guards": {"guarded": False}, "packed": {"guarded": False},
            "packed_direct": {"guarded": False, "direct": True}}
    times = {}
    with torch.no_grad():
        for name, how in ways.items():
            run = compile_alone(Layers(count, name.startswith("packed")).run, cuda=True, **how)
            for _ in range(3):
                run()
            times |= host_us(run, name)
    return times


def prefill_times(model: HybridModel, max_model_len: int, tokens: int = 256) -> dict[str, float]:
    """Milliseconds of a prompt chunk, eager and compiled, and the seconds that compiling it takes at first."""
    engine = Engine(model, None, EngineConfig(max_num_seqs=1, max_model_len=max_model_len, chunk_size=tokens,
                                              dtype=torch.bfloat16, compiled_prefill=True, startup_cache=False))
    begin = time.perf_counter()
    warm_up_prefill(model, engine.state, tokens, engine.prefill_step)
    results = {"compile_seconds": time.perf_counter() - begin}
    rows = [(0, [1] * tokens)]
    engine.state.requests.host.admit(0)
    for name, run in (("eager", lambda: prefill(model, engine.state, rows, [[]])),
                      ("compiled", lambda: engine.prefill_step(rows, [[]]))):
        results[f"{name}_ms"] = total_us(run) / 1e3
    return results


def step_times(model: HybridModel, batches, dtype: torch.dtype, max_model_len: int, save) -> dict:
    """The whole greedy decode step, in the midst of that many requests. `launch` is what an engine calls: it fills and
    sends the upload, launches the graph and starts the results' way back; `total` waits for each step's results, and
    `ahead` for those of the step before. Gives what is there to `save` after each size, for the next takes minutes."""
    engine = Engine(model, None, EngineConfig(max_num_seqs=max(batches), max_model_len=max_model_len, dtype=dtype,
                                              decode_sizes=tuple(batches), prefill_rows=min(32, max(batches)),
                                              compiled_prefill=False))
    begin = time.perf_counter()
    engine.warm_up(sampling=False)
    windows = {family: {name: {str(size): value for size, value in found.items()}
                        for name, found in (("chosen", states.windows), ("us", states.window_us))}
               for family, states in engine.memory.states.items()}
    results = {"warm_up_seconds": time.perf_counter() - begin, "parameters": sum(1 for _ in model.parameters()),
               "windows": windows, "steps": []}
    for step in engine.steps:
        while len(engine.scheduler.running) < step.rows:
            prompt = [(len(engine.scheduler.running) + place) % 97 + 1 for place in range(16)]
            engine.add_request(prompt, SamplingParams(max_tokens=max_model_len // 2, ignore_eos=True))
            engine.step()
        rows = [(request.index, [1]) for request in engine.scheduler.running[: step.rows]]
        results["steps"].append(time_step(step, rows))
        print(json.dumps(results["steps"][-1]), flush=True)
        save(results)
    return results


def plain_graph(function: Callable, guarded: bool = True) -> Callable[[], None]:
    """Replay of one graph, captured by hand, of the code that Inductor makes for a step's function (and has made, for
    its cache has it): trees only wrap that code, which is what is left out here."""
    with mock.patch("torch._inductor.output_code.cudagraph_post_compile", lambda *args, **kwargs: None):
        return capture([compile_alone(function, cuda=True, guarded=guarded)]).replay


def time_step(step: DecodeStep, rows: list) -> dict:
    """One size."""
    flights = []

    def ahead():
        flights.append(step.launch(rows, "greedy"))
        if len(flights) > 1:
            flights.pop(0).result()

    step.launch(rows, "greedy").result()
    result = {"batch": step.rows, "inputs": len(step.run["greedy"].inputs),
              **host_us(lambda: step.launch(rows, "greedy"), "launch_host"), "trees": both(step.run["greedy"]),
              "total_us": total_us(lambda: step.launch(rows, "greedy").result()), "ahead_us": total_us(ahead)}
    with torch.no_grad():
        result["plain_graph"] = both(plain_graph(step.greedy_step, guarded=False))
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
    """Kernels of one step: those of this project's ops, those that Inductor generated, and others (products); and each
    by name, without the numbers that Inductor adds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step.run["greedy"]()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    names = [name for name in names if not name.startswith("Mem")]
    ours = sum(bool(re.fullmatch(r"_\w+_kernel", name)) for name in names)
    generated = sum(name.startswith("triton_") for name in names)
    by_name = Counter(re.sub(r"(triton_\w+?)(_\d+)+$", r"\1", name)[:120] for name in names)
    return {"all": len(names), "ops": ours, "generated": generated, "others": len(names) - ours - generated,
            "by_name": dict(by_name.most_common())}


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
    panels[0][-1].legend(loc=(0.42, 0.52))
    figure.suptitle(f"Attention metadata of a decode step, {results['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metadata", action="store_true", help="attention metadata at 4 and 40 groups")
    parser.add_argument("--small", action="store_true", help="the whole step of the shipped small model")
    parser.add_argument("--packing", action="store_true", help="a step with 0, 200 and 400 parameters")
    parser.add_argument("--prefill", action="store_true", help="a prompt chunk, of the preset or the small model")
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

    def save(**more):
        results.update(more)
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
    if options.packing:
        results["packing_host_us"] = {}
        for count in (0, 200, 400):
            results["packing_host_us"][count] = packing_times(count)
            print(count, json.dumps(results["packing_host_us"][count]), flush=True)
            save()
    if options.small or options.engine or (options.prefill and not options.preset):
        model = HybridModel.from_pretrained(small_model_dir(), device="cuda", dtype=torch.bfloat16)
        model.requires_grad_(False)
    if options.engine:
        save(tokens_per_second=engine_rates(model))
        print(json.dumps(results["tokens_per_second"]), flush=True)
    if options.prefill and not options.preset:
        save(small_prefill=prefill_times(model, 512))
        print(json.dumps(results["small_prefill"]), flush=True)
    if options.small:
        step_times(model, options.batches, torch.bfloat16, 512, lambda found: save(small=found))
    if options.preset:
        config = PRESETS[options.preset]()
        with torch.no_grad():
            model = HybridModel(config, "cuda", torch.bfloat16).eval().requires_grad_(False)
        if options.prefill:
            save(**{f"{options.preset}_prefill": prefill_times(model, 1024)})
            print(json.dumps(results[f"{options.preset}_prefill"]), flush=True)
        step_times(model, options.batches, torch.bfloat16, 1024, lambda found: save(**{options.preset: found}))


if __name__ == "__main__":
    main()
