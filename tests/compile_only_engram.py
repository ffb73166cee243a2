"""Compiles the engram kernels for GPUs that are not here; a script like `compile_only_mamba2.py`, one JSON a kernel."""

import json
import sys

import torch
from compile_only_mamba2 import capture, compile_launch, usage

OPS = {"engram_lookback": "_gather_lookback_kernel", "ngram_hash": "_hash_ngrams_kernel",
       "engram_lookup": "_look_up_rows_kernel"}


def launches(dtype=torch.bfloat16):
    """(sample, captured launch) of every sample that launches: dense, strided, with and without exponents."""
    from torch_replay.ops.engram import kernels
    from torch_replay.ops.engram.samples import SAMPLES
    from torch_replay.ops.registry import OPS as REGISTERED

    for sample in SAMPLES:
        args, kwargs = sample.make(dtype=dtype)
        out = REGISTERED[sample.op].body(*args, **kwargs)
        with capture(kernels, OPS[sample.op]) as calls:
            getattr(kernels, sample.op)(*args, **kwargs, **({} if out is None else {"out": out}))
        for call in calls:
            yield sample, call


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:] or (80, 90, 100)):
        for sample, call in launches():
            print(json.dumps(dict(arch=arch, sample=str(sample), **usage(compile_launch(*call, arch)))), flush=True)
