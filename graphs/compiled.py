"""How a step is compiled: one graph, for good, and on a GPU replayed by CUDA-graph trees."""

import itertools
import types
from collections.abc import Iterable

import torch
from torch import Tensor

from .passes import NoCacheClones

_serial = itertools.count()
# Padded rows of a product's result would be copied into packed ones for each op that takes a part of them.
OPTIONS = {"post_grad_custom_post_pass": NoCacheClones(), "comprehensive_padding": False}


def compile_alone(method, *, cuda: bool = False, guarded: bool = True, direct: bool = False,
                  backend: str = "inductor"):
    """`torch.compile(fullgraph=True)` of a bound method with a code object of its own.

    Dynamo keeps compiled variants, eight at most, per code object; two steps of other sizes must not share them. It
    fails if functionalisation leaves a clone of a tensor that the step writes, see `passes.NoCacheClones`. Results of
    products are laid out as in eager mode.

    cuda: `mode="reduce-overhead"`, CUDA-graph trees, as one graph or, with a warning, none: no silent partitions.
    guarded: False leaves out Dynamo's guards, whose cost grows with the number of modules. That is for steps that take
    nothing but their own object's tensors, which may be replaced by others of the same kind, and whose other attributes
    never change. direct: the first call that compiles is the last that goes through Dynamo; later ones hand the same
    tensors to what the backend made. So none may be replaced any more, and the method returns a tensor or None.
    """
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    own = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    options = dict(OPTIONS) if backend == "inductor" else {}
    if cuda:
        options.update(torch._inductor.list_mode_options("reduce-overhead"), graph_partition=False)
    filters = {} if guarded else {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    bound = types.MethodType(own, method.__self__)
    if direct:
        return _Direct(bound, options, filters)
    options.update(filters)
    return torch.compile(bound, fullgraph=True, dynamic=False, backend=backend, options=options or None)


class _Direct:
    """See `compile_alone`. Calls Dynamo until it has compiled, then the backend's callable with the same tensors."""

    def __init__(self, bound, options: dict, filters: dict):
        self.options, self.made, self.inputs = options, None, ()
        self.compiled = torch.compile(bound, fullgraph=True, dynamic=False, backend=self.backend,
                                      options=filters or None)

    def backend(self, graph, inputs, **_):
        from torch._inductor.compile_fx import compile_fx  # takes seconds, and who makes a step need not compile it

        made = compile_fx(graph, inputs, config_patches=self.options)

        def run(*tensors):
            self.made, self.inputs = made, tensors
            return made(*tensors)

        return run

    def __call__(self):
        if self.made is None:
            return self.compiled()
        out = self.made(*self.inputs)
        return out[0] if out else None


def forget_compiled(compiled) -> None:
    """Drops what Dynamo keeps for a function that `compile_alone` made, and with it the recordings."""
    if isinstance(compiled, _Direct):
        compiled.made, compiled.inputs, compiled = None, (), compiled.compiled
    torch._dynamo.eval_frame.remove_from_cache(torch._dynamo.eval_frame.innermost_fn(compiled))


def mark_static(*owners) -> None:
    """Tells the compiler that the tensors among the owners' attributes, also in lists, tuples and dicts there, stay at
    their addresses: CUDA graphs read and write them in place. A tensor that is replaced is recorded anew.

    Raises ValueError for a CUDA tensor that does not begin at a multiple of 16 bytes: it would be copied at every step
    and, if it is written, keep the step from being a CUDA graph."""
    for owner in owners:
        for tensor in _tensors(vars(owner).values()):
            if tensor.is_cuda and tensor.data_ptr() % 16:
                names = [name for name, value in vars(owner).items() if value is tensor]
                raise ValueError(f"{type(owner).__name__}: {', '.join(names) or 'a tensor'} {list(tensor.shape)} "
                                 f"begins {tensor.data_ptr() % 16} bytes past a multiple of 16, expected none")
            torch._dynamo.mark_static_address(tensor, guard=False)


def _tensors(values: Iterable) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
