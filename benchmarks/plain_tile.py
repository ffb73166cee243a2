"""The shortest Triton version of `mamba2_replay`: what a first afternoon gives, a yardstick for the one that ships.

One token, a float32 state, sizes that are powers of two, one warp for 32 rows of the state, and no flush.
"""

import triton
import triton.language as tl

ROWS = 32


@triton.jit
def _replay_tile_kernel(
    p_state, p_x_ring, p_b_ring, p_dt_ring, p_start, p_committed, p_x, p_dt, p_b, p_c, p_a, p_d, p_bias, p_slots, p_y,
    ring_len, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):
    tile = tl.program_id(0) % (P // ROWS)
    head = tl.program_id(0) // (P // ROWS)
    group = head // (H // G)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + row).to(tl.int64)
    o_p = tile * ROWS + tl.arange(0, ROWS)
    o_n = tl.arange(0, N)
    start = tl.load(p_start + slot)
    committed = tl.load(p_committed + slot)
    state = tl.load(p_state + ((slot * H + head) * P + o_p[:, None]) * N + o_n[None, :])
    c = tl.load(p_c + (row * G + group) * N + o_n).to(tl.float32)
    b = tl.load(p_b + (row * G + group) * N + o_n)
    x = tl.load(p_x + (row * H + head) * P + o_p)
    dt = tl.load(p_dt + row * H + head).to(tl.float32) + tl.load(p_bias + head)
    dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(dt)))
    a = tl.load(p_a + head)
    o_w = tl.arange(0, W)
    live = o_w < committed
    at = (start + o_w) % ring_len
    p_x_ring += (slot * H + head) * ring_len * P
    p_b_ring += (slot * G + group) * ring_len * N
    p_dt_ring += (slot * H + head) * ring_len
    old_dt = tl.load(p_dt_ring + at, mask=live, other=0.0)
    old_x = tl.load(p_x_ring + at[:, None] * P + o_p[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    old_b = tl.load(p_b_ring + at[:, None] * N + o_n[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    total = tl.sum(old_dt, 0)
    weight = tl.exp(a * (total - tl.cumsum(old_dt, 0))) * old_dt * tl.sum(old_b * c[None, :], 1)
    y = tl.sum(state * c[None, :], 1) * tl.exp(a * total) + tl.sum(weight[:, None] * old_x, 0)
    y = y * tl.exp(a * dt) + x.to(tl.float32) * (dt * tl.sum(b.to(tl.float32) * c, 0) + tl.load(p_d + head))
    tl.store(p_y + (row * H + head) * P + o_p, y.to(p_y.dtype.element_ty))
    fresh = (start + committed) % ring_len
    tl.store(p_x_ring + fresh * P + o_p, x)
    if tile == 0:
        tl.store(p_dt_ring + fresh, dt)
        if head % (H // G) == 0:
            tl.store(p_b_ring + fresh * N + o_n, b)


def launch(state, rings, start, committed, x, dt, B, C, A, D, bias, slots, y, window: int) -> None:
    """Writes y and the new ring rows; arguments as in `mamba2_replay`."""
    _, heads, dim, state_dim = state.shape
    _replay_tile_kernel[(heads * dim // ROWS, len(x))](
        state, *rings, start, committed, x, dt, B, C, A, D, bias, slots, y, rings[0].shape[2], H=heads, P=dim,
        N=state_dim, G=B.shape[2], W=window, ROWS=ROWS, num_warps=1)
