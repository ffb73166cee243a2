"""One slot's logical state as a dict of tensors: for offload, preemption and prefill/decode disaggregation.

What is exported does not depend on where it lived: not on the slot, the ring row it started at, the ring's length, the
numbering of cache groups or the length of the convolution ring. Plain functions, not ops: they read cursors on the
host.
"""

from typing import Optional, Protocol, Sequence, Union

import torch
from torch import Tensor

FORMAT = 1
Pool = Union[Tensor, Sequence[Tensor]]  # of all layers, or a tensor for each
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RingPool(Protocol):
    """What `ring_export` and `ring_import` need of a pool: the state of all layers of equal geometry.

    L layers, S slots, G cache groups, R ring rows, Rc columns of the convolution ring, D channels. A pool may also have
    an attribute `window` (W), which bounds the live rows it accepts; without one R - 1 rows do.
    """

    family: str  # name of the recurrence: "mamba2", "gdn"
    state: Pool  # [L, S, ...]
    state_scale: Optional[Pool]  # [L, S, ...], row scales of an 8-bit state
    rings: dict[str, Pool]  # name -> [L, S, heads, R, ...]
    conv_ring: Optional[Pool]  # [L, S, D, Rc]: the input at position p is in column p % Rc
    ring_start: Tensor  # [G, S] int32
    ring_committed: Tensor  # [G, S] int32
    layer_group: Tensor  # [L]


def ring_export(
    pool: RingPool,
    slot: Union[int, Sequence[int]],
    *,
    position: Optional[int] = None,
    conv_history: Optional[int] = None,
) -> dict[str, Tensor]:
    """The logical state of one slot, bit for bit. Nothing is written.

    Args:
        pool: see `RingPool`.
        slot: the slot, or one slot per cache group.
        position: tokens computed so far, which is the position of the next token. Required with a conv ring.
        conv_history: inputs of the convolution to keep, width - 1. Required with a conv ring.

    Returns:
        Fresh tensors. On the CPU: "format": int64 [1]; "family": uint8, its name in ASCII; "committed": int64 [L], live
        ring rows of each layer. On the pool's device: "state": [L, ...]; "state_scale": [L, ...] if the pool has one;
        "ring.NAME": [L, heads, n, ...], the live rows, oldest first, n the largest of `committed`, zero where a layer
        has fewer. With a conv ring, "conv": [L, D, min(position, conv_history)], the newest inputs, newest last, and
        "position": int64 [1] on the CPU.

    Raises:
        ValueError: null slot; slot, cursors, position or history out of range.
    """
    slots = _layer_slots("ring_export", pool, slot)
    groups = pool.layer_group.tolist()
    start = [int(pool.ring_start[group, at]) for group, at in zip(groups, slots)]
    committed = [int(pool.ring_committed[group, at]) for group, at in zip(groups, slots)]
    for layer, (first, count) in enumerate(zip(start, committed)):
        for name, ring in pool.rings.items():
            rows = ring[0].shape[2]
            if not (0 <= first < rows and 0 <= count <= rows):
                raise ValueError(f"ring_export: cursors of layer {layer} are start {first}, committed {count}, expected"
                                 f" to lie in the {rows} rows of {name}")
    exported = {
        "format": torch.tensor([FORMAT], dtype=torch.int64),
        "family": torch.tensor(list(pool.family.encode()), dtype=torch.uint8),
        "committed": torch.tensor(committed, dtype=torch.int64),
        "state": _take(pool.state, slots),
    }
    if pool.state_scale is not None:
        exported["state_scale"] = _take(pool.state_scale, slots)
    logical = torch.arange(max(committed), device=pool.state[0].device)
    for name, ring in pool.rings.items():
        live = []
        for layer, (at, first, count) in enumerate(zip(slots, start, committed)):
            rows = _integers(ring[layer][at])[:, (first + logical) % ring[0].shape[2]]
            rows[:, count:] = 0
            live.append(rows)
        exported[f"ring.{name}"] = torch.stack(live).view(ring[0].dtype)
    if pool.conv_ring is not None:
        columns = _conv_columns("ring_export", pool.conv_ring, position, conv_history)
        inputs = [_integers(pool.conv_ring[layer][at])[:, columns] for layer, at in enumerate(slots)]
        exported["conv"] = torch.stack(inputs).view(pool.conv_ring[0].dtype)
        exported["position"] = torch.tensor([position], dtype=torch.int64)
    return exported


