"""`torch-replay bench drift`: what rounding does to a recurrent state over 1,000 flush cycles with mild decay.

The log decay is about -0.003 a token, so that the state remembers some 330 tokens, twenty cycles, and rounding errors
have time to pile up. Each state dtype and ring dtype runs through the replay op with T = W = 16: every step appends 16
tokens and folds the 16 before. The same tokens go through a float64 recurrence; the error is that of the checkpoint,
RMS over RMS, its mean over samples from the second half of the run.

Half of the rows have inputs with bfloat16 values, which is what a model in bfloat16 gives the op: a bfloat16 ring then
stores x and B (Mamba-2) without any loss, while keys after the normalisation and corrected updates (gated delta rule)
are float32 results and lose digits in every case. The other rows have full float32 inputs.

What the recorded run (results/drift.json) says for the default ring dtypes. No error grows without bound: decay, and
the delta rule's own correction, forget it. Mamba-2: bfloat16 rings with bfloat16 activations, since they add nothing to
any state dtype; float16 or float32 rings where activations have more digits. Gated delta rule: float16 rings, which for
the same bytes leave an eighth of a bfloat16 ring's error (3.7e-4 against 3.0e-3 of the state) and vanish behind a
bfloat16, int8 or float8 state; keys have length 1 and updates the size of values, far from float16's limit of 65,504.
float32 rings only where a float32 state has to stay exact (2e-7). With a ring that adds nothing, a 16-bit state has a
third to a quarter of the plain update's error, because it is rounded once in W tokens. Stochastic rounding costs 1.4
times the error of rounding to nearest here: with fresh random inputs nearest has no bias to remove.
"""

import itertools
import sys
import time

import torch
from torch import Tensor
from tqdm import tqdm

from torch_replay.ops.registry import OPS

from . import report

W, ROWS, SAMPLES = 16, 4, 20  # ROWS of each kind of inputs
LOG_DECAY = -0.003
STATES = {"float32": (torch.float32, 0), "bfloat16": (torch.bfloat16, 0), "float16": (torch.float16, 0),
          "float16 stochastic": (torch.float16, 10), "int8": (torch.int8, 0), "float8": (torch.float8_e4m3fn, 0),
          "float8 stochastic": (torch.float8_e4m3fn, 10)}
RINGS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN = ("float32", "bfloat16", "float16")  # what the plain update can store


def _inputs(generator: torch.Generator, *shape: int) -> Tensor:
    """float32 [2 * ROWS, ...]; the first ROWS hold bfloat16 values."""
    values = torch.randn(2 * ROWS, *shape, generator=generator, device=generator.device)
    values[:ROWS] = values[:ROWS].bfloat16().float()
    return values


def _run(name: str, device: torch.device, like: Tensor, *args, **kwargs) -> None:
    """The op's kernel without the op: this loop spends a quarter of its time in checks of the same arguments."""
    OPS[name].kernel(device.type)(*args, **kwargs, out=torch.empty_like(like))


