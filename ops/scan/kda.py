"""Kimi Delta Attention over many tokens: the delta rule whose decay is a vector over K, chunk by chunk."""

import torch
from torch import Tensor


def kda_scan(q, k, v, g, beta, initial_state=None, chunk=16) -> tuple[Tensor, Tensor]:
    """Runs the recurrence of the KDA family over T tokens and returns `(o, final_state)`.

    Inside a chunk, u_t = beta_t (v_t - S e^{G_t} k_t - sum_{j<t} u_j (k_j . e^{G_t - G_j} k_t)) with G the running sum
    of g from the chunk's start, a unit lower triangular system. Exponents are differences that are never positive,
    taken per pair of tokens and channel: factors e^{G_t} e^{-G_j} would overflow. That costs chunk x K numbers a token,
    which is why chunks are short here.

    q (scaled) and k `[B,T,H,K]`, v `[B,T,HV,V]`, g `[B,T,HV,K]` (log decay, <= 0), beta `[B,T,HV]`, initial_state
    `[B,HV,V,K]` or None for zero; value head h reads key head `h // (HV/H)`. All float32, or all float64; g is summed
    in float64. o `[B,T,HV,V]`, final_state `[B,HV,V,K]`. A token with g = 0 and beta = 0 changes no state (its q, k, v
    must still be finite).
    """
    ratio = v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(ratio, 2).transpose(1, 2) for t in (q, k))  # [b, h, t, k]
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2).double(), beta.transpose(1, 2).unsqueeze(-1)
    state = initial_state
    if state is None:
        state = v.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1])
    outputs = []
    for q_c, k_c, v_c, g_c, beta_c in zip(*(t.split(chunk, 2) for t in (q, k, v, g, beta))):
        size = k_c.shape[2]
        total = g_c.cumsum(2)
        above = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
        difference = (total.unsqueeze(3) - total.unsqueeze(2)).to(v.dtype)  # [b, h, t, j, k]
        reached = difference.masked_fill(above[..., None], float("-inf")).exp() * k_c.unsqueeze(2)
        from_start = total.to(v.dtype).exp()
        state_t = state.transpose(-1, -2)
        mixing = (beta_c * torch.einsum("bhtjk,bhtk->bhtj", reached, k_c)).tril(-1)
        rhs = beta_c * (v_c - (k_c * from_start) @ state_t)
        # unitriangular: the solver takes the diagonal to be one and never reads it
        u = torch.linalg.solve_triangular(mixing, rhs, upper=False, unitriangular=True)
        attend = torch.einsum("bhtjk,bhtk->bhtj", reached, q_c)
        outputs.append((q_c * from_start) @ state_t + attend @ u)
        state = state * from_start[:, :, -1:] + u.transpose(-1, -2) @ reached[:, :, -1]
    return torch.cat(outputs, 2).transpose(1, 2), state
