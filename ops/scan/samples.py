"""Sample inputs of the chunked scans: decays that forget in a few tokens and some that hardly forget."""

import torch

from ..samples import Rng, table


def ssd(rng: Rng, rows=2, tokens=70, heads=4, groups=2, head_dim=8, state_dim=16, strided=False, with_state=True,
        padded=0, edges=0):
    """The last `padded` tokens of each row have dt = 0; edges: so many a row, both ends among them; strided: x, B and C
    are columns of one convolution's output."""
    inner, narrow = heads * head_dim, groups * state_dim
    if strided:
        x, B, C = rng.normal(rows, tokens, inner + 2 * narrow).split([inner, narrow, narrow], -1)
    else:
        x, B, C = (rng.normal(rows, tokens, size) for size in (inner, narrow, narrow))
    dt = rng.uniform(0.0, 0.3, rows, tokens, heads)
    dt[:, tokens - padded :] = 0
    state = rng.normal(rows, heads, head_dim, state_dim, dtype=torch.float32) if with_state else None
    B, C = (t.unflatten(-1, (groups, state_dim)) for t in (B, C))
    A = -rng.uniform(0.05, 4.0, heads)
    return (x.unflatten(-1, (heads, head_dim)), dt, A, B, C, state, edge_counts(rng, rows, edges, tokens)), {}


def edge_counts(rng: Rng, rows, edges, tokens):
    """[rows, edges] int32 in no order, 0, 64 and all tokens among them; None for no edges."""
    if not edges:
        return None
    counts = rng.integers(0, tokens + 1, rows, edges)
    counts[0, :3] = rng.tensor([tokens, 0, min(64, tokens)])
    return counts


def delta(rng: Rng, rows=2, tokens=70, key_heads=2, heads=4, key_dim=8, value_dim=16, with_state=True, padded=0,
          strided=False, edges=0, by_channel=False):
    """The last `padded` tokens of each row have g = beta = 0; edges as in `ssd`; strided: v is columns of a wider
    tensor; by_channel: g is a decay for each key channel."""
    q, k = (torch.nn.functional.normalize(rng.normal(rows, tokens, key_heads, key_dim), dim=-1) for _ in "qk")
    v = rng.normal(rows, tokens, heads * value_dim + 3 * strided)[..., : heads * value_dim]
    g = -rng.uniform(0.0, 0.3, rows, tokens, heads, *([key_dim] if by_channel else []))
    beta = rng.uniform(0.0, 1.0, rows, tokens, heads)
    for values in (g, beta):
        values[:, tokens - padded :] = 0
    state = rng.normal(rows, heads, value_dim, key_dim, dtype=torch.float32) if with_state else None
    return (q, k, v.unflatten(-1, (heads, value_dim)), g, beta, state, edge_counts(rng, rows, edges, tokens)), {}


SAMPLES = table("ssd_prefill", ssd, {
    "typical": dict(),
    "one_row_no_state": dict(rows=1, tokens=64, with_state=False),
    "one_token": dict(tokens=1, edges=3),
    "odd_sizes_strided_padded": dict(rows=3, tokens=131, heads=3, groups=1, head_dim=5, state_dim=7, strided=True,
                                     padded=9, edges=5),
}) + table("delta_prefill", delta, {
    "typical": dict(),
    "one_row_no_state": dict(rows=1, tokens=64, with_state=False),
    "one_token": dict(tokens=1, edges=3),
    "odd_sizes_strided_padded": dict(rows=3, tokens=131, key_heads=1, heads=3, key_dim=5, value_dim=7, strided=True,
                                     padded=9, edges=5),
    "by_channel": dict(rows=3, tokens=37, key_heads=1, heads=3, key_dim=5, value_dim=7, padded=4, edges=4,
                       by_channel=True),
})