class Mamba2:
    """H = 2, P = 16, N = 16, one group. dt is about 0.03 and A = -0.1."""

    name, state_shape = "mamba2_replay", (2, 16, 16)

    def __init__(self, device):
        self.A = torch.full((2,), LOG_DECAY / 0.03, device=device)
        self.bias = torch.full((2,), -3.5, device=device)  # softplus(-3.5) is about 0.03

    def rings(self, slots, dtype, device):
        new = dict(device=device)
        return (torch.zeros(slots, 2, 2 * W, 16, dtype=dtype, **new), torch.zeros(slots, 1, 2 * W, 16, dtype=dtype,
                **new), torch.zeros(slots, 2, 2 * W, **new))

    def tokens(self, generator) -> tuple[Tensor, ...]:
        return (_inputs(generator, W, 2, 16), _inputs(generator, W, 2) * 0.1, _inputs(generator, W, 1, 16),
                _inputs(generator, W, 1, 16))

    def replay(self, pool, tokens, slots) -> None:
        x, dt, B, C = tokens
        _run("mamba2_replay", x.device, x, pool.state, *pool.rings, pool.start, pool.committed, x, dt, self.A, B, C,
             None, None, self.bias, slots, None, pool.scale, pool.seed, window=W, philox_rounds=pool.rounds)

    def update(self, state, tokens, slots) -> None:
        x, dt, B, C = tokens
        _run("mamba2_update", x.device, x, state, x, dt, self.A, B, C, None, None, self.bias, slots)

    def recur(self, state: Tensor, tokens) -> Tensor:
        """The state after these tokens, in the dtype of `state` [rows, H, P, N]."""
        x, dt, B, _ = (part.to(state.dtype) for part in tokens)
        step = torch.nn.functional.softplus(dt + self.bias.to(state.dtype))
        decay = torch.exp(self.A.to(state.dtype) * step)
        for t in range(W):
            outer = (step[:, t, :, None] * x[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(-2)
            state = decay[:, t, :, None, None] * state + outer
        return state


class GatedDelta:
    """H = HV = 2, K = V = 16. The gate decays by about 0.003, beta lies around 0.5."""

    name, state_shape = "gdn_replay", (2, 16, 16)

    def __init__(self, device):
        self.A_log = torch.full((2,), -LOG_DECAY / 0.03, device=device).log()
        self.bias = torch.full((2,), -3.5, device=device)
        self.options = dict(scale=0.25, l2norm=True)

    def rings(self, slots, dtype, device):
        rows = [torch.zeros(slots, 2, 2 * W, 16, dtype=dtype, device=device) for _ in range(2)]
        return *rows, torch.zeros(slots, 2, 2 * W, device=device)

    def tokens(self, generator) -> tuple[Tensor, ...]:
        q, k, v = (_inputs(generator, W, 2, 16) for _ in range(3))
        return q, k, v, _inputs(generator, W, 2) * 0.1, _inputs(generator, W, 2)

    def replay(self, pool, tokens, slots) -> None:
        _run("gdn_replay", slots.device, tokens[2], pool.state, *pool.rings, pool.start, pool.committed, *tokens,
             self.A_log, self.bias, slots, None, pool.scale, pool.seed, window=W, philox_rounds=pool.rounds,
             **self.options)

    def update(self, state, tokens, slots) -> None:
        _run("gdn_update", slots.device, tokens[2], state, *tokens, self.A_log, self.bias, slots, **self.options)

    def recur(self, state: Tensor, tokens) -> Tensor:
        """The state after these tokens, in the dtype of `state` [rows, HV, V, K]."""
        _, k, v, a, b = (part.to(state.dtype) for part in tokens)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        g = -torch.exp(self.A_log.to(state.dtype)) * torch.nn.functional.softplus(a + self.bias.to(state.dtype))
        decay, beta = torch.exp(g), torch.sigmoid(b)
        for t in range(W):
            state = decay[:, t, :, None, None] * state
            stored = (state * k[:, t].unsqueeze(-2)).sum(-1)
            update = beta[:, t].unsqueeze(-1) * (v[:, t] - stored)
            state = state + update.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        return state


class Pool:
    """State, scale, rings and cursors of one combination of dtypes; slot 0 is null."""

    def __init__(self, family, state: str, ring: torch.dtype, device):
        dtype, self.rounds = STATES[state]
        slots = 2 * ROWS + 1
        self.state = torch.zeros(slots, *family.state_shape, device=device).to(dtype)
        eight = dtype in (torch.int8, torch.float8_e4m3fn)
        self.scale = torch.ones(slots, *family.state_shape[:2], device=device) if eight else None
        self.seed = torch.zeros(1, dtype=torch.int64, device=device) if self.rounds else None
        self.rings = family.rings(slots, ring, device)
        self.start = torch.zeros(slots, dtype=torch.int32, device=device)
        self.committed = torch.zeros_like(self.start)

    def advance(self) -> None:
        """After a step of T = W tokens, all accepted: the committed rows were folded, the new ones are live."""
        self.start = (self.start + self.committed) % (2 * W)
        self.committed = torch.full_like(self.committed, W)
        if self.seed is not None:
            self.seed += 1

    def values(self) -> Tensor:
        decoded = self.state[1:].double()
        return decoded if self.scale is None else decoded * self.scale[1:].double().unsqueeze(-1)


def errors(got: Tensor, want: Tensor) -> list[float]:
    """RMS ratio of the rows with bfloat16 inputs, and of those with float32 inputs."""
    return [((got[rows] - want[rows]).square().mean() / want[rows].square().mean()).sqrt().item()
            for rows in (slice(None, ROWS), slice(ROWS, None))]


def run(options) -> dict:
    """options: the parsed arguments of the command line. Returns what `--json` prints."""
    device, began, rows = torch.device(options.device), time.monotonic(), []
    with torch.no_grad(), tqdm(total=2 * options.cycles, unit="cycle", file=sys.stderr, disable=options.quiet) as bar:
        for kind in (Mamba2, GatedDelta):
            rows += _family(kind(device), options.cycles, device, bar)
    return {"benchmark": "drift", **report.environment(device), "command": options.command, "cycles": options.cycles,
            "window": W, "log_decay": LOG_DECAY, "seconds": time.monotonic() - began, "rows": rows,
            "recommendation": recommend(rows)}


def _family(family, cycles: int, device, bar) -> list[dict]:
    """All dtypes side by side on the same tokens, so that the float64 recurrence runs once."""
    generator = torch.Generator(device).manual_seed(17)
    slots = torch.arange(1, 2 * ROWS + 1, dtype=torch.int32, device=device)
    pools = {pair: Pool(family, pair[0], RINGS[pair[1]], device) for pair in itertools.product(STATES, RINGS)}
    plain = {name: torch.zeros(2 * ROWS + 1, *family.state_shape, dtype=STATES[name][0], device=device)
             for name in PLAIN}
    truth = torch.zeros(2 * ROWS, *family.state_shape, dtype=torch.float64, device=device)
    seen = {key: [] for key in [*pools, *((name, "plain update") for name in PLAIN)]}
    sampled = {cycles - 1 - i * max(1, cycles // (2 * SAMPLES)) for i in range(min(SAMPLES, cycles))}
    for cycle in range(cycles + 1):
        tokens = family.tokens(generator)
        for pool in pools.values():
            family.replay(pool, tokens, slots)
            pool.advance()
        if cycle - 1 in sampled:  # the checkpoints hold what was folded: everything before this step's tokens
            for key, pool in pools.items():
                seen[key].append(errors(pool.values(), truth))
            for name, state in plain.items():
                seen[name, "plain update"].append(errors(state[1:].double(), truth))
        truth = family.recur(truth, tokens)
        for state in plain.values():
            for t in range(W):
                family.update(state, tuple(part[:, t : t + 1] for part in tokens), slots)
        bar.update(cycle > 0)
    return [_row(family.name, *key, samples) for key, samples in seen.items()]


def _row(op: str, state: str, ring: str, samples: list[list[float]]) -> dict:
    rounded, full = (sum(column) / len(column) for column in zip(*samples))
    return {"op": op, "state": state, "ring": ring, "error": rounded, "error_float32_inputs": full,
            "largest": max(max(pair) for pair in samples)}


def recommend(rows: list[dict]) -> dict[str, str]:
    """For each op and state dtype the 16-bit ring with the smaller error; bfloat16, with its range, if they are within
    a tenth of each other. The text says what it costs beside a float32 ring, which moves twice the bytes."""
    found: dict[str, str] = {}
    for op, state in dict.fromkeys((row["op"], row["state"]) for row in rows):
        error = {row["ring"]: row["error"] for row in rows if (row["op"], row["state"]) == (op, state)}
        ring = "bfloat16" if error["bfloat16"] <= 1.1 * error["float16"] else "float16"
        found[f"{op} {state}"] = f"{ring}, {error[ring] / error['float32']:.3g} times the error of a float32 ring"
    return found


def table(result: dict) -> str:
    """One line a state dtype, one column a ring dtype; bfloat16 inputs, then float32 inputs behind a bar."""
    columns = [*RINGS, "plain update"]
    lines = [f"RMS error of the state over its RMS, {result['cycles']} cycles of {W} tokens, log decay {LOG_DECAY}; "
             "inputs with bfloat16 values | float32 values"]
    for op in dict.fromkeys(row["op"] for row in result["rows"]):
        lines += ["", f"{op:<20}" + "".join(f"{'ring ' * (name in RINGS) + name:>22}" for name in columns)]
        for state in STATES:
            cells = {row["ring"]: f"{row['error']:.1e} | {row['error_float32_inputs']:.1e}" for row in result["rows"]
                     if (row["op"], row["state"]) == (op, state)}
            lines.append(f"{state:<20}" + "".join(f"{cells.get(name, '-'):>22}" for name in columns))
    lines += ["", "16-bit ring to choose"]
    return "\n".join(lines + [f"  {name}: {ring}" for name, ring in result["recommendation"].items()])
