"""Sample inputs of the ring lifecycle ops."""

import torch

from ..samples import Rng, cursors, query_lengths, row_slots, table


def mapping(rng: Rng, rows: int, reqs: int, empty: int = 0, dtype=torch.int32):
    """Distinct requests in an order that is not the identity, `empty` rows without one among them; -1 beyond reqs."""
    order = rng.permutation(reqs)[:rows] + [-1] * (rows - reqs)
    if order == list(range(rows)):
        order = order[::-1] if rows > 1 else [reqs - 1]
    for row in rng.permutation(rows)[:empty]:
        order[row] = -1
    return rng.tensor(order, dtype)


def private_tables(rng: Rng, groups: int, reqs: int, columns: int, slots: int, null: float = 0.2, dtype=torch.int32):
    """[G, reqs, C] tables in which no slot occurs twice within a group; a share `null` of the entries is 0."""
    tables = torch.zeros(groups, reqs * columns, dtype=dtype)
    for group in range(groups):
        chosen = rng.permutation(slots - 1)[: reqs * columns]
        tables[group, : len(chosen)] = torch.tensor(chosen, dtype=dtype) + 1
        tables[group] = tables[group, rng.permutation(reqs * columns)]
    tables[rng.uniform(0, 1, groups, reqs * columns).cpu() < null] = 0
    return tables.view(groups, reqs, columns).to(rng.device)


def by_row(tables, idx_mapping):
    """[G, reqs, C] -> [G, B, C]; empty rows get some request's table, which must not be used."""
    return tables[:, idx_mapping.long().clamp(min=0)].clone()


def gather(rng: Rng, groups=2, rows=5, reqs=8, columns=3, num_reqs=4, empty=1, dtype=torch.int32, zero_dim=False):
    tables = private_tables(rng, groups, reqs, columns, reqs * columns + 1, dtype=dtype)
    idx = mapping(rng, rows, reqs, empty, dtype)
    idx[num_reqs:] = 99  # stale rows of a persistent buffer
    before = rng.integers(1, 9, groups, rows, columns, dtype=dtype)
    return (before, tables, idx, rng.tensor(num_reqs if zero_dim else [num_reqs], dtype)), {}


def ring_cursors(rng: Rng, groups: int, slots: int, window: int, ring_len: int):
    """start and committed [G, S]; the null slot holds numbers of its own, which must stay."""
    pairs = [cursors(rng, slots, window, ring_len) for _ in range(groups)]
    start, committed = (torch.stack(side) for side in zip(*pairs))
    start[:, 0], committed[:, 0] = -5, 77
    return start, committed


def reset(rng: Rng, groups=2, rows=5, reqs=8, columns=4, empty=1, mapped=True, dtype=torch.int32):
    """Columns from -1 to C, sources within the own table: moves, fresh slots, slots that stay, null slots."""
    idx = mapping(rng, rows, reqs, empty, dtype) if mapped else None
    tables = private_tables(rng, groups, reqs, columns, reqs * columns + 1, dtype=dtype)
    start, committed = ring_cursors(rng, groups, reqs * columns + 1, 16, 20)
    src, dst = (rng.integers(-1, columns + 1, reqs, dtype=dtype) for _ in range(2))
    dst[0] = src[0] = 1
    return (start, committed, by_row(tables, idx) if mapped else tables[:, :rows].clone(), src, dst, idx), {}


def reset_chain(rng: Rng, dtype=torch.int32):
    """Row r moves from slot r + 1 to r + 2, in scrambled row order; the last row's slot goes to the first."""
    rows = 6
    start, committed = ring_cursors(rng, 1, rows + 1, 16, 20)
    chain = [[[slot + 1, (slot + 1) % rows + 1] for slot in rng.permutation(rows)]]
    return (start, committed, rng.tensor(chain, dtype), rng.tensor([0] * rows), rng.tensor([1] * rows), None), {}


def commit(rng: Rng, groups=2, rows=6, reqs=9, columns=5, tokens=4, window=16, ring_len=None, block_size=6, empty=1,
           padded=1, mapped=True, uniform=True, post_step=False, materialize=True, prefilling=0.3, live=True, null=0.2,
           dtype=torch.int32, flag=torch.bool, table_slots=None):
    """One step of `rows` rows, q = 0 and q = T among them. Accepted counts reach beyond q on either side."""
    ring_len = ring_len or max(window, tokens) + tokens
    idx = mapping(rng, rows, reqs, empty, dtype) if mapped else None
    slots = table_slots or reqs * columns + 1
    tables = private_tables(rng, groups, reqs, columns, slots, null, dtype)
    start, committed = ring_cursors(rng, groups, slots, window or tokens, ring_len)
    lens = rng.integers(0, tokens + 1, rows, dtype=dtype)
    lens[0], lens[rows // 2] = 0, tokens
    lens[rows - padded :] = 0
    routes = (rng.uniform(0, 1, rows) < prefilling).to(flag)
    accepted = rng.integers(-1, tokens + 2, reqs, dtype=dtype)
    edges = rng.integers(0, columns + 2, reqs, dtype=dtype) * block_size
    computed = (edges - rng.integers(0, tokens + 1, reqs, dtype=dtype)).clamp(min=0)
    if post_step:
        req = torch.arange(rows, device=rng.device) if idx is None else idx.long()
        used = req >= 0
        grown = torch.where(routes != 0, lens, torch.minimum(accepted[req.clamp(min=0)].clamp(min=0), lens))
        computed[req[used]] += grown[used].to(dtype)
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0).to(dtype)])
    live_cols = rng.integers(0, columns, reqs, dtype=dtype) if live else None
    if live and reqs > 3:
        live_cols[2], live_cols[3] = -1, columns
    plans = [rng.integers(-9, -5, groups, rows) for _ in range(4)]
    return (start, committed, *plans, by_row(tables, idx) if mapped else tables[:, :rows].clone(),
            None if uniform else starts, lens if uniform else None, computed, accepted, routes, live_cols, idx), dict(
                block_size=block_size, window=window, ring_len=ring_len, post_step=post_step, materialize=materialize)


