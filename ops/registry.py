"""How an op enters torch_replay: one helper, one table, one lint.

An op is one decorated function, the *body*. Its signature is the schema (`torch.library.infer_schema`), its docstring
the documentation, and its code does two things only: validate the arguments and allocate what the op returns. The body
therefore serves as the fake implementation as it stands, and every real kernel runs behind it: the kernel receives the
op's arguments and, as keyword `out`, the tensors that the body allocated. Shapes, strides and dtypes of a traced op and
of a real one cannot drift apart, and a bad argument raises before anything is written, on every route. With `out=True`
the same body gives a second op, `<name>_out`, whose kernels get a tensor of the caller's in place of the allocated one.
A schema may not return an argument, so that op returns nothing; the wrapper calls it for `out=` and returns the tensor.

`torch.library.custom_op` would be shorter but costs several times more per call, also inside compiled code.
"""

import contextlib
import functools
import inspect
import re
import typing
from typing import Callable, Iterator, Optional, ParamSpec, TypeVar, Union

import torch
from torch.autograd import forward_ad

from . import backends, check
from .layers import Layers
from .native import kernels as native
from .overlap import keep_apart
from .table import LIBRARY, NAMESPACE, OPS, Op

P = ParamSpec("P")  # a checker sees each op with the arguments and results of its body
R = TypeVar("R")
_inlining = True  # see `inlining`
OUT = "output"  # name of `out` in schemas: Dynamo refuses any op's keyword of that name that is not contiguous


