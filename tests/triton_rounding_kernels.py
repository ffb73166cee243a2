"""A kernel that rounds and decodes a tensor, for the test of triton_rounding.py."""

import torch
import triton
import triton.language as tl

from torch_replay.ops.triton_rounding import as_stored, decode_state, encode_state, state_kind


@triton.jit
def _round_tensor_kernel(p_values, p_seed, slot, p_out, p_decoded, count, KIND: tl.constexpr, DTYPE: tl.constexpr,
                         ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(p_values + o, mask=o < count, other=0.0)
    stored = encode_state(values, tl.load(p_seed), o, slot, KIND, DTYPE, ROUNDS)
    tl.store(p_out + o, stored, mask=o < count)
    tl.store(p_decoded + o, decode_state(stored, KIND), mask=o < count)


def round_tensor(values, seed, slot, dtype, rounds):
    out = torch.empty_like(values, dtype=dtype)
    decoded = torch.empty_like(values)
    native = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)
    _round_tensor_kernel[(triton.cdiv(len(values), 512),)](
        values, seed, slot, as_stored(out), decoded, len(values), KIND=state_kind(dtype), DTYPE=native, ROUNDS=rounds,
        BLOCK=512)
    return out, decoded
