"""The short convolution token by token in float64, and slot copies one at a time."""

import torch
from truth_rows import takes_packed_rows


@takes_packed_rows("x")
def conv_replay(conv_ring, x, weight, bias, positions, slots, query_lens, silu):
    rows, tokens, dim = x.shape
    width, ring_len = weight.shape[1], conv_ring.shape[2]
    y = torch.zeros_like(x)
    for b in range(rows):
        s = int(slots[b])
        if s == 0:
            continue
        q = tokens if query_lens is None else int(query_lens[b])
        for t in range(q):
            position = int(positions[b]) + t
            conv_ring[s, :, position % ring_len] = x[b, t]
            total = torch.zeros(dim, dtype=torch.float64) if bias is None else bias.clone()
            for w in range(width):
                source = position - (width - 1) + w
                if source >= 0:
                    total = total + weight[:, w] * conv_ring[s, :, source % ring_len]
            y[b, t] = total / (1 + torch.exp(-total)) if silu else total
    return y


def copy_slots(pool, src_slots, dst_slots, layer_group, active_rows):
    before = pool.clone()
    for b in active_rows.tolist():
        if b < 0:
            break
        for layer, group in enumerate(layer_group.tolist()):
            src, dst = int(src_slots[group, b]), int(dst_slots[group, b])
            if src != 0 and dst != 0:
                pool[layer, dst] = before[layer, src]


def zero_slots(pool, slots, layer_group):
    for layer, group in enumerate(layer_group.tolist()):
        for slot in slots[group].tolist():
            if slot != 0:
                pool[layer, slot] = 0
