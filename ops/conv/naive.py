"""Reference kernels of the short convolution and of copying and zeroing slots: vectorised torch on any device."""

import torch
from torch import Tensor

from ..rows import takes_packed_rows

SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """View of equal shape and strides whose elements copy bit for bit and can be indexed in any dtype, float8 too."""
    return tensor.view(SAME_WIDTH[tensor.element_size()])


@takes_packed_rows("x")
def conv_replay(
    conv_ring, x, weight, bias, positions, slots, query_lens=None, query_start_loc=None, *, silu, max_query_len=None,
    out,
) -> None:
    rows, tokens, dim = x.shape
    width, ring_len = weight.shape[1], conv_ring.shape[2]
    lens = torch.full_like(slots, tokens) if query_lens is None else query_lens
    lens = torch.where(slots > 0, lens, 0).long()
    real = torch.arange(tokens, device=x.device) < lens[:, None]
    first, at = torch.where(slots > 0, positions, 0).long(), torch.where(slots > 0, slots, 0).long()

    # the inputs go through the ring's dtype first: what later steps read must be what was used now
    rounded = x.to(conv_ring.dtype)
    earlier = first[:, None] + torch.arange(1 - width, 0, device=x.device)
    known = (earlier >= 0) & (slots > 0)[:, None]
    history = torch.where(known[..., None], conv_ring[at[:, None], :, earlier % ring_len].float(), 0.0)
    inputs = torch.cat([history, torch.where(real[..., None], rounded.float(), 0.0)], 1)
    y = (inputs.unfold(1, width, 1) * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    if silu:
        y = y * torch.sigmoid(y)
    out.copy_(torch.where(real[..., None], y, 0.0))

    row, token = real.nonzero(as_tuple=True)
    conv_ring[at[row], :, (first[row] + token) % ring_len] = rounded[row, token]


def listed_rows(active_rows: Tensor) -> Tensor:
    """Batch rows before the first -1."""
    return active_rows[(active_rows < 0).cumsum(0) == 0].long()


def copy_slots(pool, src_slots, dst_slots, layer_group, active_rows) -> None:
    if not isinstance(pool, Tensor):
        for layer, values in enumerate(pool):  # as a stack of one
            copy_slots(values[None], src_slots, dst_slots, layer_group[layer : layer + 1], active_rows)
        return
    listed, group = listed_rows(active_rows), layer_group.long()
    source, target = src_slots[:, listed][group].long(), dst_slots[:, listed][group].long()
    layer, row = ((source > 0) & (target > 0)).nonzero(as_tuple=True)
    values = as_integers(pool)
    # the right-hand side is complete before the first write, so that a slot may be source and destination at once
    values[layer, target[layer, row]] = values[layer, source[layer, row]]


def zero_slots(pool, slots, layer_group) -> None:
    if not isinstance(pool, Tensor):
        for layer, values in enumerate(pool):
            zero_slots(values[None], slots, layer_group[layer : layer + 1])
        return
    found = slots[layer_group.long()].long()
    layer, row = (found > 0).nonzero(as_tuple=True)
    as_integers(pool)[layer, found[layer, row]] = 0
