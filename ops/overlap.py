"""Arguments of one call that share memory: what an op writes must be neither read nor written through another one.

Kernels read and write in no order, so that a tensor which is read must not change meanwhile. Callers see to that with a
clone, but Inductor drops a clone that it takes for idle and then passes one buffer twice. Such a tensor is copied here.
"""

import functools
from typing import Optional

from torch import Tensor

from .check import fail


def keep_apart(op, args: tuple, out: Optional[Tensor] = None) -> tuple:
    """The arguments of a real call, each copied that is read and overlaps what the op writes, or the caller's out.

    Slices of one storage that have no element in common (rows of one tensor, columns, fields of a record) stay as they
    are. Without tensors of one storage this is a look at the storages. Where addresses do not exist, while a call is
    traced, there is nothing to do: what is traced is functional.

    In a list two layers may be one and the same memory (pages that layers of different groups take turns at), but they
    may not overlap otherwise.

    Raises:
        ValueError: two arguments that are both written overlap.
    """
    if any(isinstance(value, (list, tuple)) for value in args):
        return _keep_lists_apart(op, args)
    count, written = len(args), op.written
    if out is not None:
        args, written = (*args, out), (*written, count)
    storages = [value.untyped_storage()._cdata if isinstance(value, Tensor) else None for value in args]
    written = [i for i in written if i < len(args) and storages[i] is not None]
    if all(storages.count(storages[i]) == 1 for i in written):
        return args[:count]
    args = list(args)
    for i in written:
        for j, storage in enumerate(storages):
            if i == j or storage != storages[i] or not overlap(args[i], args[j]):
                continue
            if j in written:
                names = [*op.signature.parameters][:count] + ["out"]
                fail(op.name, names[j], f"in the memory of {names[i]}", "memory of its own, for both are written")
            args[j] = args[j].clone()
    return tuple(args[:count])


def _keep_lists_apart(op, args: tuple) -> tuple:
    """`keep_apart` where arguments are lists, all of one dtype, shape and stride each."""
    names, args = list(op.signature.parameters), list(args)
    tensors = [value if isinstance(value, (list, tuple)) else (value,) if isinstance(value, Tensor) else ()
               for value in args]
    storages = [[tensor.untyped_storage()._cdata for tensor in layers] for layers in tensors]
    shared = {storage for place in op.written if place < len(args) for storage in storages[place]}
    memory = [(place, layers[0].element_size(), tuple(layers[0].shape), layers[0].stride(),
               tuple((storage, tensor.data_ptr()) for storage, tensor in zip(storages[place], layers)))
              for place, layers in enumerate(tensors) if not shared.isdisjoint(storages[place])]
    for i, layer, j, other in _meetings(tuple(memory), op.written):
        if j in op.written:
            fail(op.name, f"{names[j]}[{other}]", f"in the memory of {names[i]}[{layer}]",
                 "memory of its own, for both are written")
        args[j] = [tensor.clone() for tensor in args[j]] if isinstance(args[j], (list, tuple)) else args[j].clone()
    return tuple(args)


@functools.lru_cache(maxsize=256)
def _meetings(memory: tuple, written: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """(place, layer, other place, other layer) of tensors that are written and of others in the same memory, at most
    one for each pair of places. A host's pools stay where they are, so that the answer is asked for again and again."""
    by_storage: dict[int, list] = {}
    for place, size, shape, stride, where in memory:
        steps = _steps(size, shape, stride)
        for layer, (storage, address) in enumerate(where):
            if 0 not in shape:
                by_storage.setdefault(storage, []).append((place, layer, address, size, steps))
    found = {}
    for tensors in by_storage.values():
        for i, layer, *here in tensors:
            for j, other, *there in tensors if i in written else ():
                if (i, layer) == (j, other) or (i == j and here == there):
                    continue
                if (i, j) not in found and _meet(*here, *there):
                    found[i, j] = (i, layer, j, other)
    return list(found.values())


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common. True also for strides that it does not see through."""
    if not a.numel() or not b.numel():
        return False
    a, b = ((t.data_ptr(), t.element_size(), _steps(t.element_size(), t.shape, t.stride())) for t in (a, b))
    return _meet(*a, *b)


def _steps(size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """(bytes between neighbours, number) of the dimensions that move, the widest step first. size: of an element."""
    return sorted(((stride * size, n) for stride, n in zip(strides, shape) if stride and n > 1), reverse=True)


def _length(width: int, steps: list) -> int:
    return width + sum(step * (n - 1) for step, n in steps)


def _meet(at_a: int, width_a: int, steps_a: list, at_b: int, width_b: int, steps_b: list) -> bool:
    """Of elements of `width` bytes from an address on."""
    length_a, length_b = _length(width_a, steps_a), _length(width_b, steps_b)
    if at_a + length_a <= at_b or at_b + length_b <= at_a:
        return False
    if not (steps_a and steps_b and steps_a[0][0] == steps_b[0][0]):
        return True
    # both are rows at one distance; row i of a and row j of b lie as row i - j of a and row 0 of b
    (step, count_a), (_, count_b) = steps_a[0], steps_b[0]
    inner_a, inner_b = _length(width_a, steps_a[1:]), _length(width_b, steps_b[1:])
    if inner_a > step or inner_b > step:
        return True
    first = (at_b - at_a) // step  # rows of a length of at most one step: only these can reach row 0 of b
    near = range(max(first - 1, 1 - count_b), min(first + 1, count_a - 1) + 1)
    return any(_meet(at_a + row * step, width_a, steps_a[1:], at_b, width_b, steps_b[1:]) for row in near)
