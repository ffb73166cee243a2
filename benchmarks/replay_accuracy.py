"""`torch-replay bench replay-accuracy`: what bounded replay of sliding-window KV costs in held-out loss.

Held-out text is cut into segments. A first request leaves the first H tokens of a segment in the prefix cache; a second
one, H tokens and those that follow, hits at H, and its following tokens are scored. Three runs of it:

    cold           the full-sequence forward, no cache
    window cached  chunks that end at H, window KV still there: what a cache of all keys would give
    replay         a hit with bounded replay: the window before H is computed again, seeing nothing below its start

The losses are paired, token by token, so that their difference has a small error although the losses have a large one.
Two settings in which replay must change nothing are run as well: a model with one window layer and no state-space layer
behind it, and a window as wide as the hit (which is then not taken).
"""

import contextlib
import copy
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import torch_replay.engine.engine as engines
from torch_replay import Engine, EngineConfig, HybridModel, SamplingParams
from torch_replay.models.evaluate import token_losses
from torch_replay.models.hybrid import small_model_dir

from . import report

NEAR = (16, 64, 256)  # following tokens over which losses are averaged
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@contextlib.contextmanager
def recorded_losses(engine: Engine):
    """Yields a dict that gets the loss of every prompt token that the engine's prefills predict, by position."""
    losses, prefill = {}, engines.prefill

    def recording(model, state, rows, following, agreed, before):
        wanted = []
        for index, tokens in rows:
            request, start = engine._placed[index][0], int(state.requests.host.num_computed[index])
            wanted.append(request.prompt_ids[start + 1 : start + 1 + len(tokens)])
            first = start + 1
        samples, logprobs = prefill(model, state, rows, wanted, agreed, before)
        losses.update(enumerate((-value for value in logprobs[-1]), first))
        return samples, [[] for _ in rows]

    engines.prefill = recording
    try:
        yield losses
    finally:
        engines.prefill = prefill


def cached_losses(model: HybridModel, ids: list[int], hit: int, replay: bool) -> tuple[Tensor, int]:
    """Losses [n] of the tokens after `hit` + 1, and how many tokens were replayed."""
    config = EngineConfig(max_num_seqs=1, compiled=False, prefix_cache=replay, prefill_budget=len(ids),
                          chunk_size=len(ids) if replay else hit, max_model_len=len(ids) + 1)
    engine = Engine(model, None, config)
    if replay:
        engine.generate([ids[: hit + 1]], ONE)
    with recorded_losses(engine) as losses:
        engine.generate([ids], ONE)
    replayed = engine.scheduler.prefix.counts.replayed_tokens if replay else 0
    return torch.tensor([losses[position] for position in range(hit + 1, len(ids))]), replayed


def segments(corpus: Path, part: str, count: int, length: int) -> Tensor:
    """[count, length] held-out token ids, spread over the part. ValueError if it is too short."""
    ids = torch.from_numpy(np.load(corpus / f"valid_{part}.npy").astype(np.int64))
    if len(ids) < count * length:
        raise ValueError(f"segments is {count}, expected at most {len(ids) // length} of {length} tokens in {part}")
    return torch.stack([ids[start : start + length] for start in
                        np.linspace(0, len(ids) - length, count).astype(int)])


def compare(model: HybridModel, rows: Tensor, hit: int, bar=None) -> dict:
    """Losses of the three runs over segments [n, hit + following], near and far, and the paired differences."""
    runs = {"cold": token_losses(model, rows, 2)[:, hit:]}
    for name, replay in (("window_cached", False), ("replay", True)):
        found = []
        for ids in rows.tolist():
            found.append(cached_losses(model, ids, hit, replay))
            if bar is not None:
                bar.update()
        runs[name] = torch.stack([losses for losses, _ in found])
    replayed = found[0][1]
    near = {}
    for count in NEAR:
        losses = {name: values[:, :count].double() for name, values in runs.items()}
        difference = (losses["replay"] - losses["cold"]).mean(1)
        near[count] = {**{name: float(values.mean()) for name, values in losses.items()},
                       "replay_minus_cold": float(difference.mean()),
                       "standard_error": float(difference.std() / len(difference) ** 0.5)}
    return {"hit": hit, "segments": len(rows), "replayed_tokens": replayed, "following": near,
            "largest_difference_of_a_loss": {
                f"{name} - {other}": float((runs[name] - runs[other]).abs().max())
                for name, other in (("window_cached", "cold"), ("replay", "cold"), ("replay", "window_cached"))}}


