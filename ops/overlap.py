"""Arguments of one call that share memory: what an op writes must be neither read nor written through another one.

Kernels read and write in no order, so that a tensor which is read must not change meanwhile. Callers see to that with a
clone, but Inductor drops a clone that it takes for idle and then passes one buffer twice. Such a tensor is copied here.
"""

from torch import Tensor

from .check import fail


def keep_apart(op, args: tuple) -> tuple:
    """The arguments of a real call, each copied that is read and overlaps what the op writes.

    Slices of one storage that have no element in common (rows of one tensor, columns, fields of a record) stay as they
    are. Without tensors of one storage this is a look at the storages. Where addresses do not exist, while a call is
    traced, there is nothing to do: what is traced is functional.

    Raises:
        ValueError: two arguments that are both written overlap.
    """
    storages = [value.untyped_storage()._cdata if isinstance(value, Tensor) else None for value in args]
    written = [i for i in op.written if i < len(args) and storages[i] is not None]
    if all(storages.count(storages[i]) == 1 for i in written):
        return args
    args = list(args)
    for i in written:
        for j, storage in enumerate(storages):
            if i == j or storage != storages[i] or not overlap(args[i], args[j]):
                continue
            if j in written:
                names = list(op.signature.parameters)
                fail(op.name, names[j], f"in the memory of {names[i]}", "memory of its own, for both are written")
            args[j] = args[j].clone()
    return tuple(args)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common. True also for strides that it does not see through."""
    if not a.numel() or not b.numel():
        return False
    return _meet(a.data_ptr(), a.element_size(), _steps(a), b.data_ptr(), b.element_size(), _steps(b))


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    """(bytes between neighbours, number) of the dimensions that move, the widest step first."""
    size = tensor.element_size()
    return sorted(((stride * size, n) for stride, n in zip(tensor.stride(), tensor.shape) if stride and n > 1),
                  reverse=True)


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