def ring_import(
    pool: RingPool,
    slot: Union[int, Sequence[int]],
    exported: dict[str, Tensor],
    *,
    conv_history: Optional[int] = None,
) -> None:
    """Makes the logical state of a slot the exported one, bit for bit: live rows from ring row 0 on.

    Args:
        pool: see `RingPool`. Mutated: of this slot the checkpoint and scale, the live rows of every ring, the columns
            of the convolution's history, and the cursors. Ring length, window and grouping may be other than the
            source's.
        slot: the slot, or one slot per cache group.
        exported: what `ring_export` returned, on any device.
        conv_history: inputs that the convolution here needs, width - 1; None: however many came.

    Raises:
        ValueError: null slot or slot out of range; another format or family; shapes or dtypes that do not fit; more
            live rows or history than the pool can hold, or less history than it needs; layers of one group with
            different numbers of live rows. Nothing has been written then.
    """
    slots = _layer_slots("ring_import", pool, slot)
    committed = _check_import(pool, exported, conv_history)
    for layer, (group, at, count) in enumerate(zip(pool.layer_group.tolist(), slots, committed)):
        _put(pool.state[layer][at], exported["state"][layer])
        if pool.state_scale is not None:
            _put(pool.state_scale[layer][at], exported["state_scale"][layer])
        for name, ring in pool.rings.items():
            _put(ring[layer][at, :, :count], exported[f"ring.{name}"][layer, :, :count])
        if pool.conv_ring is not None:
            inputs = exported["conv"][layer]
            columns = _conv_columns("ring_import", pool.conv_ring, int(exported["position"]), inputs.shape[-1])
            target = _integers(pool.conv_ring[layer][at])
            target[:, columns] = _integers(inputs).to(target.device)
        pool.ring_start[group, at] = 0
        pool.ring_committed[group, at] = count


def _check_import(pool: RingPool, exported: dict[str, Tensor], conv_history: Optional[int]) -> list[int]:
    """Live rows of every layer, after everything has been checked."""

    def require(condition: bool, name: str, got, expected) -> None:
        if not condition:
            raise ValueError(f"ring_import: {name} is {got}, expected {expected}")

    tensors = {"state": pool.state, "state_scale": pool.state_scale, "conv": pool.conv_ring}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    tensors.update({f"ring.{name}": ring for name, ring in pool.rings.items()})
    names = {"format", "family", "committed", *tensors} | ({"position"} if "conv" in tensors else set())
    require("format" in exported and exported["format"].tolist() == [FORMAT], "format",
            exported["format"].tolist() if "format" in exported else "missing", [FORMAT])
    came = bytes(exported["family"].tolist()).decode(errors="replace") if "family" in exported else "missing"
    require(came == pool.family, "family", came, pool.family)
    require(set(exported) == names, "the set of names", sorted(exported), sorted(names))

    layers = len(pool.state)
    require(exported["committed"].shape == (layers,), "committed", f"of shape {tuple(exported['committed'].shape)}",
            f"[{layers}], one number a layer")
    committed = exported["committed"].tolist()
    room = min(ring[0].shape[2] for ring in pool.rings.values()) - 1
    window = getattr(pool, "window", None)
    room = room if window is None else min(room, window)
    require(all(0 <= count <= room for count in committed), "committed", committed,
            f"0 to {room} live rows, which is what the ring of the pool holds")
    by_group: dict[int, int] = {}
    for group, count in zip(pool.layer_group.tolist(), committed):
        first = by_group.setdefault(group, count)
        require(count == first, "committed", committed, f"equal in all layers of group {group}")

    for name, tensor in tensors.items():
        got, want = list(exported[name].shape), [layers, *tensor[0].shape[1:]]
        if name.startswith("ring."):
            want[2] = max(committed)
        if name == "conv":
            position = exported["position"].tolist()
            require(len(position) == 1 and position[0] >= 0, "position", position, "one number, 0 or more")
            inputs = got[-1] if got else 0
            least, most = min(position[0], conv_history or 0), min(position[0], tensor[0].shape[2])
            require(least <= inputs <= most, name, f"of {inputs} inputs", f"{least} to {most}")
            want[2] = inputs
        require(got == want, name, f"of shape {got}", f"of shape {want}")
        require(exported[name].dtype == tensor[0].dtype, name, f"of dtype {exported[name].dtype}", tensor[0].dtype)
    return committed


def _layer_slots(function: str, pool: RingPool, slot: Union[int, Sequence[int]]) -> list[int]:
    """The slot of every layer."""
    groups, count = pool.ring_start.shape
    by_group = [slot] * groups if isinstance(slot, int) else [int(at) for at in slot]
    if len(by_group) != groups or not all(0 < at < count for at in by_group):
        raise ValueError(f"{function}: slot is {slot}, expected one number, or one for each of {groups} groups, in "
                         f"[1, {count - 1}]")
    return [by_group[group] for group in pool.layer_group.tolist()]


def _conv_columns(function: str, conv_ring: Pool, position: Optional[int], history: Optional[int]) -> Tensor:
    """Columns of the newest inputs before `position`, oldest first."""
    ring_len = conv_ring[0].shape[2]
    for name, value, most in (("position", position, None), ("conv_history", history, ring_len)):
        if value is None or value < 0 or (most is not None and value > most):
            raise ValueError(f"{function}: {name} is {value}, expected a number from 0{f' to {most}' if most else ''}, "
                             "because the pool has a conv ring")
    return torch.arange(max(0, position - history), position, device=conv_ring[0].device) % ring_len


def _integers(tensor: Tensor) -> Tensor:
    """The same elements as integers of equal width: bits survive, and every dtype can be indexed."""
    return tensor.view(_SAME_WIDTH[tensor.element_size()])


def _take(pool: Pool, slots: list[int]) -> Tensor:
    return torch.stack([_integers(pool[layer][at]) for layer, at in enumerate(slots)]).view(pool[0].dtype)


def _put(target: Tensor, values: Tensor) -> None:
    _integers(target).copy_(_integers(values))
