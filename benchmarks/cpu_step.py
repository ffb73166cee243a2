"""The decode step of the small model on a CPU, with small ops traced as plain torch and with every op opaque.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_step [--batches 1 4 8] [--tokens 1 4] [--ops OP ...] [--output FILE]

Both ways are compiled in one process from empty caches, the order changing from size to size, and then timed in turns:
a round times 16 steps of either, the median over rounds is the result. Times are of this process's CPU, of compilation
with the compilers that it starts: other work on the machine lengthens those less than the wall clock's. See
`ops.registry.inlining`.
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
STEPS = 16


class Subject:
    """A compiled decode step of `batch` running requests with `tokens` tokens each."""

    def __init__(self, model: HybridModel, batch: int, tokens: int, inlined: bool):
        self.engine = Engine(model, None, EngineConfig(max_num_seqs=batch, num_spec=tokens - 1, max_model_len=512,
                                                       decode_sizes=(batch,), startup_cache=False))
        self.step, self.inlined = self.engine.decode, inlined
        metrics.reset()
        torch._dynamo.reset()  # nothing of the other way is found
        begin = cpu_seconds()
        with fresh_cache(), inlining(inlined):
            _, codes = run_and_get_code(self.engine.warm_up, sampling=False, quiet=True)
        self.compiled = {"warm_up_s": cpu_seconds() - begin, "kernels": metrics.generated_kernel_count,
                         **calls("".join(codes))}
        for place in range(batch):
            prompt = [(place + token) % 97 + 1 for token in range(24)]
            self.engine.add_request(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
            with inlining(inlined):
                self.engine.step()
        self.rows = [(request.index, [1] * tokens) for request in self.engine.scheduler.running]

    def step_ms(self) -> float:
        """Milliseconds of a step, the mean of STEPS. Positions stay, cursors move and fold."""
        # outside of the context the guards would trace anew, and both ways run the same code
        with inlining(self.inlined), torch._dynamo.config.patch(error_on_recompile=True):
            begin = time.process_time()
            for _ in range(STEPS):
                self.step(self.rows, "greedy")
            seconds = time.process_time() - begin
        return seconds * 1e3 / STEPS


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


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
    for subject in subjects.values():
        subject.step_ms()
    for turn in range(rounds):
        for mode in order[:: -1 if turn % 2 else 1]:
            times[mode].append(subjects[mode].step_ms())
    result = {"batch": batch, "tokens": tokens, "load_average": os.getloadavg()[0]}
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
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--ops", nargs="+", choices=list(OPS), metavar="OP", help="ops to inline (those registered so)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.ops:
        for op in OPS.values():
            op.inline_on_cpu = op.name in arguments.ops
    torch._inductor.config.compile_threads = 1  # compilers are children, whose time counts
    model = HybridModel.from_pretrained(small_model_dir())
    torch.compile(lambda x: x.sin() + 1)(torch.ones(3, 5))  # what a process's first compilation pays is paid here
    sizes = [(batch, tokens) for tokens in arguments.tokens for batch in arguments.batches]
    record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpus": os.cpu_count(),
              "inlined": sorted(name for name, op in OPS.items() if op.inline_on_cpu), "sizes": []}
    for place, (batch, tokens) in enumerate(sizes):
        record["sizes"].append(compare(model, batch, tokens, arguments.rounds, swap=place % 2 == 1))
        print(json.dumps(record["sizes"][-1]), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