def one_window_model(model: HybridModel) -> HybridModel:
    """The model cut off behind its first window layer (and the MLP after it)."""
    cut = model.config.pattern.index("swa") + 2
    return with_config(model, pattern=model.config.pattern[:cut])


def with_config(model: HybridModel, **changes) -> HybridModel:
    """A model of the same weights, as far as it has such layers."""
    config = copy.copy(model.config)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    other = HybridModel(config)
    other.load_state_dict({name: value for name, value in model.state_dict().items() if name in other.state_dict()})
    return other.eval().requires_grad_(False)


def kept_bytes(model: HybridModel) -> dict:
    """Bytes of KV that a cached prefix keeps per token in float32, and what it would keep with the windows' keys."""
    layer = 2 * model.config.num_kv_heads * model.config.head_dim * 4
    full, windows = model.config.pattern.count("full") * layer, model.config.pattern.count("swa") * layer
    return {"kept": full, "with_window_kv": full + windows, "saved": windows,
            "saved_share": windows / (full + windows)}


def run(arguments) -> dict:
    begin, corpus = time.perf_counter(), Path(arguments.corpus)
    model = HybridModel.from_pretrained(small_model_dir()).requires_grad_(False)
    rows, parts = [], ("code", "text")
    steps = 2 * arguments.segments * (len(parts) * len(arguments.hits) + 2)
    with tqdm(total=steps, disable=arguments.quiet, unit="prompt") as bar:
        for part in parts:
            for hit in arguments.hits:
                ids = segments(corpus, part, arguments.segments, hit + 1 + NEAR[-1])
                rows.append({"part": part, "model": "small", **compare(model, ids, hit, bar)})
        hit = arguments.hits[-1]
        ids = segments(corpus, "text", arguments.segments, hit + 1 + NEAR[-1])
        exact = [{"part": "text", "model": "one window layer, no state behind it",
                  **compare(one_window_model(model), ids, hit, bar)},
                 {"part": "text", "model": "window as wide as the hit",
                  **compare(with_config(model, sliding_window=hit), ids, hit, bar)}]
    return {"benchmark": "replay-accuracy", **report.environment(torch.device("cpu")), "command": arguments.command,
            "attention_window": model.config.sliding_window, "kv_bytes_per_token": kept_bytes(model),
            "seconds": time.perf_counter() - begin, "rows": rows, "exact": exact}


def table(result: dict) -> str:
    kept = result["kv_bytes_per_token"]
    lines = [f"KV bytes a token that a prefix keeps: {kept['kept']:,}, with window KV {kept['with_window_kv']:,} "
             f"({kept['saved_share']:.0%} saved)", "",
             f"{'part':6}{'hit':>6}{'next':>6}{'cold':>9}{'cached':>9}{'replay':>9}{'replay - cold':>20}  model"]
    for row in result["rows"] + result["exact"]:
        for count, near in row["following"].items():
            lines.append(f"{row['part']:6}{row['hit']:6}{count:>6}{near['cold']:9.4f}{near['window_cached']:9.4f}"
                         f"{near['replay']:9.4f}{near['replay_minus_cold']:+12.4f} +-{near['standard_error']:.4f}"
                         f"  {row['model']}")
    lines += ["", *(f"{row['model']}: {row['replayed_tokens']} tokens replayed, largest difference of a loss "
                    f"{row['largest_difference_of_a_loss']['replay - cold']:.1e} from cold, "
                    f"{row['largest_difference_of_a_loss']['replay - window_cached']:.1e} from cached"
                    for row in result["exact"])]
    return "\n".join(lines)
