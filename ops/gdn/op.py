"""Gated delta rule ops: decode from a checkpoint and a ring of corrected updates, the plain update, and snapshots.

The recurrence, for one value head (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024):

    g = -exp(A_log) softplus(a + dt_bias)      beta = sigmoid(b)      k <- k / |k|      q <- scale q / |q|
    u = beta (v - e^g S k)                     S <- e^g S + u k^T     o = S q

The ring holds u, the *corrected* update, and not v: u depends on the state before it, so a ring of v could be replayed
only one token after the other, while S after any prefix of a ring of u is one weighted sum of outer products.

Sizes: S slots, H heads of q and k, HV heads of v (head h reads key head h // (HV / H)), K key dim, V value dim, R ring
rows, B batch rows, T tokens a row, L layers, G cache groups.

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
)
from ..layers import Layers, shape_of
from ..registry import register
from . import naive


def _check_inputs(shapes: TokenShapes, q, k, v, a, b, A_log, dt_bias, slots, query_lens, query_start_loc) -> None:
    shapes.tokens("q", q, "H K")
    shapes.tokens("k", k, "H K")
    shapes.tokens("v", v, "HV V")
    shapes.tokens("a", a, "HV")
    shapes.tokens("b", b, "HV")
    shapes("A_log", A_log, "HV", FLOAT)
    shapes("dt_bias", dt_bias, "HV", FLOAT)
    shapes.rows("q", slots, query_lens, query_start_loc)
    require(shapes.HV % shapes.H == 0, shapes.op, "v", f"of {shapes.HV} heads", f"a multiple of {shapes.H} key heads")


def _replay_values(state, u_ring, k_ring, g_ring, ring_start, ring_committed, q, k, v, a, b, A_log, dt_bias, slots,
                   query_lens=None, state_scale=None, seed=None, query_start_loc=None, *, max_query_len=None,
                   **kwargs) -> None:
    check_row_values("gdn_replay", state, u_ring.shape[2], ring_start, ring_committed, slots, q, query_lens,
                     query_start_loc, max_query_len)


@register(mutates=("state", "u_ring", "k_ring", "g_ring", "state_scale"), cpu=naive.gdn_replay,
          cuda="torch_replay.ops.gdn.kernels", check_values=_replay_values, cursor_dims=1, out=True)
def gdn_replay(
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
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
    state_scale: Optional[Tensor] = None,
    seed: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    *,
    window: int,
    max_query_len: Optional[int] = None,
    scale: float,
    l2norm: bool,
    philox_rounds: int = 0,
) -> Tensor:
    """Decode of T tokens a row from a checkpoint and the ring of updates committed since.

    Args:
        state: [S, HV, V, K] checkpoints (transformers keeps [K, V]: with K = V nothing shows it); float32, bfloat16,
            float16, or float8_e4m3fn / int8 with `state_scale`.
            Mutated, for flushing rows only.
        u_ring: [S, HV, R, V] corrected updates, k_ring: [S, H, R, K] keys as used (normalised if l2norm), g_ring:
            [S, HV, R] float32 log decay per token. Mutated: the row's real tokens are appended, accepted or not. Keys
            and updates are rounded to the ring's dtype before this step uses them.
        ring_start, ring_committed: [S] or [1, S] int32, oldest live ring row and number of live rows. Read only.
        q, k: [B, T, H, K]. v: [B, T, HV, V]. a, b: [B, T, HV], raw decay and raw beta. Any strides.
        A_log, dt_bias: [HV].
        slots: [B], slot of each row; 0 is a padded row. query_lens: [B] real tokens a row in [0, T]; None: T, or of
            packed rows all.
        query_start_loc: [B + 1], tokens are packed: q is [tokens, H, K], and so on. max_query_len: T, a bound on the
            tokens of a packed row; larger ones are an error that only a CPU sees.
        state_scale: [S, HV, V] float32, row scale over K of an 8-bit state. Mutated with `state`.
        seed: one int64, with philox_rounds > 0: flushes round stochastically.
        window: W. A row flushes iff committed + its real tokens > W: its committed rows (not the new ones) are folded
            into `state`. 0 is the small-batch route, which flushes at every step with a token. Rows
            without tokens never flush.
        scale: factor on q, usually K ** -0.5.
        l2norm: divide q and k by sqrt(sum x^2 + 1e-6) over K. False: they are used as they come.
        philox_rounds: 0 rounds to nearest.

    Returns:
        o: like v, contiguous; 0 for padded rows, for tokens from query_lens on and for those that belong to no row.

    Raises:
        ValueError: shapes, dtypes, T > W, R < W + T; on a CPU also slots, lengths and cursors out of range and slots
            named twice.
    """
    shapes = TokenShapes("gdn_replay", query_start_loc, max_query_len)
    shapes("state", state, "S HV V K", FLOAT + EIGHT_BIT)
    shapes("u_ring", u_ring, "S HV R V", FLOAT)
    shapes("k_ring", k_ring, "S H R K", FLOAT)
    shapes("g_ring", g_ring, "S HV R", F32)
    shapes("ring_start", ring_start, "S", I32)
    shapes("ring_committed", ring_committed, "S", I32)
    _check_inputs(shapes, q, k, v, a, b, A_log, dt_bias, slots, query_lens, query_start_loc)
    check_ring(shapes, window, "q")
    check_scale_and_seed(shapes, state, state_scale, "S HV V", seed, philox_rounds)
    return v.new_empty(v.shape)


def _update_values(state, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None,
                   *, max_query_len=None, **kwargs) -> None:
    check_update_values("gdn_update", state, slots, token_slots, q, query_lens, query_start_loc, max_query_len)


@register(mutates=("state",), cpu=naive.gdn_update, cuda="torch_replay.ops.gdn.kernels",
          check_values=_update_values, out=True)
def gdn_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slots: Tensor,
    query_lens: Optional[Tensor] = None,
    token_slots: Optional[Tensor] = None,
    query_start_loc: Optional[Tensor] = None,
    *,
    max_query_len: Optional[int] = None,
    scale: float,
    l2norm: bool,
) -> Tensor:
    """The ordinary recurrence that writes the state at every step: the yardstick for `gdn_replay`.

    Args:
        state: [S, HV, V, K] float32, bfloat16 or float16. Mutated.
        q, k, v, a, b, A_log, dt_bias, slots, query_lens, query_start_loc, max_query_len, scale, l2norm: as in
            `gdn_replay`.
        token_slots: [B, T]. Given, the state after token t of row b goes to slot token_slots[b, t] (0: not kept) and
            `slots` is only read, so that acceptance of drafts picks a slot by index. None: the state after the last
            real token replaces the state of `slots`.

    Returns:
        o: as of `gdn_replay`.

    Raises:
        ValueError: shapes and dtypes; on a CPU also slots out of range, written twice, or both read and written.
    """
    shapes = TokenShapes("gdn_update", query_start_loc, max_query_len)
    shapes("state", state, "S HV V K", FLOAT)
    _check_inputs(shapes, q, k, v, a, b, A_log, dt_bias, slots, query_lens, query_start_loc)
    shapes.tokens("token_slots", token_slots, "", INDEX)
    return v.new_empty(v.shape)


def _materialize_values(state, u_ring, k_ring, g_ring, *plan, **kwargs) -> None:
    check_materialize_values("gdn_materialize", state, shape_of(u_ring)[3], *plan[:6])


@register(mutates=("state", "state_scale"), cpu=naive.gdn_materialize,
          cuda="torch_replay.ops.gdn.kernels", check_values=_materialize_values)
def gdn_materialize(
    state: Layers,
    u_ring: Layers,
    k_ring: Layers,
    g_ring: Layers,
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

    Any number of rows folds exactly, because the ring holds corrected updates: a snapshot may stop inside a draft.

    Args:
        state: [L, S, HV, V, K], dtypes as in `gdn_replay`. Mutated: destination slots.
        u_ring: [L, S, HV, R, V], k_ring: [L, S, H, R, K], g_ring: [L, S, HV, R] float32. Read only.
        src_slots, dst_slots, ring_start, count: [G, B]. count rows from ring_start are folded; 0 copies exactly (the
            scale too), -1 skips. A null slot (0) on either side skips. src == dst works.
        layer_group: [L], group of each layer. active_rows: [B], the batch rows to treat; the first -1 ends the list.
        state_scale: [L, S, HV, V] float32 for 8-bit states. Mutated.
        Each of state, rings and state_scale may also be a list of L tensors [S, ...], see ops/layers.py.
        seed: one int64; layer l draws with seed + l, so that layers round independently.
        philox_rounds: 0 rounds to nearest.

    Raises:
        ValueError: shapes and dtypes; on a CPU also a count, slot or row out of range, a row listed twice, and a
            destination that is another row's source or destination (on a GPU that is the caller's error).
    """
    shapes = Shapes("gdn_materialize")
    shapes("state", state, "L S HV V K", FLOAT + EIGHT_BIT)
    shapes("u_ring", u_ring, "L S HV R V", FLOAT)
    shapes("k_ring", k_ring, "L S H R K", FLOAT)
    shapes("g_ring", g_ring, "L S HV R", F32)
    require(shapes.HV % shapes.H == 0, shapes.op, "u_ring", f"of {shapes.HV} heads",
            f"a multiple of {shapes.H} key heads")
    check_materialize(shapes, src_slots, dst_slots, ring_start, count, layer_group, active_rows)
    check_scale_and_seed(shapes, state, state_scale, "L S HV V", seed, philox_rounds)