def register(
    *,
    cpu: Callable,
    cuda: Union[str, Callable, None] = None,
    flashinfer: Optional[str] = None,
    mutates: tuple[str, ...] = (),
    check_values: Optional[Callable] = None,
    inline_on_cpu: bool = False,
    cursor_dims: Optional[int] = None,
    out: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that registers an op and returns its Python wrapper.

    Args:
        cpu: reference kernel in plain torch; takes the op's arguments plus `out=` if the op returns something.
        cuda: dotted module holding the CUDA kernel under the op's name, imported on first use. None: the reference
            kernel serves CUDA tensors too (right, but slow, and it may synchronise).
        flashinfer: dotted module with a kernel by FlashInfer for CUDA tensors; see `backends` for what it must hold.
        mutates: names of the arguments that the op writes.
        check_values: called with the op's arguments before a CPU kernel; looks at values (slot ranges, lengths),
            which a GPU cannot do without a host sync.
        inline_on_cpu: where torch.compile traces the wrapper on CPU tensors, the body and `cpu` are traced in place of
            the op, so that Inductor fuses them with what stands around. `check_values` does not run then. `cpu` must
            trace: no value may reach Python, and no shape may depend on one. Nor may it write by index to a tensor
            that can be a slice of a larger one, or read one that the same graph writes by index: Inductor would copy
            all of it at every call. The body writes a message (`fail`) after a check has failed, not before
            (`require`): a size in a string becomes a constant of the graph. See `inlining`.
        cursor_dims: dimensions of the ring_start and ring_committed that the body and the kernels take, 1: [S], or
            2: [G, S]. Callers may give either; [S] stands for one group.
        out: the op returns one tensor, and takes the keyword `out`: a tensor to write it to, of its shape, dtype and
            device, with any strides, that lies in no memory which the op writes besides. It is also what the wrapper
            returns. Kernels respect its strides.

    A CUDA kernel runs with the device of the op's first CUDA tensor as the current one.

    The wrapper raises TypeError for an argument of the wrong type and, through the body, ValueError for wrong shapes,
    dtypes, devices and values. Ops are for inference: arguments that require a gradient raise while autograd records,
    and so does every call in forward-mode differentiation.
    """

    def decorate(body: Callable[P, R]) -> Callable[P, R]:
        name = body.__name__.removeprefix("_")
        if name in OPS:
            return OPS[name].wrapper
        schema = name + torch.library.infer_schema(_stacked(body), mutates_args=mutates)
        kernels = {"cpu": cpu, "cuda": cuda or cpu}
        hints = typing.get_type_hints(body)
        pools = tuple((place, argument) for place, argument in enumerate(inspect.signature(body).parameters)
                      if hints[argument] in STACKED)
        op = Op(name, schema, mutates, body, inspect.signature(body), check_values, kernels,
                flashinfer=flashinfer, inline_on_cpu=inline_on_cpu, cursor_dims=cursor_dims, pools=pools)
        op.overload = _define(op, schema)
        if pools:
            op.layers_schema = _layer_by_layer(name, schema, pools)
            op.layers_overload = _define(op, op.layers_schema)
        if out:
            variant = torch.library.infer_schema(_with_out(body), mutates_args=(*mutates, OUT))
            op.out_overload = _define(op, f"{name}_out{variant}")
        optional = (Optional[torch.Tensor], Optional[Layers])
        check.OPTIONAL[name] = {argument for argument, hint in hints.items() if hint in optional}
        OPS[name] = op
        op.wrapper = _wrapper(op)
        return op.wrapper

    return decorate


STACKED = {Layers: torch.Tensor, Optional[Layers]: Optional[torch.Tensor]}


def _stacked(body: Callable) -> Callable:
    """Stands for the body where a schema is inferred: pools that may be lists are tensors."""
    def prototype():
        pass

    signature = inspect.signature(body)
    prototype.__signature__ = signature.replace(parameters=[
        parameter.replace(annotation=STACKED.get(parameter.annotation, parameter.annotation))
        for parameter in signature.parameters.values()])
    return prototype


def _layer_by_layer(name: str, schema: str, pools: tuple[tuple[int, str], ...]) -> str:
    """The schema of the overload `layers`, which `infer_schema` could not express: it knows no `Tensor[]?`."""
    for _, pool in pools:
        schema = re.sub(rf"(Tensor(?:\(\w+!\))?)(\??) {pool}\b", rf"\1[]\2 {pool}", schema)
    return f"{name}.layers{schema.removeprefix(name)}"


def _define(op: Op, schema: str) -> torch._ops.OpOverload:
    """Defines one overload of an op, with its kernels and its fake."""
    name, _, overload_name = schema.split("(")[0].partition(".")
    qualified = f"{name}.{overload_name}" if overload_name else name
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    overload = getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload_name or "default")
    LIBRARY.impl(qualified, _implementation(op, "cpu"), "CPU")
    LIBRARY.impl(qualified, _implementation(op, "cuda"), "CUDA")
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(qualified, _without_autocast(overload), f"Autocast{device}")
    torch.library.register_fake(f"{NAMESPACE}::{qualified}", _fake(op), lib=LIBRARY)
    return overload


def _with_out(body: Callable) -> Callable:
    """A function with the signature of the variant of an op with `out`, which returns nothing."""
    def variant():
        """Only for its signature."""

    variant.__signature__ = _signature_with_out(body, OUT, torch.Tensor).replace(return_annotation=None)
    return variant


def _signature_with_out(body: Callable, name: str, kind, **default) -> inspect.Signature:
    signature = inspect.signature(body)
    out = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, **default)
    return signature.replace(parameters=[*signature.parameters.values(), out])


def _implementation(op: Op, device: str) -> Callable:
    def run(*args, **kwargs):
        # Triton launches on the current device, wherever the tensors lie
        if device == "cuda":
            where = next(value.device for value in args if isinstance(value, torch.Tensor) and value.is_cuda)
            if where.index != torch.cuda.current_device():
                with torch.cuda.device(where):
                    return run(*args, **kwargs)
        _refuse_tangents(op)
        given = kwargs.pop(OUT, None)
        if torch.is_grad_enabled():
            _refuse_gradients(op, args, kwargs | {"out": given})
        args = _shape_cursors(op, args)
        out = op.body(*args, **kwargs)
        if given is not None:
            _check_out(op, given, out)
            out = given
            if any(stride == 0 and size > 1 for size, stride in zip(given.shape, given.stride())):
                check.fail(op.name, "out", f"of strides {given.stride()}", "memory of its own for each element")
        args = keep_apart(op, args, given)
        results = {} if out is None else {"out": out}
        returned = out if given is None else None
        if device == "cpu":
            checked = op.name in native.CHECKED and _served_natively(op, args, kwargs, results)
            if not checked and op.check_values is not None:
                op.check_values(*args, **kwargs)
            if checked or _served_natively(op, args, kwargs, results):
                return returned
        # a back end may refuse the strides of the caller's out
        known = kwargs if given is None else kwargs | results
        kernel = backends.select(op, args, known) if device == "cuda" else op.kernel(device)
        kernel(*args, **kwargs, **results)
        return returned

    return run


def _check_out(op: Op, given: torch.Tensor, expected: torch.Tensor) -> None:
    """Whether the caller's out can take the place of what the body allocated."""
    for what in ("shape", "dtype", "device"):
        if getattr(given, what) != getattr(expected, what):
            check.fail(op.name, "out", f"of {what} {getattr(given, what)}", getattr(expected, what))


def _served_natively(op: Op, args: tuple, kwargs: dict, results: dict) -> bool:
    """Runs the op's C++ kernel, if it has one that takes the call and nobody chose another."""
    kernel = getattr(native, op.name, None)
    if kernel is None or "cpu" in op.overridden or backends.chosen(op.name) == "naive":
        return False
    return kernel(*args, **kwargs, **results)


def _fake(op: Op) -> Callable:
    def run(*args, **kwargs):
        _refuse_tangents(op)
        given = kwargs.pop(OUT, None)
        if torch.is_grad_enabled():
            _refuse_gradients(op, args, kwargs | {"out": given})
        out = op.body(*_shape_cursors(op, args), **kwargs)
        return out if given is None else _check_out(op, given, out)

    return run


def _shape_cursors(op: Op, args: tuple) -> tuple:
    """The arguments, cursors as views of `cursor_dims` dimensions. What is neither [S] nor [G, S] the body refuses."""
    if all(args[place] is None or args[place].dim() == op.cursor_dims for place in op.cursors):
        return args
    args = list(args)
    for place in op.cursors:
        cursor = args[place]
        if cursor is not None and op.cursor_dims == 2 and cursor.dim() == 1:
            args[place] = cursor.unsqueeze(0)
        elif cursor is not None and op.cursor_dims == 1 and cursor.dim() == 2 and cursor.shape[0] == 1:
            args[place] = cursor.squeeze(0)
    return tuple(args)


def _without_autocast(overload: torch._ops.OpOverload) -> Callable:
    """Kernel of the autocast keys, which nothing but a call under autocast reaches: the call again, without.

    The keys alone pass a call on as it is, but the matrix products of a reference kernel would still be cast.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys |= torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(keys):  # as torch.library.register_autocast does
            return overload(*args, **kwargs)

    return run


def _refuse_gradients(op: Op, args: tuple, kwargs: dict) -> None:
    """In the kernels, real and fake, and not as a kernel of the autograd keys: in Python it would double the time of
    a call, also where nothing is recorded."""
    for name, value in (*zip(op.signature.parameters, args), *kwargs.items()):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise ValueError(f"{op.name}: {name} requires a gradient, expected inference (torch.no_grad())")


def _refuse_tangents(op: Op) -> None:
    """Whichever arguments carry one: `torch.func.jvp` takes its wrappers, and the tangents in them, off before a kernel
    sees them. One look at a number, for nobody is in forward mode without asking for it."""
    if forward_ad._current_level >= 0:
        raise ValueError(f"{op.name}: called in forward-mode differentiation (torch.func.jvp, forward_ad.dual_level), "
                         "expected inference")


def _wrapper(op: Op) -> Callable:
    hints = typing.get_type_hints(op.body)
    for _, name in op.pools:
        hints[name] = Union[torch.Tensor, list, tuple, *typing.get_args(hints[name])[2:]]  # None stays
    numbers = [name for name, kind in hints.items() if {int, float} & {kind, *typing.get_args(kind)}]

    @functools.wraps(op.body)
    def call(*args, **kwargs):
        out = kwargs.pop("out", None) if op.out_overload is not None else None
        if out is not None and not isinstance(out, torch.Tensor):
            raise TypeError(f"{op.name}: out is {type(out).__name__}, expected Tensor or None")
        if not torch.compiler.is_compiling():
            _check_types(op, hints, args, kwargs)
        else:
            for name in numbers:  # the schema takes a flag for 0 or 1, and says what other types it expects
                if isinstance(kwargs.get(name), bool):
                    raise TypeError(f"{op.name}: {name} is bool, expected a number")
            if op.inline_on_cpu and out is None and _inlines(op, args, kwargs):
                return _inlined(op, args, kwargs)
        if out is None:
            overload, args, kwargs = _choose_overload(op, args, kwargs)
            return overload(*args, **kwargs)
        op.out_overload(*args, **kwargs, **{OUT: out})
        return out

    call.__name__ = call.__qualname__ = op.name
    if op.out_overload is not None:
        call.__signature__ = _signature_with_out(op.body, "out", Optional[torch.Tensor], default=None)
        call.__doc__ += """
    out: a tensor of the result's shape, dtype and device, with any strides, that is written and returned in place of a
    new one. It may lie in the memory of an input, not of what the op writes besides.
    """
    return call


def _choose_overload(op: Op, args: tuple, kwargs: dict) -> tuple:
    """The overload that takes a call, and its arguments. Where one pool is a list, the others become lists too."""
    given = {name: args[place] if place < len(args) else kwargs.get(name) for place, name in op.pools}
    if not any(isinstance(pool, (list, tuple)) for pool in given.values()):
        return op.overload, args, kwargs
    args, kwargs = list(args), dict(kwargs)
    for place, name in op.pools:
        if given[name] is not None:
            layers = list(given[name].unbind() if isinstance(given[name], torch.Tensor) else given[name])
            if place < len(args):
                args[place] = layers
            else:
                kwargs[name] = layers
    return op.layers_overload, tuple(args), kwargs


def _inlines(op: Op, args: tuple, kwargs: dict) -> bool:
    """Whether this traced call becomes plain torch. An exported graph keeps the op: other devices may run it. So does
    one traced under autocast, which must not reach the op's inside."""
    if not _inlining or torch.compiler.is_exporting() or "cpu" in op.overridden or torch.is_autocast_enabled("cpu"):
        return False
    return all(value.is_cpu for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))


