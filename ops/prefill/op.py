"""Prefill of prompts, or of chunks of them, with exactly the inputs of the decode ops.

A decode op takes raw inputs (dt before bias and softplus, a and b before their nonlinearities, q and k before they are
normalised and scaled); so do these, over any number of tokens. What they leave, the decode ops go on from: the state
after a row's last token is its checkpoint, its cursors are 0, 0 (the ring is empty), and the convolution's ring holds
the newest inputs by position. The chunked scans (`ssd_prefill`, `delta_prefill`), which take processed inputs, do the
work. The recurrences are those of `mamba2_replay`, `gdn_replay`, `kda_replay` and `conv_replay`.

Tokens come padded, [B, T, ...], or packed, [tokens, ...]: then row b owns tokens query_start_loc[b] ..
query_start_loc[b + 1] - 1, at most `max_query_len` of them. Below, [B, T, ...] stands for both. Either way `query_lens`
says how many of a row's tokens are real, the first ones; None: all that it owns.

Sizes: as in the decode ops. S slots (0 is null), B batch rows, T tokens a row.
"""

from typing import Optional

import torch
from torch import Tensor

from .. import check
from ..check import EIGHT_BIT, F32, FLOAT, I32, INDEX, TokenShapes, check_scale_and_seed, fail, require
from ..registry import register
from . import naive

FLAG = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)


class _Checks(TokenShapes):
    """Shapes of a prefill op."""

    def states(self, state, ring_start, ring_committed, letters: str, has_state) -> None:
        self("state", state, f"S {letters}", FLOAT + EIGHT_BIT)
        self("ring_start", ring_start, "S", I32)
        self("ring_committed", ring_committed, "S", I32)
        self("has_state", has_state, "B", FLAG)


def _check_rows(op: str, slot_count: int, tokens: Tensor, slots, query_lens, query_start_loc, max_query_len) -> None:
    """Values of the row arguments, on a CPU."""
    check.require_range(op, "slots", slots, 0, slot_count - 1)
    check.require_distinct_slots(op, "slots", slots)
    check.check_tokens(op, tokens, query_lens, query_start_loc, max_query_len)


def _check_states(op: str, state, ring_committed, slots, has_state, *rows) -> None:
    _check_rows(op, state.shape[0], *rows)
    if has_state is None:
        return
    own = slots[(has_state != 0) & (slots > 0)]
    if (ring_committed[own] != 0).any():
        fail(op, "ring_committed", f"{ring_committed[own].tolist()} of slots {own.tolist()}, whose state is to be "
             "continued", "0: fold the ring into the checkpoint first (mamba2_materialize, ..)")


def _mamba2_values(state, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None,
                   has_state=None, query_start_loc=None, *args, max_query_len=None, **kwargs) -> None:
    _check_states("mamba2_prefill", state, ring_committed, slots, has_state, x, slots, query_lens, query_start_loc,
                  max_query_len)
    check.require_negative_rates("mamba2_prefill", A)


@register(mutates=("state", "ring_start", "ring_committed", "state_scale"), cpu=naive.mamba2_prefill,
          check_values=_mamba2_values, cursor_dims=1, out=True)
