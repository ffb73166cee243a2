"""Chunked scans of the recurrences, in plain differentiable torch, for training and, behind ops, for prefill.

All cut the T tokens into chunks. Inside a chunk everything is a matrix product under a lower-triangular mask; between
chunks only the state travels. Nothing branches on data and every loop count is a shape, so Inductor compiles them.

Decays enter as logarithms that are summed over tokens. The sums are kept in float64, whatever the inputs are: a token
that forgets strongly makes a sum large, and the difference of two large float32 sums would have lost the small decays
that came after it. Only differences, which are never positive where they are used, are rounded and exponentiated.
"""

import torch
import torch.nn.functional as F


def ssd_scan(x, dt, A, B, C, initial_state=None, chunk=64, edges=None):
    """Runs the Mamba-2 recurrence over T tokens and returns `(y, final_state)`, with edges also the states there.

    `S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T` and `y_t = S_t C_t` per head, head h reading B/C group `h // (H/Gr)`
    (Mamba-2, Dao and Gu 2024, sections 3 and 6: the quadratic form inside a chunk, the linear one between chunks).

    x `[B,T,H,P]`, dt `[B,T,H]` (already processed, >= 0), A `[H]` (negative), B and C `[B,T,Gr,N]`, initial_state
    `[B,H,P,N]` or None for zero, chunk a positive int. y `[B,T,H,P]` in the dtype of x, final_state `[B,H,P,N]` in
    float32, or float64 if x is float64; all arithmetic is in that dtype. A token with dt = 0 changes no state (its x
    and B must still be finite). edges `[B,E]` ints in 0..T or None: the third result is then the states after the first
    `edges` tokens of each row, `[B,E,H,P,N]`. Raises ValueError for T = 0, shapes that do not fit together, or
    chunk < 1.
    """
    batch, tokens, heads, _ = x.shape
    groups = B.shape[2]
    _check(chunk >= 1, "chunk", chunk, "a positive integer")
    _check(tokens >= 1, "x", tuple(x.shape), "at least one token")
    _check(heads % groups == 0, "B", tuple(B.shape), f"a group count that divides {heads} heads")
    _check(dt.shape == x.shape[:3], "dt", tuple(dt.shape), tuple(x.shape[:3]))
    _check(B.shape == C.shape and B.shape[:2] == x.shape[:2], "B, C", tuple(B.shape), "both [B,T,Gr,N]")
    out_dtype, work = x.dtype, work_dtype(x)
    x, dt, A, B, C = (t.to(work) for t in (x, dt, A, B, C))

    size = min(chunk, tokens)
    x, dt, B, C = (_to_chunks(t, size) for t in (x, dt, B, C))  # [b, c, l, ...]
    log_decay = (A.double() * dt.double()).transpose(2, 3)  # [b, c, h, l]
    total = log_decay.cumsum(-1)
    within = _decay_matrix(total, work)  # [b, c, h, t, s]
    to_end = (total[..., -1:] - total).to(work).exp()  # [b, c, h, s]
    from_start = total.to(work).exp()  # [b, c, h, t]

    x_dt = (x * dt[..., None]).transpose(2, 3)  # [b, c, h, l, p]
    B, C = (_repeat_heads(t.transpose(2, 3), heads) for t in (B, C))  # [b, c, h, l, n]
    y_within = ((C @ B.transpose(-1, -2)) * within) @ x_dt
    chunk_states = (x_dt * to_end[..., None]).transpose(-1, -2) @ B  # [b, c, h, p, n]

    before, final_state = _carry_states(chunk_states, total[..., -1], initial_state)
    y_before = (C @ before.transpose(-1, -2)) * from_start[..., None]
    y = _from_chunks(y_within + y_before, tokens).to(out_dtype)
    if edges is None:
        return y, final_state
    return y, final_state, _states_at(edges, before, total[..., None], x_dt, B)