def _inlined(op: Op, args: tuple, kwargs: dict):
    """What `_implementation` does on a CPU, for Dynamo to trace: checks of shapes and dtypes, then the reference."""
    if torch.is_grad_enabled():
        _refuse_gradients(op, args, kwargs)
    out = op.body(*args, **kwargs)
    if out is None:
        op.kernels["cpu"](*args, **kwargs)
    else:
        op.kernels["cpu"](*args, **kwargs, out=out)
    return out


@contextlib.contextmanager
def inlining(enabled: bool) -> Iterator[None]:
    """Within the context, ops registered with `inline_on_cpu` are traced as plain torch on a CPU (the default), or not.

    It is read while a function is traced. Hold it around the compiled calls too: Dynamo guards on it, and traces a
    function anew that is called where the switch differs. (Without guards the first trace stays.)
    """
    global _inlining
    saved, _inlining = _inlining, enabled
    try:
        yield
    finally:
        _inlining = saved


def _check_types(op: Op, hints: dict, args: tuple, kwargs: dict) -> None:
    try:
        bound = op.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{op.name}: {error}") from None
    if torch.is_grad_enabled():
        _refuse_gradients(op, args, kwargs)  # as the kernels do, which see through the wrappers of torch.func
    for name, value in bound.arguments.items():
        allowed = typing.get_args(hints[name]) or (hints[name],)
        if float in allowed:
            allowed += (int,)
        # bool is an int to Python, but a flag given for a count is a mistake
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise TypeError(f"{op.name}: {name} is {type(value).__name__}, expected {expected}")
        for layer, tensor in enumerate(value if isinstance(value, (list, tuple)) else ()):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{op.name}: {name}[{layer}] is {type(tensor).__name__}, expected Tensor")


