"""Triton: tiles of checkpoints, which all gated delta rule kernels share, and the snapshot kernel.

Key dimensions are tiles [KC, .., KB], channel = chunk * KB + offset, where KB channels fill 128 bytes of the state:
eight threads read a row's chunk, its chunks sit in the registers of one thread, and a sum over K shuffles over eight
threads instead of thirty-two.

A decay is a tile over GATE channels: 1 for the gated delta rule (one number a head), K for Kimi Delta Attention. All
arithmetic broadcasts, so that both families share every line.
"""

import functools

import torch
import triton
import triton.language as tl

from ..triton_rounding import as_stored, decode_state, encode_state, row_scale, state_kind


@triton.jit
def split_rows(N: tl.constexpr, KC: tl.constexpr):
    """Item and chunk of each row of a [KC * N, KB] tile, in which tiles [KC, N, KB] are loaded and stored.

    Of a 3-d load Triton 3.6 spreads the chunks over threads, later versions the items; of this one all do the latter.
    """
    o = tl.arange(0, KC * N)
    return o % N, o // N


@triton.jit
def wrap(row, ring_len):
    """Physical ring row of a logical one that is less than a ring's length past the start."""
    return tl.where(row >= ring_len, row - ring_len, row)


@triton.jit
def channels(o_chunk, KB: tl.constexpr):
    return o_chunk[:, None] * KB + tl.arange(0, KB)[None, :]


@triton.jit
def load_tile(p, inside, p_scales, in_v, KIND: tl.constexpr, KC: tl.constexpr, BLOCK_V: tl.constexpr,
              KB: tl.constexpr):
    """The float32 values [KC, BLOCK_V, KB] of a state tile, row scales applied."""
    b_state = tl.reshape(decode_state(tl.load(p, mask=inside, other=0), KIND), [KC, BLOCK_V, KB])
    if KIND > 0:
        b_state *= tl.load(p_scales, mask=in_v, other=1.0)[None, :, None]
    return b_state


@triton.jit
def store_tile(p, inside, p_scales, in_v, b_state, p_seed, layer, element, slot, KIND: tl.constexpr,
               ROUNDS: tl.constexpr):
    """Writes float32 values in the state's dtype, with row scales; the draws are those of rounding.store_state."""
    if KIND > 0:
        b_scale = row_scale(tl.max(tl.max(tl.abs(b_state), axis=0), axis=1), KIND)
        tl.store(p_scales, b_scale, mask=in_v)
        b_state = tl.div_rn(b_state, tl.broadcast_to(b_scale[None, :, None], b_state.shape))
    seed = 0
    if ROUNDS > 0:
        seed = tl.load(p_seed).to(tl.int64) + layer
    stored = encode_state(tl.reshape(b_state, element.shape), seed, element, slot, KIND, p.dtype.element_ty, ROUNDS)
    tl.store(p, stored, mask=inside)


@triton.jit
def add_rows(b_state, p_u, u_stride, p_k, k_stride, p_g, g_stride, start, count, ring_len, in_v, in_k, in_gate):
    """Adds the ring rows u_j (k_j decay_j)^T, newest first, to a tile; also returns their summed log decay.

    The pointers are those of ring row 0.
    """
    b_passed = tl.zeros(in_gate.shape, tl.float32)
    for age in range(count):
        row = wrap(start + count - 1 - age, ring_len)
        b_u = tl.load(p_u + row * u_stride, mask=in_v, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + row * k_stride, mask=in_k, other=0.0).to(tl.float32)
        b_state += b_u[None, :, None] * (b_k * tl.exp(b_passed))[:, None, :]
        b_passed += tl.load(p_g + row * g_stride, mask=in_gate, other=0.0)
    return b_state, b_passed


def strided(x, dims: int) -> tuple:
    """A tensor as two kernel arguments, itself and `dims` strides: one that lacks the gate's channels gets stride 0."""
    return (None, None) if x is None else (as_stored(x), (*x.stride(), 0)[:dims])


