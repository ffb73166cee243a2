"""One graph input for all parameters: flat buffers that hold them, and views made inside the compiled function.

CUDA-graph trees spend host time on every input of a graph at every step, so a model of 400 parameters costs hundreds of
microseconds where a few flat buffers cost next to nothing. From outside, a packed module is what it was.
"""

import types
import weakref
from collections.abc import Callable, Collection
from typing import Optional

import torch
from torch import Tensor, nn

from .packing_plan import ALIGN, Place, Slot, find_slots, memory, movable, move_block, plan_flats, written

FLAT_BYTES = 2**31 - ALIGN  # Inductor computes 64-bit indices for all that reads a buffer of 2**31 elements or more

_live: "weakref.WeakSet[PackedParameters]" = weakref.WeakSet()


class PackedParameters:
    """A module whose tensors lie in flat buffers; `pack_parameters` makes one.

    flats: [elements] each, one per dtype, device and kind (parameter or buffer), more where `flat_bytes` is reached.
    left_alone: names of the tensors that were not moved; each is a graph input of its own.
    """

    def __init__(self, module: nn.Module, flats: list[Tensor], places: list[tuple[Slot, Place]], left_alone: list[str]):
        self.module, self.flats, self.left_alone, self._places = module, flats, left_alone, places
        for flat in flats:
            torch._dynamo.mark_static_address(flat, guard=False)  # else every replay would copy it
            torch._dynamo.mark_static(flat)  # else dynamic=True would make its size a symbol
        _live.add(self)

    def check(self) -> None:
        """Raises RuntimeError if a packed tensor was moved or replaced, by `.to(...)`, `.half()`, an assignment.

        Bound functions would still read the flat buffers. So call this before anything is compiled and wherever the
        module may have changed; it takes microseconds a tensor. The remedy is to pack and bind anew.
        """
        for slot, (index, start, shape, stride) in self._places:
            flat, tensor = self.flats[index], slot.tensor
            if tensor is None or _identity(tensor) != _identity(flat.as_strided(shape, stride, start)):
                got = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                raise RuntimeError(f"{slot.name}: got {got}, expected {flat.dtype} {list(shape)} on {flat.device}, at "
                                   f"element {start} of flat buffer {index}; pack the module again")

    def bind(self, fn: Callable) -> Callable:
        """`fn` with a code object of its own; compiled, the module's tensors in it are views of the flat buffers.

        fn: any callable that uses the module, such as a bound method of another object, or the module itself. Compile
        what comes back, with `fullgraph=True`; nothing of the exchange is left in the compiled code. Eagerly it is fn.
        Dynamo still guards on the module tree; `options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}`
        drops that, and no other function is mistaken for this one then, since none shares its code object.

        Results are those of fn, bit for bit, unless packed tensors require gradients: torch.matmul then folds batches
        otherwise (float32: differences of 1e-6). Views have no gradients: compiling with gradients enabled raises
        RuntimeError if a packed tensor requires them; so does fn, compiled, if it puts another tensor in the place of a
        packed one. Raises what `check` raises.
        """
        self.check()
        packed, trains = self, any(slot.tensor.requires_grad for slot, _ in self._places)
        by_owner: dict[nn.Module, tuple[list, list]] = {}
        for slot, place in self._places:
            kind = 0 if slot.key in slot.owner._parameters else 1
            by_owner.setdefault(slot.owner, ([], []))[kind].append((slot.name, slot.key, *place))
        owners = list(by_owner)

        def bound(*args, **kwargs):
            if not torch.compiler.is_compiling():
                return fn(*args, **kwargs)  # the module's own tensors are the same memory
            if trains and torch.is_grad_enabled():
                raise RuntimeError("packed parameters have no gradients, expected a call under torch.no_grad()")
            exchanged = []
            try:
                for owner, kinds in zip(owners, "LAYOUT"):
                    for tensors, slots in zip((owner._parameters, owner._buffers), kinds):
                        for name, key, flat, start, shape, stride in slots:
                            # as_strided and not a slice, of which Inductor clones the base where it is written
                            view = packed.flats[flat].as_strided(shape, stride, start)
                            exchanged.append((name, tensors, key, tensors[key], view))
                            tensors[key] = view
                result = fn(*args, **kwargs)
                for name, tensors, key, _, view in exchanged:
                    if tensors[key] is not view:
                        raise RuntimeError(f"{name}: got another tensor inside the function, where it would be lost; "
                                           "name it in skip")
                return result
            finally:
                for _, tensors, key, tensor, _ in exchanged:
                    tensors[key] = tensor

        # A constant of the code needs no guards, where a list of this needs more than the module tree does. The whole
        # is torch.func.functional_call in effect, which Dynamo takes three times as long to trace.
        layout = tuple(tuple(map(tuple, kinds)) for kinds in by_owner.values())
        constants = (layout if value == "LAYOUT" else value for value in bound.__code__.co_consts)
        code = bound.__code__.replace(co_consts=tuple(constants))
        return types.FunctionType(code, bound.__globals__, bound.__name__, None, bound.__closure__)


