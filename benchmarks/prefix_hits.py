"""Prompt tokens that a hybrid model takes over from the prefix cache, on traces of prompts that begin alike.

    python -m benchmarks.prefix_hits [--output FILE]

The scheduler runs without a model, so counts are exact and the same everywhere. Two traces, each once with snapshots at
the edges that a prompt chunk publishes and once with the edge alone where the same prompt would be sent again:

    siblings   a system prompt and another question each time
    turns      a tree of conversations: a turn continues one of the earlier ones, chosen at random
"""

import argparse
import json
import random
from pathlib import Path
from unittest import mock

from torch_replay.engine.drafter import NoDraft
from torch_replay.engine.prefix_cache import PrefixCache
from torch_replay.engine.request import Request, SamplingParams
from torch_replay.engine.scheduler import Scheduler
from torch_replay.states.groups import KVGroup

BLOCK, OUTPUT = 16, 24
SNAPSHOTS = (8, 32, 128)


def siblings(rng: random.Random) -> list[list[int]]:
    system = draw(rng, 700)
    return [system + draw(rng, rng.randint(20, 200)) for _ in range(60)]


def turns(rng: random.Random) -> list[list[int]]:
    prompts = [draw(rng, 300)]
    for _ in range(59):
        before = rng.choice(prompts)
        prompts.append(before + [7] * OUTPUT + draw(rng, rng.randint(10, 80)))
    return prompts


def draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(10, 30_000) for _ in range(count)]


def resend_edge_alone(cache: PrefixCache, request: Request, start: int, end: int) -> tuple[list[int], list[int]]:
    edge = next(cache.boundaries(request.num_tokens - 1), 0) - cache.replay_window
    return [edge] if start < edge <= end else [], []


def measure(prompts: list[list[int]], snapshots: int) -> dict:
    """Runs the prompts one after the other."""
    scheduler = Scheduler(
        [KVGroup("full", 20_000)], block_size=BLOCK, num_snapshots=snapshots, max_num_seqs=4, max_model_len=8192,
        prefill_budget=512, chunk_size=512, prefill_rows=4, num_spec=0, drafter=NoDraft(), prefix_cache=True)
    for place, prompt in enumerate(prompts):
        scheduler.add(request := Request(str(place), prompt, SamplingParams(max_tokens=OUTPUT)))
        while scheduler.has_work:
            plan = scheduler.schedule()
            for chunk in plan.prefills:
                scheduler.advance(request, chunk.length)
            for _ in plan.decodes:
                scheduler.advance(request, 1)
            if plan.decodes or plan.prefills[-1].last:
                request.output_ids.append(7)
                if len(request.output_ids) == OUTPUT:
                    scheduler.finish(request, "length")
    counts = scheduler.prefix.counts
    return {"hits": counts.hits, "hit_tokens": counts.hit_tokens, "prompt_tokens": sum(map(len, prompts)),
            "evictions": scheduler.prefix.evictions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/prefix_hits.json"))
    options, result = parser.parse_args(), {}
    for name, trace in (("siblings", siblings), ("turns", turns)):
        prompts = trace(random.Random(0))
        for snapshots in SNAPSHOTS:
            now = measure(prompts, snapshots)
            with mock.patch.object(PrefixCache, "_prompt_edges", resend_edge_alone):
                alone = measure(prompts, snapshots)
            result[f"{name}, {snapshots} snapshots"] = {"edges inside": now, "resend edge alone": alone}
            shares = (f"{each['hit_tokens'] / each['prompt_tokens']:.1%}" for each in (now, alone))
            print(f"{name}, {snapshots} snapshots: {' of prompt tokens, resend edge alone '.join(shares)}")
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