def mamba2_prefill(
    state: Tensor,
    ring_start: Tensor,
    ring_committed: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    z: Optional[Tensor],
    dt_bias: Optional[Tensor],
    slots: Tensor,
    query_lens: Optional[Tensor] = None,
    has_state: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    state_scale: Optional[Tensor] = None,
    seed: Optional[Tensor] = None,
    *,
    max_query_len: Optional[int] = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: Optional[float] = None,
    philox_rounds: int = 0,
) -> Tensor:
    """The Mamba-2 recurrence over T tokens a row; `mamba2_replay` goes on from what it leaves.

    Args:
        state: [S, H, P, N] checkpoints, float32, bfloat16, float16, or float8_e4m3fn / int8 with `state_scale`.
            Mutated: of rows with tokens, the state after the last one.
        ring_start, ring_committed: [S] or [1, S] int32 cursors. Mutated: 0, 0 for rows with tokens.
        x: [B, T, H, P]. dt: [B, T, H] raw. A: [H] float32, negative. B, C: [B, T, Gr, N]. D, dt_bias: [H] or None.
        z: [B, T, H, P] gate or None. Any strides.
        slots: [B], slot of each row; 0 is a padded row, which writes nothing.
        query_lens: [B] real tokens a row in [0, T]; None: all that it owns.
        has_state: [B] bool or integer. A row goes on from its slot's checkpoint, whose ring must be empty, or from
            zero, whatever the slot holds. None: all from zero.
        query_start_loc: [B + 1], tokens are packed: x is [tokens, H, P], and so on.
        state_scale: [S, H, P] float32, row scale over N of an 8-bit state. Mutated with `state`.
        seed, philox_rounds: stochastic rounding of the stored state, as in `mamba2_replay`.
        max_query_len: of packed rows, a bound on the tokens of one.
        dt_softplus, dt_min, dt_max: dt processing, as in `mamba2_replay`.

    Returns:
        y: like x; 0 for padded rows and for tokens that belong to no row.

    Raises:
        ValueError: shapes and dtypes; on a CPU also A that is not negative, slots, lengths and cursors out of range,
            slots named twice, and a row that goes on from a slot whose ring is not empty.
    """
    shapes = _Checks("mamba2_prefill", query_start_loc, max_query_len)
    shapes.states(state, ring_start, ring_committed, "H P N", has_state)
    shapes.tokens("x", x, "H P")
    shapes.tokens("dt", dt, "H")
    shapes("A", A, "H", F32)
    shapes.tokens("B", B, "Gr N")
    shapes.tokens("C", C, "Gr N")
    shapes("D", D, "H", FLOAT)
    shapes.tokens("z", z, "H P")
    shapes("dt_bias", dt_bias, "H", FLOAT)
    shapes.rows("x", slots, query_lens, query_start_loc)
    require(shapes.H % shapes.Gr == 0, shapes.op, "B", f"of {shapes.Gr} groups", f"a divisor of {shapes.H} heads")
    check_scale_and_seed(shapes, state, state_scale, "S H P", seed, philox_rounds)
    return x.new_empty(x.shape)


def _check_delta(shapes: _Checks, state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens,
                 has_state, query_start_loc, state_scale, seed, philox_rounds, decay: str) -> None:
    """decay: letters of one token's decay, "HV" or "HV K"."""
    shapes.states(state, ring_start, ring_committed, "HV V K", has_state)
    shapes.tokens("q", q, "H K")
    shapes.tokens("k", k, "H K")
    shapes.tokens("v", v, "HV V")
    shapes.tokens("a", a, decay)
    shapes.tokens("b", b, "HV")
    shapes("A_log", A_log, "HV", FLOAT)
    shapes("dt_bias", dt_bias, decay, FLOAT)
    shapes.rows("v", slots, query_lens, query_start_loc)
    require(shapes.HV % shapes.H == 0, shapes.op, "v", f"of {shapes.HV} heads", f"a multiple of {shapes.H} key heads")
    check_scale_and_seed(shapes, state, state_scale, "S HV V", seed, philox_rounds)


def _gdn_values(state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
                has_state=None, query_start_loc=None, *args, max_query_len=None, **kwargs) -> None:
    _check_states("gdn_prefill", state, ring_committed, slots, has_state, v, slots, query_lens, query_start_loc,
                  max_query_len)


@register(mutates=("state", "ring_start", "ring_committed", "state_scale"), cpu=naive.gdn_prefill,
          check_values=_gdn_values, cursor_dims=1, out=True)
def gdn_prefill(
    state: Tensor,
    ring_start: Tensor,
    ring_committed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    query_lens: Optional[Tensor] = None,
    has_state: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    state_scale: Optional[Tensor] = None,
    seed: Optional[Tensor] = None,
    *,
    max_query_len: Optional[int] = None,
    scale: float,
    l2norm: bool,
    philox_rounds: int = 0,
) -> Tensor:
    """The gated delta rule over T tokens a row; `gdn_replay` goes on from what it leaves.

    Args:
        state: [S, HV, V, K] checkpoints (values first; other libraries keep [K, V]), dtypes as in `gdn_replay`.
            Mutated: of rows with tokens, the state after the last one.
        q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV], raw decay and raw beta. A_log, dt_bias: [HV].
        scale, l2norm: as in `gdn_replay`. state_scale: [S, HV, V] float32 for 8-bit states. Mutated.
        ring_start, ring_committed, slots, query_lens, has_state, query_start_loc, seed, max_query_len, philox_rounds:
            as in `mamba2_prefill`.

    Returns:
        o: like v; 0 for padded rows and for tokens that belong to no row.

    Raises:
        ValueError: as `mamba2_prefill`.
    """
    shapes = _Checks("gdn_prefill", query_start_loc, max_query_len)
    _check_delta(shapes, state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens, has_state,
                 query_start_loc, state_scale, seed, philox_rounds, "HV")
    return v.new_empty(v.shape)


