"""What an engine of a preset allocates beside weights and pools: warm-up, prefill, decode steps. Random weights.

    python -m benchmarks.memory [--preset hybrid-8b] [--rows 512] [--device cuda] [--output FILE]

Prints and records bytes: weights, pools (states, rings, conv rings, cursors, key-value caches), and the allocator's
peak of construction, warm-up, and steps, each beside the weights and pools. Activations, of which the logits of a step
are the largest, are part of those peaks. On a CPU, which has no such counter, peaks are null.
"""

import argparse
import json
import pathlib
import time

import torch

from torch_replay import Engine, EngineConfig, HybridModel, SamplingParams
from torch_replay.models.presets import PRESETS
from torch_replay.states.replay_context import ReplayContext

RESULTS = pathlib.Path(__file__).parent / "results" / "memory.json"


def measure(config, rows: int, device: str, dtype: torch.dtype, *, tokens: int = 24, compiled: bool = True,
            length: int = 1024) -> dict:
    """Bytes by phase for an engine of `rows` requests, all of which then run for `tokens` tokens."""
    cuda, peaks, seconds = device == "cuda", {}, {}

    def phase(name: str, run):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = run()
        if cuda:
            torch.cuda.synchronize()
        seconds[name], peaks[name] = time.perf_counter() - begin, torch.cuda.max_memory_allocated() if cuda else None
        return result

    with torch.device(device):
        model = HybridModel(config, dtype=dtype).eval().requires_grad_(False)
    engine = phase("construction", lambda: Engine(model, None, EngineConfig(
        max_num_seqs=rows, max_model_len=length, dtype=dtype, compiled=compiled, startup_cache=False,
        decode_sizes=(rows,))))
    phase("warm_up", lambda: engine.warm_up(sampling=False, quiet=True))
    prompts = [[(7 * row + i) % config.vocab_size for i in range(8)] for row in range(rows)]
    phase("steps", lambda: engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    weights = sum(each.nbytes for each in model.parameters())
    pools = sum(cache.nbytes for cache in engine.memory.kv.values())
    for states in engine.memory.states.values():
        held = states.block_copy_tensors() if isinstance(states, ReplayContext) else [states.state, states.conv_ring]
        pools += sum(tensor.nbytes for tensor in held)
    beside = {name: None if peak is None else peak - weights - pools for name, peak in peaks.items()}
    return {"rows": rows, "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
            "dtype": str(dtype), "weights_bytes": weights, "pools_bytes": pools,
            "logits_bytes": rows * config.vocab_size * 4, "peak_beside_bytes": beside, "seconds": seconds}


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="hybrid-8b")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args(arguments)
    result = measure(PRESETS[options.preset](), options.rows, options.device, torch.bfloat16)
    options.output.write_text(json.dumps({"preset": options.preset, **result}, indent=1) + "\n")
    print(json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main()