@torch.no_grad()
def pack_parameters(module: nn.Module, skip: Collection[str] = (), call: Optional[Callable[[], object]] = None,
                    flat_bytes: int = FLAT_BYTES) -> PackedParameters:
    """Moves the module's tensors into flat buffers, each to a multiple of 128 bytes; the result binds functions.

    Outside nothing changes: Parameter objects, names, values, shapes, strides and ties are the same, and what is
    written in place (`load_state_dict`, an optimizer) is seen inside. Tensors that overlap in memory move as one.

    Left alone are tensors named in `skip`, those of more than `flat_bytes` bytes (2 GiB; an n-gram table), what is on
    the meta device, sparse, quantised, of a tensor subclass or made in inference mode, memory seen in several dtypes,
    and what is written: most writes inside the compiled function cost nothing extra, but some clone the flat buffer
    (one packed tensor copied to another). `call()` shows what is written: it runs once, without gradients, and should
    do eagerly what will be compiled; `lambda: None` writes nothing. Without `call` all buffers are left alone, and
    parameters are taken to be read only. Buffers have flat buffers of their own: one that is written against
    expectation is right afterwards, and never clones parameters.

    Memory: the peak is the module's own size plus one flat buffer, for the next is allocated when the originals of the
    last are free; nobody else may hold them. `torch.save` of one packed tensor takes its whole flat buffer along: clone
    it first. A module that is packed and in order comes back as it was packed, whatever the other arguments are.

    Raises:
        ValueError: `skip` has a name that the module lacks, `flat_bytes` is not in 1 .. 2**31 - 128, or a tensor lies
            in the flat buffers of another module, which are in use.
    """
    if not 0 < flat_bytes <= FLAT_BYTES:
        raise ValueError(f"flat_bytes: got {flat_bytes}, expected 1 to {FLAT_BYTES}")
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    if unknown := sorted(set(skip) - named.keys()):
        raise ValueError(f"skip: got {', '.join(unknown)}, expected names of parameters or buffers")
    slots = find_slots(module)
    if (packed := _packed_already(module, slots)) is not None:
        return packed
    fixed = {id(named[name]) for name in skip}
    fixed |= {id(tensor) for tensor in module.buffers()} if call is None else written(slots, call)
    flats, places = [], {}
    for dtype, device, size, blocks in plan_flats(find_slots(module), fixed, flat_bytes):
        with torch.inference_mode(False):
            flats.append(torch.zeros(size, dtype=dtype, device=device))
        for start, block in blocks:
            places |= move_block(block, flats[-1], len(flats) - 1, start)
    left_alone = [slot.name for slot in find_slots(module) if slot.name not in places]
    return PackedParameters(module, flats, list(places.values()), left_alone)


def _packed_already(module: nn.Module, slots: list[Slot]) -> Optional[PackedParameters]:
    """The module's own PackedParameters, if in order. Raises ValueError for tensors in those of another module."""
    for packed in list(_live):
        try:
            packed.check()
        except RuntimeError:
            continue  # whoever uses it will be told
        if packed.module is module:
            return packed
        flats = {flat.data_ptr() for flat in packed.flats if flat.numel()}
        for slot in slots:
            if movable(slot.tensor) and memory(slot.tensor) in flats:
                raise ValueError(f"{slot.name}: got a tensor in the flat buffers of a {type(packed.module).__name__}, "
                                 "which are in use, expected the modules to be packed as one")
    return None


def _identity(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
