"""Mamba-2 state-space ops: decode from a checkpoint and a ring of inputs, the plain update, and snapshots.

The recurrence, for one head with scalar A < 0 (Dao and Gu, "Transformers are SSMs", 2024):

    dt <- clamp(softplus(dt + dt_bias), dt_min, dt_max)        a = exp(A dt)
    S  <- a S + dt x B^T                                       y = S C + D x        (times silu(z) if z is given)

Sizes: S slots, H heads, P head dim, N state dim, Gr groups of B and C (head h reads group h // (H / Gr)), R ring rows,
B batch rows, T tokens a row, L layers, G cache groups.

Tokens come as padded rows, [B, T, ...], or packed, [tokens, ...]: then row b owns tokens query_start_loc[b] ..
query_start_loc[b + 1] - 1, and T is `max_query_len`. Below, [B, T, ...] stands for both. Either way `query_lens` says
how many of a row's tokens are real, the first ones.
"""

from typing import Optional

from torch import Tensor

from ..check import (
    EIGHT_BIT,
    F32,
    FLOAT,
    I32,
    INDEX,
    Shapes,
    TokenShapes,
    check_materialize,
    check_materialize_values,
    check_ring,
    check_row_values,
    check_scale_and_seed,
    check_update_values,
    require,
    require_negative_rates,
    require_none,
)
from ..layers import Layers, shape_of
from ..registry import register
from . import naive


def _check_inputs(shapes: TokenShapes, x, dt, A, B, C, D, z, dt_bias, slots, query_lens, query_start_loc) -> None:
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


def _replay_values(state, x_ring, B_ring, dt_ring, ring_start, ring_committed, x, dt, A, B, C, D, z, dt_bias, slots,
                   query_lens=None, state_scale=None, seed=None, query_start_loc=None, *, max_query_len=None,
                   **kwargs) -> None:
    check_row_values("mamba2_replay", state, x_ring.shape[2], ring_start, ring_committed, slots, x, query_lens,
                     query_start_loc, max_query_len)
    require_negative_rates("mamba2_replay", A)


@register(mutates=("state", "x_ring", "B_ring", "dt_ring", "state_scale"), cpu=naive.mamba2_replay,
          cuda="torch_replay.ops.mamba2.kernels", flashinfer="torch_replay.ops.mamba2.flashinfer",
          check_values=_replay_values, cursor_dims=1, out=True)
def mamba2_replay(
    state: Tensor,
    x_ring: Tensor,
    B_ring: Tensor,
    dt_ring: Tensor,
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
    state_scale: Optional[Tensor] = None,
    seed: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    *,
    window: int,
    max_query_len: Optional[int] = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: Optional[float] = None,
    philox_rounds: int = 0,
) -> Tensor:
    """Decode of T tokens a row from a checkpoint and the ring of inputs committed since.

    Args:
        state: [S, H, P, N] checkpoints; float32, bfloat16, float16, or float8_e4m3fn / int8 with `state_scale`.
            Mutated, for flushing rows only.
        x_ring: [S, H, R, P], B_ring: [S, Gr, R, N], dt_ring: [S, H, R] float32 (processed dt). Mutated: the row's q
            tokens are appended, accepted or not.
        ring_start, ring_committed: [S] or [1, S] int32, oldest live ring row and number of live rows. Read only.
        x: [B, T, H, P]. dt: [B, T, H] raw. A: [H] float32, negative. B, C: [B, T, Gr, N]. D, dt_bias: [H] or None.
        z: [B, T, H, P] gate or None. Any strides.
        slots: [B], slot of each row; 0 is a padded row. query_lens: [B] real tokens q a row in [0, T]; None: T, or of
            packed rows all.
        query_start_loc: [B + 1], tokens are packed: x is [tokens, H, P], and so on. max_query_len: T, a bound on the
            tokens of a packed row; larger ones are an error that only a CPU sees.
        state_scale: [S, H, P] float32, row scale over N of an 8-bit state. Mutated with `state`.
        seed: one int64, with philox_rounds > 0: flushes round stochastically.
        window: W. A row flushes iff committed + q > W: its committed rows (not the new ones) are folded into `state`.
            0 is the small-batch route, which flushes at every step with a token. Rows with q = 0 never flush.
        dt_softplus, dt_min, dt_max: dt processing; softplus passes values above 20 through.
        philox_rounds: 0 rounds to nearest.

    Returns:
        y: like x, contiguous; 0 for padded rows, for tokens from q on and for those that belong to no row.

    Raises:
        ValueError: shapes, dtypes, T > W, R < W + T; on a CPU also slots, lengths and cursors out of range, slots
            named twice, and an A that is not negative.
    """
    shapes = TokenShapes("mamba2_replay", query_start_loc, max_query_len)
    shapes("state", state, "S H P N", FLOAT + EIGHT_BIT)
    shapes("x_ring", x_ring, "S H R P", FLOAT)
    shapes("B_ring", B_ring, "S Gr R N", FLOAT)
    shapes("dt_ring", dt_ring, "S H R", F32)
    shapes("ring_start", ring_start, "S", I32)
    shapes("ring_committed", ring_committed, "S", I32)
    _check_inputs(shapes, x, dt, A, B, C, D, z, dt_bias, slots, query_lens, query_start_loc)
    check_ring(shapes, window, "x")
    check_scale_and_seed(shapes, state, state_scale, "S H P", seed, philox_rounds)
    return x.new_empty(x.shape)


