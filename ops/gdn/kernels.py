"""Triton kernels of the gated delta rule ops; the Kimi Delta Attention ops launch them too.

Every decay is the exp of a sum over the tokens it spans, never of a difference of longer sums: all exponents are at
most 0, and small decays keep their digits after a huge one. For tiles see tiles.py.
"""

import triton
import triton.language as tl

from ..triton_rows import row_tokens
from .materialize_kernels import gdn_materialize
from .replay_kernels import gdn_replay
from .tiles import (
    channels,
    load_tile,
    log_decay,
    normalise,
    programs_of,
    rows_of,
    split_rows,
    store_tile,
    strided,
    sum_keys,
    tiling_of,
)

__all__ = ["gdn_materialize", "gdn_replay", "gdn_update"]


@triton.jit
def _update_gdn_kernel(
    p_state, s_state, p_q, s_q, p_k, s_k, p_v, s_v, p_a, s_a, p_b, s_b, p_A, s_A, p_bias, s_bias, p_slots, s_slots,
    p_lens, s_lens, p_starts, s_starts, p_kept, s_kept, p_out, s_out, scale, lower_bound,
    HV: tl.constexpr, RATIO: tl.constexpr, V: tl.constexpr, K: tl.constexpr, T: tl.constexpr, GATE: tl.constexpr,
    L2NORM: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr, GC: tl.constexpr, GB: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """One program per (row, value head, V tile), which carries its tile of the state over the row's tokens."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // TILES % HV).to(tl.int64)
    row = (tl.program_id(0) // (TILES * HV)).to(tl.int64)
    tile = tl.program_id(0) % TILES
    o_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    o_t = tl.arange(0, BLOCK_T)
    in_v = o_v < V

    slot = tl.load(p_slots + row * s_slots[0]).to(tl.int64)
    place, count = row_tokens(row, slot, p_starts, s_starts[0] if p_starts is not None else 0, p_lens,
                              s_lens[0] if p_lens is not None else 0, T)
    p_out += place * s_out[0] + head * s_out[2] + o_v * s_out[3]
    if p_starts is None:
        idle = (o_t >= count) & (o_t < T)
        nothing = tl.zeros([BLOCK_T, BLOCK_V], p_out.dtype.element_ty)
        tl.store(p_out[None, :] + (o_t * s_out[1])[:, None], nothing, mask=idle[:, None] & in_v[None, :])
    if count == 0:
        return

    o_k = channels(tl.arange(0, KC), KB)
    o_gate = channels(tl.arange(0, GC), GB)
    in_k = o_k < K
    in_gate = o_gate < GATE
    o_item, o_chunk = split_rows(BLOCK_V, KC)
    o_row = tile * BLOCK_V + o_item
    o_channel = channels(o_chunk, KB)
    inside = (o_row < V)[:, None] & (o_channel < K)
    p_state += head * s_state[1] + (o_row * s_state[2])[:, None] + o_channel * s_state[3]
    b_state = load_tile(p_state + slot * s_state[0], inside, None, in_v, 0, KC, BLOCK_V, KB)
    p_k += place * s_k[0] + head // RATIO * s_k[2] + o_k * s_k[3]
    p_q += place * s_q[0] + head // RATIO * s_q[2] + o_k * s_q[3]
    p_v += place * s_v[0] + head * s_v[2] + o_v * s_v[3]
    p_a += place * s_a[0] + head * s_a[2] + o_gate * s_a[3]
    p_b += place * s_b[0] + head * s_b[2]
    b_bias = tl.load(p_bias + head * s_bias[0] + o_gate * s_bias[1], mask=in_gate, other=0.0).to(tl.float32)
    A_log = tl.load(p_A + head * s_A[0]).to(tl.float32)
    steps = 1 if T == 1 else count
    for t in range(steps):
        b_k = tl.load(p_k + t * s_k[1], mask=in_k, other=0.0).to(tl.float32)[:, None, :]
        b_q = tl.load(p_q + t * s_q[1], mask=in_k, other=0.0).to(tl.float32)[:, None, :]
        b_v = tl.load(p_v + t * s_v[1], mask=in_v, other=0.0).to(tl.float32)
        b_a = tl.load(p_a + t * s_a[1], mask=in_gate, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b + t * s_b[1]).to(tl.float32)))
        if L2NORM:
            b_k = normalise(b_k)
            b_q = normalise(b_q)
        b_state *= tl.exp(log_decay(b_a, A_log, b_bias, lower_bound))[:, None, :]
        b_u = beta * (b_v - sum_keys(b_state * b_k))
        b_state += b_u[None, :, None] * b_k
        b_o = sum_keys(b_state * b_q) * scale
        tl.store(p_out + t * s_out[1], b_o.to(p_out.dtype.element_ty), mask=in_v)
        if p_kept is not None:
            kept = tl.load(p_kept + place * s_kept[0] + t * s_kept[1]).to(tl.int64)
            if kept > 0:
                store_tile(p_state + kept * s_state[0], inside, None, in_v, b_state, None, 0, o_channel, kept, 0, 0)
    if p_kept is None:
        store_tile(p_state + slot * s_state[0], inside, None, in_v, b_state, None, 0, o_channel, slot, 0, 0)


def gdn_update(
    state, q, k, v, a, b, A_log, dt_bias, slots, query_lens=None, token_slots=None, query_start_loc=None, *, scale,
    l2norm, max_query_len=None, lower_bound=None, out,
) -> None:
    batch, tokens, heads, packed = rows_of(slots, v, query_start_loc, max_query_len, out)
    tiling = tiling_of(state, a.shape[-1] if a.dim() > b.dim() else 1)
    _update_gdn_kernel[(programs_of(batch, heads, tiling),)](
        *strided(state, 4), *strided(q, 4, packed), *strided(k, 4, packed), *strided(v, 4, packed),
        *strided(a, 4, packed), *strided(b, 3, packed), *strided(A_log, 1), *strided(dt_bias, 2), *strided(slots, 1),
        *strided(query_lens, 1), *strided(query_start_loc, 1), *strided(token_slots, 2, packed),
        *strided(out, 4, packed), scale, lower_bound, HV=heads, RATIO=heads // k.shape[-2], T=tokens, L2NORM=l2norm,
        BLOCK_T=triton.next_power_of_2(tokens), **tiling)