@contextlib.contextmanager
def override_kernel(name: str, device: str, kernel: Callable) -> Iterator[None]:
    """Within the context, op `name` runs `kernel` on `device` ("cpu" or "cuda"), with the same calling convention."""
    op = OPS[name]
    saved = op.kernels[device], set(op.overridden)
    op.kernels[device] = kernel
    op.overridden.add(device)
    try:
        yield
    finally:
        op.kernels[device], op.overridden = saved


def lint(op: Op) -> list[str]:
    """Complaints about a registered op: what would break tracing or cost recompiles. Empty if all is well."""
    complaints = []
    written = dict.fromkeys((op.overload, op.layers_overload), op.mutates) | {op.out_overload: (*op.mutates, OUT)}
    for overload, names in written.items():
        if overload is not None:
            complaints += _lint_overload(overload, names)
    if not (op.body.__doc__ or "").strip():
        complaints.append("no docstring")
    return complaints


def _lint_overload(overload: torch._ops.OpOverload, written: tuple[str, ...]) -> list[str]:
    complaints, schema = [], overload._schema
    if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU"):
        complaints.append("no CPU kernel")
    if torch._library.simple_registry.singleton.find(overload.name()).fake_impl.kernel is None:
        complaints.append("no fake implementation")
    for kind, name in re.findall(r"(\S+) (\w+)(?:=[^,)]*)?[,)]", str(schema).split(" ->")[0]):
        if re.fullmatch(r"int(\[\d*\])?\??", kind):
            complaints.append(f"{name} is {kind}: one graph per value, expected SymInt")
        if kind.startswith("str"):
            complaints.append(f"{name} is a string: one graph per layer")
    for argument in schema.arguments:
        mutated = argument.alias_info is not None and argument.alias_info.is_write
        if mutated != (argument.name in written):
            complaints.append(f"{argument.name}: the schema and `mutates` disagree")
    for result in schema.returns:
        if "List" in str(result.type) and any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
            complaints.append("a mutating op returns Tensor[]")
        if result.alias_info is not None:
            complaints.append("a returned tensor aliases an argument")
    return complaints