def _update_values(state, x, dt, A, B, C, D, z, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None,
                   *, max_query_len=None, **kwargs) -> None:
    check_update_values("mamba2_update", state, slots, token_slots, x, query_lens, query_start_loc, max_query_len)
    require_negative_rates("mamba2_update", A)


@register(mutates=("state",), cpu=naive.mamba2_update, cuda="torch_replay.ops.mamba2.kernels",
          check_values=_update_values, out=True)
def mamba2_update(
    state: Tensor,
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
    token_slots: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    *,
    max_query_len: Optional[int] = None,
    dt_softplus: bool = True,
    dt_min: float = 0.0,
    dt_max: Optional[float] = None,
) -> Tensor:
    """The ordinary recurrence that writes the state at every step: the yardstick for `mamba2_replay`.

    Args:
        state: [S, H, P, N] float32, bfloat16 or float16. Mutated.
        x, dt, A, B, C, D, z, dt_bias, slots, query_lens, query_start_loc, max_query_len, dt_softplus, dt_min, dt_max:
            as in `mamba2_replay`.
        token_slots: [B, T]. Given, the state after token t of row b goes to slot token_slots[b, t] (0: not kept) and
            `slots` is only read, so that acceptance of drafts picks a slot by index. None: the state after the last
            real token replaces the state of `slots`.

    Returns:
        y: as of `mamba2_replay`.

    Raises:
        ValueError: shapes and dtypes; on a CPU also slots out of range, written twice, or both read and written, and an
            A that is not negative.
    """
    shapes = TokenShapes("mamba2_update", query_start_loc, max_query_len)
    shapes("state", state, "S H P N", FLOAT)
    _check_inputs(shapes, x, dt, A, B, C, D, z, dt_bias, slots, query_lens, query_start_loc)
    shapes.tokens("token_slots", token_slots, "", INDEX)
    return x.new_empty(x.shape)


def _materialize_values(state, x_ring, B_ring, dt_ring, A, *plan, **kwargs) -> None:
    check_materialize_values("mamba2_materialize", state, shape_of(x_ring)[3], *plan[:6])
    # rates of zero: those of a layer that has not run yet, whose rows nothing folds
    require_none("mamba2_materialize", "A", A, A > 0, "negative rates (-exp(A_log), not A_log)")


@register(mutates=("state", "state_scale"), cpu=naive.mamba2_materialize, cuda="torch_replay.ops.mamba2.kernels",
          flashinfer="torch_replay.ops.mamba2.flashinfer", check_values=_materialize_values)
def mamba2_materialize(
    state: Layers,
    x_ring: Layers,
    B_ring: Layers,
    dt_ring: Layers,
    A: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    ring_start: Tensor,
    count: Tensor,
    layer_group: Tensor,
    active_rows: Tensor,
    state_scale: Optional[Layers] = None,
    seed: Optional[Tensor] = None,
    *,
    philox_rounds: int = 0,
) -> None:
    """Writes canonical states, of all layers at once: state[dst] = state[src] advanced by ring rows of src.

    Args:
        state: [L, S, H, P, N], dtypes as in `mamba2_replay`. Mutated: destination slots.
        x_ring: [L, S, H, R, P], B_ring: [L, S, Gr, R, N], dt_ring: [L, S, H, R] float32. Read only.
        A: [L, H] float32, negative.
        src_slots, dst_slots, ring_start, count: [G, B]. count rows from ring_start are folded; 0 copies exactly (the
            scale too), -1 skips. A null slot (0) on either side skips. src == dst works.
        layer_group: [L], group of each layer. active_rows: [B], the batch rows to treat; the first -1 ends the list.
        state_scale: [L, S, H, P] float32 for 8-bit states. Mutated.
        Each of state, rings and state_scale may also be a list of L tensors [S, ...], see ops/layers.py.
        seed: one int64; layer l draws with seed + l, so that layers round independently.
        philox_rounds: 0 rounds to nearest.

    Raises:
        ValueError: shapes and dtypes; on a CPU also a positive A, a count, slot or row out of range, a row listed
            twice, and a destination that is another row's source or destination (on a GPU that is the caller's error).
    """
    shapes = Shapes("mamba2_materialize")
    shapes("state", state, "L S H P N", FLOAT + EIGHT_BIT)
    shapes("x_ring", x_ring, "L S H R P", FLOAT)
    shapes("B_ring", B_ring, "L S Gr R N", FLOAT)
    shapes("dt_ring", dt_ring, "L S H R", F32)
    shapes("A", A, "L H", F32)
    check_materialize(shapes, src_slots, dst_slots, ring_start, count, layer_group, active_rows)
    check_scale_and_seed(shapes, state, state_scale, "L S H P", seed, philox_rounds)