def delta_scan(q, k, v, g, beta, initial_state=None, chunk=64, edges=None):
    """Runs the gated delta rule over T tokens and returns `(o, final_state)`, with edges also the states there.

    `u_t = beta_t (v_t - e^{g_t} S_{t-1} k_t)`, `S_t = e^{g_t} S_{t-1} + u_t k_t^T`, `o_t = S_t q_t` per value head,
    value head h reading key head `h // (HV/H)` (Gated DeltaNet, Yang, Kautz and Hatamizadeh 2024). Inside a chunk the
    u solve a unit lower triangular system; the state at the chunk's start enters its right-hand side linearly, so the
    system is solved for all chunks at once and only that linear term is left to the loop over chunks.

    q and k `[B,T,H,K]`, v `[B,T,HV,V]`, g (log decay, <= 0) and beta `[B,T,HV]`, initial_state `[B,HV,V,K]` or None for
    zero, chunk a positive int. Keys should have unit length. o `[B,T,HV,V]` in the dtype of v, final_state
    `[B,HV,V,K]` in float32, or float64 if v is float64; all arithmetic is in that dtype. A token with g = 0 and
    beta = 0 changes no state (its q, k, v must still be finite). edges and errors as in `ssd_scan`.
    """
    tokens, heads = v.shape[1:3]
    _check_delta(q, k, v, g, beta, (), chunk)
    out_dtype, work = v.dtype, work_dtype(v)
    q, k, v, g, beta = (t.to(work) for t in (q, k, v, g, beta))

    size = min(chunk, tokens)
    q, k, v, g, beta = (_to_chunks(t, size).transpose(2, 3) for t in (q, k, v, g, beta))  # [b, c, h, l, ...]
    q, k = _repeat_heads(q, heads), _repeat_heads(k, heads)
    total = g.double().cumsum(-1)
    within = _decay_matrix(total, work)  # [b, c, h, t, s], ones on the diagonal
    to_end = (total[..., -1:] - total).to(work).exp()
    from_start = total.to(work).exp()

    keys_t = k.transpose(-1, -2)
    mixing = (beta[..., None] * (k @ keys_t) * within).tril(-1)
    rhs = torch.cat([v, k * from_start[..., None]], -1) * beta[..., None]
    # unitriangular: the solver takes the diagonal to be one and never reads it
    solved = torch.linalg.solve_triangular(mixing, rhs, upper=False, unitriangular=True)
    u_free, u_per_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    attend = (q @ keys_t) * within
    q_start = q * from_start[..., None]
    keys_end = k * to_end[..., None]
    keep = from_start[..., -1, None, None]  # [b, c, h, 1, 1]

    state = initial_state
    if state is None:
        state = v.new_zeros(v.shape[0], heads, v.shape[-1], k.shape[-1])
    state = state.to(work)
    outputs, before, updates = [], [], []
    for c in range(v.shape[1]):
        state_t = state.transpose(-1, -2)
        u = u_free[:, c] - u_per_state[:, c] @ state_t
        outputs.append(q_start[:, c] @ state_t + attend[:, c] @ u)
        if edges is not None:
            before.append(state)
            updates.append(u)
        state = keep[:, c] * state + u.transpose(-1, -2) @ keys_end[:, c]
    o = _from_chunks(torch.stack(outputs, 1), tokens).to(out_dtype)
    if edges is None:
        return o, state
    return o, state, _states_at(edges, torch.stack(before, 1), total[..., None], torch.stack(updates, 1), k)


def kda_scan(q, k, v, g, beta, initial_state=None, chunk=16, edges=None):
    """The recurrence of the KDA family, as `delta_scan` with a decay for each key channel: g `[B,T,HV,K]`.

    Inside a chunk, u_t = beta_t (v_t - S e^{G_t} k_t - sum_{j<t} u_j (k_j . e^{G_t - G_j} k_t)) with G the running sum
    of g from the chunk's start, a unit lower triangular system. Exponents are differences that are never positive,
    taken per pair of tokens and channel: factors e^{G_t} e^{-G_j} would overflow. That costs chunk x K numbers a token,
    which is why chunks are short here, and one is worked on at a time.
    """
    tokens, heads = v.shape[1:3]
    _check_delta(q, k, v, g, beta, k.shape[-1:], chunk)
    out_dtype, work = v.dtype, work_dtype(v)
    size = min(chunk, tokens)
    q, k, v, g, beta = (_to_chunks(t, size).transpose(2, 3) for t in (q, k, v, g, beta))  # [b, c, h, l, ...]
    q, k, v, beta = (t.to(work) for t in (q, k, v, beta))
    q, k = _repeat_heads(q, heads), _repeat_heads(k, heads)
    total = g.double().cumsum(3)

    state = initial_state
    if state is None:
        state = v.new_zeros(v.shape[0], heads, v.shape[-1], k.shape[-1])
    state = state.to(work)
    outputs, before, updates = [], [], []
    for c in range(v.shape[1]):
        reached = _decay_matrix(total[:, c].transpose(-1, -2), work).movedim(2, -1) * k[:, c].unsqueeze(2)
        from_start, state_t = total[:, c].to(work).exp(), state.transpose(-1, -2)
        mixing = (beta[:, c, ..., None] * torch.einsum("bhtjk,bhtk->bhtj", reached, k[:, c])).tril(-1)
        rhs = beta[:, c, ..., None] * (v[:, c] - (k[:, c] * from_start) @ state_t)
        u = torch.linalg.solve_triangular(mixing, rhs, upper=False, unitriangular=True)
        attend = torch.einsum("bhtjk,bhtk->bhtj", reached, q[:, c])
        outputs.append((q[:, c] * from_start) @ state_t + attend @ u)
        if edges is not None:
            before.append(state)
            updates.append(u)
        state = state * from_start[:, :, -1:] + u.transpose(-1, -2) @ reached[:, :, -1]
    o = _from_chunks(torch.stack(outputs, 1), tokens).to(out_dtype)
    if edges is None:
        return o, state
    return o, state, _states_at(edges, torch.stack(before, 1), total, torch.stack(updates, 1), k)


def ssd_prefill(x, dt, A, B, C, initial_state=None, edges=None, *, out):
    """`ssd_scan` into out, (y, final_state, edge_states); the last is empty without edges."""
    for result, value in zip(out, ssd_scan(x, dt, A, B, C, initial_state, edges=edges)):
        result.copy_(value)