def advance(rng: Rng, groups=2, rows=6, tokens=4, window=16, ring_len=None, padded=1, prefilling=0.3, num_reqs=None,
            by_group=True, dtype=torch.int32, flag=torch.bool):
    """Accepted counts beyond q on either side, null slots, q = 0 and q = T; rows from num_reqs on are stale."""
    ring_len = ring_len or max(window, tokens) + tokens
    slots = 2 * rows + 1
    start, committed = ring_cursors(rng, groups, slots, window or tokens, ring_len)
    where = torch.stack([row_slots(rng, rows, slots, padded if rows > 1 else 0, dtype) for _ in range(groups)])
    lens = query_lengths(rng, rows, tokens).to(dtype)
    accepted = rng.integers(-1, tokens + 2, rows, dtype=dtype)
    routes = (rng.uniform(0, 1, rows) < prefilling).to(flag) if prefilling else None
    if num_reqs is not None:
        where[:, num_reqs:], lens[num_reqs:] = 999, -7
    count = None if num_reqs is None else rng.tensor([num_reqs], dtype)
    return (start, committed, where if by_group else where[0], lens, accepted, routes, count), dict(
        window=window, ring_len=ring_len)


def compact(rng: Rng, groups=2, rows=7, num_reqs=5, share=0.4, zero_dim=False, dtype=torch.int32):
    """Plans also in rows behind num_reqs, which are stale."""
    count = rng.integers(0, 17, groups, rows, dtype=dtype)
    count[rng.uniform(0, 1, groups, rows) > share] = -1
    return (count, rng.tensor(num_reqs if zero_dim else [num_reqs], dtype)), {}


SAMPLES = table("gather_block_tables", gather, {
    "typical": dict(),
    "one_row_int64": dict(groups=1, rows=1, reqs=3, num_reqs=1, empty=0, dtype=torch.int64),
    "no_requests": dict(num_reqs=0, zero_dim=True),
    "more_rows_than_requests": dict(rows=9, reqs=4, num_reqs=4, columns=1),
}) + table("ring_reset", reset, {
    "typical": dict(),
    "no_mapping": dict(mapped=False),
    "one_row_int64": dict(groups=1, rows=1, reqs=3, empty=0, dtype=torch.int64),
    "all_empty": dict(rows=3, empty=3),
}) + table("ring_reset", reset_chain, {
    "chain": dict(),
}) + table("ring_commit", commit, {
    "typical": dict(),
    "post_step": dict(post_step=True),
    "ragged_starts": dict(uniform=False, rows=8, reqs=11),
    "no_mapping_int64": dict(mapped=False, dtype=torch.int64, flag=torch.int32),
    "mode_none": dict(materialize=False, live=False, columns=1, null=0.1),
    "decode_only": dict(prefilling=0.0, block_size=4, null=0.0),
    "prefill_only": dict(prefilling=1.0, tokens=16, block_size=3, columns=9, uniform=False, flag=torch.uint8),
    "block_smaller_than_step": dict(tokens=7, window=9, ring_len=17, block_size=2, columns=12),
    "small_batch_route": dict(window=0, ring_len=20),
    "odd_sizes": dict(groups=3, rows=5, tokens=3, window=7, ring_len=13, block_size=5),
    "one_row": dict(groups=1, rows=1, reqs=2, empty=0, padded=0, tokens=1, block_size=1, null=0.0),
    "all_empty": dict(rows=3, empty=3),
}) + table("compact_active", compact, {
    "typical": dict(),
    "one_row": dict(groups=1, rows=1, num_reqs=1, share=1.0, zero_dim=True),
    "no_requests": dict(num_reqs=0),
    "nothing_planned": dict(share=0.0),
    "all_planned_int64": dict(num_reqs=7, share=1.0, dtype=torch.int64),
}) + table("ring_advance", advance, {
    "typical": dict(),
    "decode_only": dict(prefilling=0.0, rows=9),
    "padded_int64": dict(num_reqs=3, dtype=torch.int64, flag=torch.int32),
    "no_requests": dict(num_reqs=0),
    "slots_by_row": dict(groups=1, by_group=False),
    "one_row": dict(groups=1, rows=1, tokens=1),
    "small_batch_route": dict(window=0, ring_len=20, prefilling=0.0),
    "odd_sizes": dict(groups=3, rows=40, tokens=3, window=7, ring_len=13, flag=torch.uint8),
})
