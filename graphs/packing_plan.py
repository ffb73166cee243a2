"""Which tensors of a module may lie in flat buffers, and where: the plan that `packing.pack_parameters` carries out."""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALIGN = 128  # bytes. Tensors not aligned to 16 are copied, or read more slowly, by cuBLAS and by Inductor's kernels.


class Slot(NamedTuple):
    """Where a module holds a tensor: `owner._parameters[key]`, or `owner._buffers[key]`. `name`: from the root on."""

    name: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> Optional[Tensor]:
        return self.owner._parameters.get(self.key, self.owner._buffers.get(self.key))


class Place(NamedTuple):
    """The view of flat buffer number `flat` that a slot's tensor is; `start` and `stride` in elements."""

    flat: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def find_slots(module: nn.Module) -> list[Slot]:
    """All slots of the module, each once: a tied tensor has several, those of a shared module have its first path."""
    return [Slot(f"{path}.{key}" if path else key, owner, key) for path, owner in module.named_modules()
            for tensors in (owner._parameters, owner._buffers) for key, value in tensors.items() if value is not None]


def movable(tensor: Tensor) -> bool:
    """Whether strides and bytes are all there is to the tensor, and it has both."""
    return (type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_inference()))


def memory(tensor: Tensor) -> int:
    """Address of the storage, which tells memory apart."""
    return tensor.untyped_storage().data_ptr()


class _Writes(TorchDispatchMode):
    """Notes the memory that ops write."""

    def __init__(self):
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = function._schema.arguments if isinstance(function, torch._ops.OpOverload) else ()
        values = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
        for argument in arguments:
            # batch norms write running_mean and running_var in training, of which most of their schemas say nothing
            silent = argument.name.startswith("running_") and (values.get("training") or values.get("train"))
            if silent or argument.alias_info is not None and argument.alias_info.is_write:
                self.memory |= {memory(leaf) for leaf in tree_leaves(values.get(argument.name))
                                if isinstance(leaf, Tensor) and movable(leaf)}
        return function(*args, **kwargs)


def written(slots: list[Slot], call: Callable[[], object]) -> set[int]:
    """ids of the tensors that `call()` writes or replaces."""
    before, writes = [slot.tensor for slot in slots], _Writes()
    with writes:
        call()
    return {id(slot.tensor) for slot, tensor in zip(slots, before)
            if slot.tensor is not tensor or movable(tensor) and memory(tensor) in writes.memory - {0}}


def plan_flats(slots: list[Slot], fixed: set[int], flat_bytes: int) -> list[tuple]:
    """Flat buffers as (dtype, device, elements, [(start, block)]).

    A block is the slots whose tensors overlap in memory, lowest address first. Left out are blocks with a tensor whose
    id is in `fixed`, with several dtypes, or of more than `flat_bytes` bytes.
    """
    plan: dict[tuple, list[list]] = {}
    for block in _blocks([slot for slot in slots if movable(slot.tensor)]):
        tensors = [slot.tensor for slot in block]
        itemsize = tensors[0].itemsize
        room = -(-_length(block) * itemsize // ALIGN) * ALIGN // itemsize
        if (room * itemsize > flat_bytes or any(id(tensor) in fixed for tensor in tensors)
                or len({(tensor.dtype, memory(tensor)) for tensor in tensors}) > 1):
            continue
        # a buffer that is written although nobody said so clones its flat buffer: parameters must not be in it
        kind = tensors[0].dtype, tensors[0].device, any(isinstance(tensor, nn.Parameter) for tensor in tensors)
        flats = plan.setdefault(kind, [])
        if not flats or (flats[-1][0] + room) * itemsize > flat_bytes:
            flats.append([0, []])
        flats[-1][1].append((flats[-1][0], block))
        flats[-1][0] += room
    return [(dtype, device, *flat) for (dtype, device, _), flats in plan.items() for flat in flats]


def move_block(block: list[Slot], flat: Tensor, index: int, start: int) -> dict[str, tuple[Slot, Place]]:
    """Copies a block to `flat[start:]`, number `index`, and points its tensors there. Returns the places by name."""
    lowest, length = block[0].tensor.detach(), _length(block)
    flat[start : start + length].copy_(lowest.as_strided((length,), (1,), lowest.storage_offset()))
    # one tensor may be in several slots, so every place is read before anything moves
    places = {slot.name: (slot, Place(index, start + _offset(slot, block), tuple(slot.tensor.shape),
                                      slot.tensor.stride())) for slot in block}
    for slot, place in places.values():
        slot.tensor.data = flat.as_strided(place.shape, place.stride, place.start)
    return places


def _blocks(slots: list[Slot]) -> list[list[Slot]]:
    """Slots whose tensors overlap in memory, together, so that ties of every kind survive; in the module's order."""
    blocks: list[list[Slot]] = []
    reached = None, 0  # the device, and the address up to which its memory is in a block
    for slot in sorted(slots, key=lambda slot: (str(slot.tensor.device), slot.tensor.data_ptr())):
        device, begin = slot.tensor.device, slot.tensor.data_ptr()
        end = begin + _span(slot.tensor) * slot.tensor.itemsize
        if device == reached[0] and begin < reached[1]:
            blocks[-1].append(slot)
            reached = device, max(reached[1], end)
        else:
            blocks.append([slot])
            reached = device, end
    order = {slot.name: index for index, slot in enumerate(slots)}
    return sorted(blocks, key=lambda block: min(order[slot.name] for slot in block))


def _span(tensor: Tensor) -> int:
    """Elements in memory from the tensor's first to its last."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0


def _offset(slot: Slot, block: list[Slot]) -> int:
    return slot.tensor.storage_offset() - block[0].tensor.storage_offset()


def _length(block: list[Slot]) -> int:
    return max(_offset(slot, block) + _span(slot.tensor) for slot in block)