def delta_prefill(q, k, v, g, beta, initial_state=None, edges=None, *, out):
    """`delta_scan`, or `kda_scan`, into out, (o, final_state, edge_states); the last is empty without edges."""
    scan = delta_scan if g.dim() == 3 else kda_scan
    for result, value in zip(out, scan(q, k, v, g, beta, initial_state, edges=edges)):
        result.copy_(value)


def _check(ok, name, got, expected):
    if not ok:
        raise ValueError(f"{name}: got {got}, expected {expected}")


def _check_delta(q, k, v, g, beta, channels, chunk):
    """channels: what a decay has besides a head, none or K of them."""
    tokens, heads = v.shape[1:3]
    _check(chunk >= 1, "chunk", chunk, "a positive integer")
    _check(tokens >= 1, "v", tuple(v.shape), "at least one token")
    _check(heads % k.shape[2] == 0, "k", tuple(k.shape), f"a key head count that divides {heads} value heads")
    _check(q.shape == k.shape and k.shape[:2] == v.shape[:2], "q, k", tuple(q.shape), "both [B,T,H,K]")
    decays = (*v.shape[:3], *channels)
    _check(g.shape == decays and beta.shape == v.shape[:3], "g, beta", tuple(g.shape), decays)


def work_dtype(tensor):
    """The dtype of a scan's arithmetic and of its state, where `tensor` is x or v."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _to_chunks(t, size):
    """`[B,T,...]` -> `[B,chunks,size,...]`, the tail filled with zeros, which both recurrences pass over."""
    missing = -t.shape[1] % size
    if missing:
        t = F.pad(t, (0, 0) * (t.dim() - 2) + (0, missing))
    return t.unflatten(1, (-1, size))


def _from_chunks(t, tokens):
    """`[B,chunks,H,size,D]` -> `[B,tokens,H,D]`."""
    return t.transpose(2, 3).flatten(1, 2)[:, :tokens]


def _repeat_heads(t, heads):
    """`[b, c, groups, ...]` -> `[b, c, heads, ...]`; head h is a copy of group `h // (heads / groups)`."""
    return t if t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], 2)


def _decay_matrix(total, work):
    """exp(total_t - total_s) for s <= t, else 0, from running sums `[..., L]` in float64; `[..., L, L]` in `work`.

    The exponent is masked, not the result: above the diagonal the difference is positive and could overflow, and an
    infinity that is masked afterwards still makes the gradient NaN.
    """
    size = total.shape[-1]
    above = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    difference = (total[..., :, None] - total[..., None, :]).to(work)
    return difference.masked_fill(above, float("-inf")).exp()


def _carry_states(chunk_states, chunk_decay, initial_state):
    """The state before each chunk `[b, c, h, p, n]` and after the last `[b, h, p, n]`.

    chunk_states are what each chunk adds, `[b, c, h, p, n]`; chunk_decay `[b, c, h]` its summed log decay in float64.
    The initial state is one more chunk in front, and all of them are summed by one product with a decay matrix.
    """
    if initial_state is None:
        initial_state = torch.zeros_like(chunk_states[:, 0])
    added = torch.cat([initial_state.to(chunk_states.dtype)[:, None], chunk_states], 1).transpose(1, 2)
    total = F.pad(chunk_decay.transpose(1, 2), (1, 0)).cumsum(-1)  # [b, h, c + 1]
    weights = _decay_matrix(total, chunk_states.dtype)
    after = (weights @ added.flatten(-2)).view_as(added).transpose(1, 2)  # [b, c + 1, h, p, n]
    return after[:, :-1], after[:, -1]


def _states_at(edges, before, total, values, keys):
    """The states after the first `edges` tokens of each row, `[b, e, h, p, n]`; edges `[b, e]`, 0: the initial one.

    The recurrences keep `S_t = exp(total_t) before + sum_{s <= t} exp(total_t - total_s) values_s keys_s^T` within a
    chunk: before `[b, c, h, p, n]` its first state, total `[b, c, h, l, 1 or n]` summed log decays in float64, values
    `[b, c, h, l, p]`, keys `[b, c, h, l, n]`. So a state at any token costs one chunk's product.
    """
    size, work = total.shape[3], values.dtype
    edges = edges.long()
    chunk = (edges - 1).clamp(min=0) // size  # a state at a chunk's end is computed from that chunk
    last = (edges - 1 - chunk * size)[..., None, None, None]  # -1: no token of the chunk
    at = torch.arange(edges.shape[0], device=edges.device)[:, None], chunk
    here = total[at]  # [b, e, h, l, 1 or n]
    end = here.gather(3, last.clamp(min=0).expand(*here.shape[:3], 1, here.shape[4])).masked_fill(last < 0, 0.0)
    beyond = torch.arange(size, device=edges.device)[:, None] > last
    decayed = (end - here).to(work).masked_fill(beyond, float("-inf")).exp() * keys[at]
    return before[at] * end.to(work).exp() + values[at].transpose(-1, -2) @ decayed
