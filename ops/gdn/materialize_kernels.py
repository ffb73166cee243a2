"""Triton kernel of the gated delta rule's snapshots, of all layers in one launch."""

import functools

import torch
import triton
import triton.language as tl

from ..layers import dtype_of, shape_of, tensors_of
from ..triton_layers import layer_pointer, pool_arguments
from ..triton_rounding import state_kind
from .tiles import add_rows, channels, load_tile, programs_of, split_rows, store_tile, strided, tiling_of


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
            p_tiles = layer_pointer(p_state, layer, s_state[0]) + head * s_state[2]
            p_tiles += (o_row * s_state[3])[:, None] + o_channel * s_state[4]
            p_from = None
            p_to = None
            if KIND > 0:
                p_scales = layer_pointer(p_scale, layer, s_scale[0]) + head * s_scale[2] + o_v * s_scale[3]
                p_from = p_scales + src * s_scale[1]
                p_to = p_scales + dst * s_scale[1]
            if count == 0:
                tl.store(p_tiles + dst * s_state[1], tl.load(p_tiles + src * s_state[1], mask=inside), mask=inside)
                if KIND > 0:
                    tl.store(p_to, tl.load(p_from, mask=in_v), mask=in_v)
            else:
                start = tl.load(p_start + group * s_start[0] + row * s_start[1]).to(tl.int32)
                b_rows, b_passed = add_rows(
                    tl.zeros([KC, BLOCK_V, KB], tl.float32),
                    layer_pointer(p_u, layer, s_u[0]) + src * s_u[1] + head * s_u[2] + o_v * s_u[4], s_u[3],
                    layer_pointer(p_k, layer, s_k[0]) + src * s_k[1] + head // RATIO * s_k[2] + o_k * s_k[4], s_k[3],
                    layer_pointer(p_g, layer, s_g[0]) + src * s_g[1] + head * s_g[2] + o_gate * s_g[4], s_g[3],
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
    layers, _, heads, ring_len = shape_of(u_ring)[:4]
    rows, gate_dims = active_rows.shape[0], shape_of(g_ring)[4:]
    tiling = tiling_of(tensors_of(state)[0], gate_dims[0] if gate_dims else 1)
    grid = min(programs_of(rows * layers, heads, tiling), _resident_programs(active_rows.device))
    # without a limit ptxas spills a word to get below 96; the draws need more than 128, lists of decays by channel 147
    limit = {} if philox_rounds else dict(maxnreg=168 if isinstance(state, (list, tuple)) else 128)
    _materialize_gdn_kernel[(grid,)](
        *pool_arguments(state, 5), *pool_arguments(state_scale, 4), *pool_arguments(u_ring, 5),
        *pool_arguments(k_ring, 5), *pool_arguments(g_ring, 5),
        *strided(src_slots, 2), *strided(dst_slots, 2), *strided(ring_start, 2), *strided(count, 2),
        *strided(layer_group, 1), *strided(active_rows, 1), seed, ring_len, rows, layers, HV=heads,
        RATIO=heads // shape_of(k_ring)[2], KIND=state_kind(dtype_of(state)), ROUNDS=philox_rounds, BLOCK_B=256,
        **tiling, **limit)