def _kda_values(state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None,
                has_state=None, query_start_loc=None, *args, max_query_len=None, **kwargs) -> None:
    _check_states("kda_prefill", state, ring_committed, slots, has_state, v, slots, query_lens, query_start_loc,
                  max_query_len)


@register(mutates=("state", "ring_start", "ring_committed", "state_scale"), cpu=naive.kda_prefill,
          check_values=_kda_values, cursor_dims=1, out=True)
def kda_prefill(
    state: Tensor,
    ring_start: Tensor,
    ring_committed: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    query_lens: Optional[Tensor] = None,
    has_state: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    state_scale: Optional[Tensor] = None,
    seed: Optional[Tensor] = None,
    *,
    max_query_len: Optional[int] = None,
    scale: float,
    l2norm: bool,
    lower_bound: Optional[float] = None,
    philox_rounds: int = 0,
) -> Tensor:
    """Kimi Delta Attention over T tokens a row; `kda_replay` goes on from what it leaves.

    Args:
        a: [B, T, HV, K] raw decay. dt_bias: [HV, K]. lower_bound: as in `kda_replay`.
        The others as in `gdn_prefill`.

    Returns:
        o: like v; 0 for padded rows and for tokens that belong to no row.

    Raises:
        ValueError: as `mamba2_prefill`; lower_bound not below 0.
    """
    shapes = _Checks("kda_prefill", query_start_loc, max_query_len)
    _check_delta(shapes, state, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots, query_lens, has_state,
                 query_start_loc, state_scale, seed, philox_rounds, "HV K")
    require(lower_bound is None or -float("inf") < lower_bound < 0, shapes.op, "lower_bound", lower_bound,
            "None or a finite number below 0")
    return v.new_empty(v.shape)


def _conv_values(conv_ring, x, weight, bias, positions, slots, query_lens=None, query_start_loc=None, *,
                 max_query_len=None, silu) -> None:
    _check_rows("conv_prefill", conv_ring.shape[0], x, slots, query_lens, query_start_loc, max_query_len)
    check.require_range("conv_prefill", "positions", positions[slots > 0], 0, 2**62)


@register(mutates=("conv_ring",), cpu=naive.conv_prefill, check_values=_conv_values, out=True)
def conv_prefill(
    conv_ring: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    positions: Tensor,
    slots: Tensor,
    query_lens: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    *,
    max_query_len: Optional[int] = None,
    silu: bool,
) -> Tensor:
    """The short convolution over T tokens a row, as `conv_replay` computes it, which goes on from what it leaves.

    Args:
        conv_ring: [S, D, Rc] raw inputs, Rc >= width - 1, and as many more as a decode step has tokens. Mutated: the
            row's newest inputs, as many as the ring has columns.
        x: [B, T, D], or packed [tokens, D]; T may exceed the ring.
        positions: [B] position of the row's first token: 0 for a new sequence, whose history is zero.
        weight, bias, slots, query_lens, silu: as in `conv_replay`. query_start_loc, max_query_len: as in
            `mamba2_prefill`.

    Returns:
        y: like x; 0 for padded rows and for tokens that belong to no row.

    Raises:
        ValueError: shapes, dtypes, a ring too short; on a CPU also slots, positions and lengths out of range and slots
            named twice.
    """
    shapes = _Checks("conv_prefill", query_start_loc, max_query_len)
    shapes("conv_ring", conv_ring, "S D Rc", FLOAT)
    shapes.tokens("x", x, "D")
    shapes("weight", weight, "D width", FLOAT)
    shapes("bias", bias, "D", FLOAT)
    shapes("positions", positions, "B", INDEX)
    shapes.rows("x", slots, query_lens, query_start_loc)
    require(shapes.width >= 1, shapes.op, "weight", f"of width {shapes.width}", "1 or more")
    require(shapes.Rc >= max(1, shapes.width - 1), shapes.op, "conv_ring", f"of {shapes.Rc} columns",
            f"at least width - 1 = {shapes.width - 1}")
    return x.new_empty(x.shape)
