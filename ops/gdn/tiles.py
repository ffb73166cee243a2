"""Triton: tiles of checkpoints and decays, which all kernels of the gated delta rule share.

Key dimensions are tiles [KC, .., KB], channel = chunk * KB + offset, where KB channels fill 128 bytes of the state:
eight threads read a row's chunk, its chunks sit in the registers of one thread, and a sum over K shuffles over eight
threads instead of thirty-two.

A decay is a tile over GATE channels: 1 for the gated delta rule (one number a head), K for Kimi Delta Attention. All
arithmetic broadcasts, so that both families share every line.
"""

import triton
import triton.language as tl

from ..triton_rounding import as_stored, decode_state, encode_state, row_scale
from ..triton_rows import row_strides


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


@triton.jit
def log_decay(a, A_log, bias, lower_bound):
    """-exp(A_log) softplus(a + bias), or the safe gate lower_bound * sigmoid(exp(A_log) (a + bias))."""
    x = a + bias
    rate = tl.exp(A_log)
    if lower_bound is None:
        y = tl.exp(tl.minimum(x, 20.0))
        # log(1 + y) loses y's digits where 1 + y rounds; log(w) y / (w - 1) has them back
        w = 1.0 + y
        exact = w == 1.0
        log1p = tl.where(exact, y, tl.log(w) * (y / tl.where(exact, 1.0, w - 1.0)))
        g = -rate * tl.where(x > 20.0, x, log1p)
    else:
        g = lower_bound / (1.0 + tl.exp(-rate * x))
    return g


@triton.jit
def sum_keys(x):
    """[KC, n, KB] -> [n]."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def normalise(x):
    """Rows of [KC, n, KB] divided by their length."""
    return x * tl.rsqrt(sum_keys(x * x) + 1e-6)[None, :, None]


def strided(x, dims: int, packed: bool = False) -> tuple:
    """A tensor as two kernel arguments, itself and `dims` strides: one that lacks the gate's channels gets stride 0.

    packed: it has packed tokens, see `row_strides`.
    """
    return (None, None) if x is None else (as_stored(x), (*row_strides(x, packed), 0)[:dims])


def tiling_of(state, gate_dim: int, block_v: int = 32, held: int = 1, per_warp: int = 1024) -> dict:
    """Tiles of a program: at most `block_v` rows of the state, `held` rows of keys in registers beside them.

    per_warp: numbers of the larger of the two that a warp holds.
    """
    value_dim, key_dim = state.shape[-2:]
    chunk = max(16, 128 // state.element_size())
    padded = max(16, triton.next_power_of_2(key_dim))
    chunk = min(chunk, padded)
    block_v = min(max(16, triton.next_power_of_2(value_dim)), block_v if padded <= 128 else 16)
    gates = (padded // chunk, chunk) if gate_dim > 1 else (1, 1)
    return dict(KC=padded // chunk, KB=chunk, GC=gates[0], GB=gates[1], BLOCK_V=block_v, V=value_dim, K=key_dim,
                GATE=gate_dim, num_warps=max(1, min(8, max(block_v, held) * padded // per_warp)))


def rows_of(slots, v, query_start_loc, max_query_len, out) -> tuple:
    """Rows, tokens of a row, value heads, and whether rows are packed; the output of packed rows is then 0."""
    packed = query_start_loc is not None
    if packed:
        out.zero_()
    return slots.shape[0], max_query_len if packed else v.shape[1], v.shape[-2], packed


def programs_of(batch: int, heads: int, tiling: dict) -> int:
    return batch * heads * triton.cdiv(tiling["V"], tiling["BLOCK_V"])
