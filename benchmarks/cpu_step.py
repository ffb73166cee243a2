"""The decode step of the small model on a CPU, with small ops traced as plain torch and with every op opaque.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_step [--batches 1 4 8] [--tokens 1 4] [--output FILE]

Both ways are compiled in one process from empty caches, the order changing from size to size, and then timed in turns:
a round times one whole flush cycle of either, the median over rounds is the result. See `ops.registry.inlining`.
"""

import argparse
import json
import os
import re
import statistics
import time
from pathlib import Path

import torch
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache, run_and_get_code

from torch_replay import Engine, EngineConfig, HybridModel, SamplingParams
from torch_replay.models import small_model_dir
from torch_replay.ops.registry import OPS, inlining

MODES = {"opaque": False, "inlined": True}


class Subject:
    """A compiled decode step of `batch` running requests with `tokens` tokens each."""

    def __init__(self, model: HybridModel, batch: int, tokens: int, inlined: bool):
        self.engine = Engine(model, None, EngineConfig(max_num_seqs=batch, num_spec=tokens - 1, max_model_len=512,
                                                       decode_sizes=(batch,), startup_cache=False))
        self.step = self.engine.decode
        metrics.reset()
        torch._dynamo.reset()  # nothing of the other way is found
        begin = time.perf_counter()
        with fresh_cache(), inlining(inlined):
            _, codes = run_and_get_code(self.engine.warm_up, sampling=False, quiet=True)
        self.compiled = {"warm_up_s": time.perf_counter() - begin, "kernels": metrics.generated_kernel_count,
                         **calls("".join(codes))}
        for place in range(batch):
            prompt = [(place + token) % 97 + 1 for token in range(24)]
            self.engine.add_request(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
            self.engine.step()
        self.rows = [(request.index, [1] * tokens) for request in self.engine.scheduler.running]

    def cycle_ms(self, steps: int) -> float:
        """Milliseconds of a step, the mean of `steps`. Positions stay, cursors move and fold."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(self.rows, "greedy")
        return (time.perf_counter() - begin) * 1e3 / steps


def calls(code: str) -> dict[str, int]:
    """Calls in generated code: of ops of this project, of other torch ops and matmuls, of generated kernels."""
    return {"opaque_calls": len(re.findall(r"= torch\.ops\.torch_replay\.|^ *torch\.ops\.torch_replay\.", code, re.M)),
            "extern_calls": len(re.findall(r"= torch\.ops\.aten\.|^ *torch\.ops\.aten\.|extern_kernels\.\w+\(", code,
                                           re.M)),
            "kernel_calls": len(re.findall(r"^ *cpp_fused_\w+\(", code, re.M))}


def compare(model: HybridModel, batch: int, tokens: int, rounds: int, swap: bool) -> dict:
    """Both ways of one size. Quartiles tell how much of a difference is noise."""
    order = list(MODES)[:: -1 if swap else 1]
    subjects = {mode: Subject(model, batch, tokens, MODES[mode]) for mode in order}
    times = {mode: [] for mode in MODES}
    steps = 32
    for mode in MODES:
        subjects[mode].cycle_ms(steps)
    for turn in range(rounds):
        for mode in order[:: -1 if turn % 2 else 1]:
            times[mode].append(subjects[mode].cycle_ms(steps))
    result = {"batch": batch, "tokens": tokens}
    for mode in MODES:
        low, middle, high = statistics.quantiles(times[mode], n=4)
        result[mode] = {"step_ms": middle, "quartiles_ms": [low, high], "least_ms": min(times[mode]),
                        **subjects[mode].compiled}
    ratios = [inlined / opaque for inlined, opaque in zip(times["inlined"], times["opaque"])]
    result["step_ratio"] = statistics.median(ratios)
    return rounded(result)


def rounded(value):
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model = HybridModel.from_pretrained(small_model_dir())
    Subject(model, 1, 1, False)  # what every first compilation of a process pays is paid here
    sizes = [(batch, tokens) for tokens in arguments.tokens for batch in arguments.batches]
    results = []
    for place, (batch, tokens) in enumerate(sizes):
        results.append(compare(model, batch, tokens, arguments.rounds, swap=place % 2 == 1))
        print(json.dumps(results[-1]), flush=True)
    record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpus": os.cpu_count(),
              "load": [round(value, 2) for value in os.getloadavg()],
              "inlined": sorted(name for name, op in OPS.items() if op.inline_on_cpu), "sizes": results}
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