def tiling_of(state, gate_dim: int, rows: int = 1, tokens: int = 1) -> dict:
    """Tiles of a program: `rows` of history and `tokens` in registers beside a tile of the state.

    A thread holds 32 numbers of the state, or 16 where gates are vectors and history or tokens many: so nothing spills
    at K = V = 128 with 32 rows of history or 16 tokens.
    """
    value_dim, key_dim = state.shape[-2:]
    chunk = max(16, 128 // state.element_size())
    padded = max(16, triton.next_power_of_2(key_dim))
    chunk = min(chunk, padded)
    block_v = min(max(16, triton.next_power_of_2(value_dim)), 32 if padded <= 128 else 16)
    largest = max(block_v, rows, 2 * tokens) * padded
    if gate_dim > 1 and (rows > 16 or tokens > 4):
        largest *= 2
    gates = (padded // chunk, chunk) if gate_dim > 1 else (1, 1)
    return dict(KC=padded // chunk, KB=chunk, GC=gates[0], GB=gates[1], BLOCK_V=block_v, V=value_dim, K=key_dim,
                GATE=gate_dim, num_warps=max(1, min(8, largest // 1024)))


def programs_of(batch: int, heads: int, tiling: dict) -> int:
    return batch * heads * triton.cdiv(tiling["V"], tiling["BLOCK_V"])


@triton.jit(do_not_specialize=["ring_len", "rows", "layers"])
def _materialize_gdn_kernel(
    p_state, s_state, p_scale, s_scale, p_u, s_u, p_k, s_k, p_g, s_g, p_src, s_src, p_dst, s_dst, p_start, s_start,
    p_count, s_count, p_group, s_group, p_active, s_active, p_seed, ring_len, rows, layers,
    HV: tl.constexpr, RATIO: tl.constexpr, V: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr,
    ROUNDS: tl.constexpr, KC: tl.constexpr, KB: tl.constexpr, GC: tl.constexpr, GB: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):
    """Programs share out (listed row, layer, value head, V tile); a tile is read and written by one program only."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    listed = rows
    for block in range(0, rows, BLOCK_B):  # up to the first -1
        o_b = block + tl.arange(0, BLOCK_B)
        active = tl.load(p_active + o_b * s_active[0], mask=o_b < rows, other=0)
        listed = tl.minimum(listed, tl.min(tl.where(active < 0, o_b, rows), axis=0))

    o_k = channels(tl.arange(0, KC), KB)
    o_gate = channels(tl.arange(0, GC), GB)
    in_k = o_k < K
    in_gate = o_gate < GATE
    o_item, o_chunk = split_rows(BLOCK_V, KC)
    o_channel = channels(o_chunk, KB)
    first = tl.program_id(0)
    turns = tl.cdiv(listed * layers * (HV * TILES) - first, tl.num_programs(0))
    for turn in range(turns):
        item = first + turn * tl.num_programs(0)
        o_v = item % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
        o_row = item % TILES * BLOCK_V + o_item
        in_v = o_v < V
        inside = (o_row < V)[:, None] & (o_channel < K)
        head = (item // TILES % HV).to(tl.int64)
        layer = (item // (TILES * HV) % layers).to(tl.int64)
        row = tl.load(p_active + item // (TILES * HV) // layers * s_active[0]).to(tl.int64)
        group = tl.load(p_group + layer * s_group[0]).to(tl.int64)
        src = tl.load(p_src + group * s_src[0] + row * s_src[1]).to(tl.int64)
        dst = tl.load(p_dst + group * s_dst[0] + row * s_dst[1]).to(tl.int64)
        count = tl.load(p_count + group * s_count[0] + row * s_count[1]).to(tl.int32)
        if (count >= 0) & (src > 0) & (dst > 0):
            p_tiles = p_state + layer * s_state[0] + head * s_state[2]
            p_tiles += (o_row * s_state[3])[:, None] + o_channel * s_state[4]
            p_from = p_scale
            p_to = p_scale
            if KIND > 0:
                p_from += layer * s_scale[0] + head * s_scale[2] + o_v * s_scale[3] + src * s_scale[1]
                p_to += layer * s_scale[0] + head * s_scale[2] + o_v * s_scale[3] + dst * s_scale[1]
            if count == 0:
                tl.store(p_tiles + dst * s_state[1], tl.load(p_tiles + src * s_state[1], mask=inside), mask=inside)
                if KIND > 0:
                    tl.store(p_to, tl.load(p_from, mask=in_v), mask=in_v)
            else:
                start = tl.load(p_start + group * s_start[0] + row * s_start[1]).to(tl.int32)
                b_rows, b_passed = add_rows(
                    tl.zeros([KC, BLOCK_V, KB], tl.float32),
                    p_u + layer * s_u[0] + src * s_u[1] + head * s_u[2] + o_v * s_u[4], s_u[3],
                    p_k + layer * s_k[0] + src * s_k[1] + head // RATIO * s_k[2] + o_k * s_k[4], s_k[3],
                    p_g + layer * s_g[0] + src * s_g[1] + head * s_g[2] + o_gate * s_g[4], s_g[3],
                    start, count, ring_len, in_v, in_k, in_gate)
                b_state = load_tile(p_tiles + src * s_state[1], inside, p_from, in_v, KIND, KC, BLOCK_V, KB)
                b_state = b_state * tl.exp(b_passed)[:, None, :] + b_rows
                element = (head.to(tl.int32) * V + o_row)[:, None] * K + o_channel
                store_tile(p_tiles + dst * s_state[1], inside, p_to, in_v, b_state, p_seed, layer, element, dst, KIND,
                           ROUNDS)


@functools.lru_cache(maxsize=None)
def _resident_programs(device: torch.device) -> int:
    """Programs of a persistent grid; few where the interpreter runs them one after the other."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def gdn_materialize(
    state, u_ring, k_ring, g_ring, src_slots, dst_slots, ring_start, count, layer_group, active_rows,
    state_scale=None, seed=None, *, philox_rounds=0,
) -> None:
    layers, _, heads, ring_len = u_ring.shape[:4]
    rows = active_rows.shape[0]
    tiling = tiling_of(state, g_ring.shape[4] if g_ring.dim() == 5 else 1)
    grid = min(programs_of(rows * layers, heads, tiling), _resident_programs(state.device))
    # without a limit ptxas spills a word to get below 96; the draws need more than 128
    limit = {} if philox_rounds else dict(maxnreg=128)
    _materialize_gdn_kernel[(grid,)](
        *strided(state, 5), *strided(state_scale, 4), *strided(u_ring, 5), *strided(k_ring, 5), *strided(g_ring, 5),
        *strided(src_slots, 2), *strided(dst_slots, 2), *strided(ring_start, 2), *strided(count, 2),
        *strided(layer_group, 1), *strided(active_rows, 1), seed, ring_len, rows, layers, HV=heads,
        RATIO=heads // k_ring.shape[2], KIND=state_kind(state.dtype), ROUNDS=philox_rounds, BLOCK_B=256, **tiling,
        **limit)
