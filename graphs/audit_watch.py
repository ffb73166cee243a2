"""What the audit sees: of an eager run, each wait for the device and each custom op; of a compiled run, its graphs."""

import contextlib
import re
import sys
from typing import Callable, Iterator, Optional
from unittest import mock

import torch
from torch._dynamo.utils import (
    ReinplaceCounters,
    clear_compilation_metrics,
    get_compilation_metrics,
    graph_break_reasons,
)
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..ops.registry import NAMESPACE, OPS, lint
from .audit_code import clones_left, large_allocations
from .audit_cuda import CudaWatch
from .audit_finding import Finding, first_line, is_users, last_place

# what these return, or the size of what they return, the host must wait for
SYNCING = {
    "aten::_local_scalar_dense": "the host reads a value (.item(), int(), bool())",
    "aten::equal": "the host reads a comparison",
    "aten::nonzero": "the size of nonzero's result depends on values",
    "aten::masked_select": "the size of masked_select's result depends on values",
    "aten::_unique2": "the size of unique's result depends on values",
    "aten::unique_dim": "the size of unique's result depends on values",
    "aten::unique_consecutive": "the size of unique's result depends on values",
    "aten::repeat_interleave.Tensor": "the size of repeat_interleave's result depends on values",
}
MASKED = ("aten::index", "aten::index_put", "aten::index_put_")
BUILT_IN = {"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor", "higher_order", "quantized"}
NOT_TRACEABLE = ("Attempted to call function marked as skipped", "Skip calling `torch.compiler.disable()`d function")


def _caller() -> tuple[Optional[str], Optional[int]]:
    """File and line of the innermost Python frame that the user wrote."""
    frame = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else (None, None)


class EagerWatch:
    """Notes waits for the device and custom ops while functions run eagerly. Custom ops are opaque: what their kernels
    do inside is not looked at."""

    def __init__(self):
        self.syncs: dict[tuple, Finding] = {}
        self._ops: dict[str, list[Finding]] = {}

    def wrap(self, fn: Callable) -> Callable:
        def call(*args, **kwargs):
            with _Functions(self), _Dispatched(self):
                return fn(*args, **kwargs)

        return call

    def op_findings(self) -> list[Finding]:
        return [finding for findings in self._ops.values() for finding in findings]

    def note_sync(self, message: str) -> None:
        place = _caller()
        self.syncs.setdefault((*place, message), Finding.at(message, *place))

    def note_op(self, function: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
        name = function.name()
        if name not in self._ops:
            place = _caller()
            self._ops[name] = [Finding.at(f"{name}: {fault}", *place) for fault in op_faults(function, args, kwargs)]


def op_faults(function: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[str]:
    """What is wrong with the registration of a custom op that is being called with these arguments."""
    faults = []
    if function.namespace == NAMESPACE:
        op = next((op for op in OPS.values() if function in (op.overload, op.layers_overload, op.out_overload)), None)
        faults += lint(op) if op is not None else ["not registered through torch_replay.ops.registry"]
    try:
        with FakeTensorMode() as mode:
            function(*tree_map_only(torch.Tensor, mode.from_tensor, args),
                     **tree_map_only(torch.Tensor, mode.from_tensor, kwargs))
    except Exception as error:
        faults.append(f"does not run on fake tensors ({type(error).__name__}: {first_line(str(error))})")
    return faults


class _Functions(TorchFunctionMode):
    """Sees `tolist`, which reads memory without dispatching."""

    def __init__(self, watch: EagerWatch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.tolist:
            self.watch.note_sync("the host reads all values (.tolist())")
        return function(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __init__(self, watch: EagerWatch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.name()
        if name in SYNCING:
            self.watch.note_sync(SYNCING[name])
        elif name.split(".")[0] in MASKED and any(_is_mask(leaf) for leaf in tree_leaves(args[1])):
            self.watch.note_sync("indexing with a mask: the size depends on values")
        elif function.namespace not in BUILT_IN:
            self.watch.note_op(function, args, kwargs)
        result = function(*args, **kwargs)
        if name == "aten::_to_copy" and args[0].is_cuda and result.device.type == "cpu":
            self.watch.note_sync("a copy from the device to the host")
        return result


def _is_mask(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


class CompileWatch:
    """Compiles functions with Inductor and notes every graph, why there is more than one, and what each clones."""

    def __init__(self, cache_bytes: int):
        self.cache_bytes = cache_bytes
        self.graphs, self.graphs_by_call, self.second_sweep, self.on_cuda = 0, [], False, False
        self.cuda = CudaWatch()
        self.breaks: list[Finding] = []
        self.recompiles: list[Finding] = []
        self._clones: dict[tuple, Finding] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all compiled calls: no graph comes from a cache, where nothing of it could be seen."""
        torch._dynamo.reset()
        with (torch._inductor.config.patch(fx_graph_cache=False),
              torch._functorch.config.patch(enable_autograd_cache=False),
              torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), self.cuda.running()):
            try:
                yield
            finally:
                torch._dynamo.reset()

    def compile(self, fn: Callable) -> Callable:
        compiled = torch.compile(fn, backend=self._backend, dynamic=False)

        def call(*args, **kwargs):
            before = self.graphs
            clear_compilation_metrics()
            graph_break_reasons.clear()
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                self._add(self.recompiles, Finding.at(first_line(str(error)), *last_place(str(error))))
                return fn(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                # it ran eagerly, so this says that it cannot be compiled
                message = f"does not compile: {first_line(str(error))}"
                self._add(self.breaks, Finding.at(message, *last_place(str(error))))
                return fn(*args, **kwargs)
            finally:
                self.graphs_by_call.append(self.graphs - before)
                self._note_breaks()
                if self.second_sweep:
                    self._note_recompiles(self.graphs - before)

        return call

    def unregistered(self) -> list[Finding]:
        """Breaks at calls that Dynamo cannot look into and that are no registered op."""
        return [finding for finding in self.breaks if finding.message.startswith(NOT_TRACEABLE)]

    @property
    def clones(self) -> list[Finding]:
        """Clones by tensor, and what torch's own count of missed chances holds beyond them."""
        return list(self._clones.values())

    def _backend(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        self.graphs += 1
        self.on_cuda |= any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
        generate, missed_before = GraphLowering.codegen, ReinplaceCounters.get_total_missed_bytes()

        def codegen(lowering):
            code = generate(lowering)
            found = clones_left(lowering.module.graph, lowering.mutated_inputs)
            found += large_allocations(lowering, code[0].value, self.cache_bytes, found)
            for clone in found:
                self._note_clone(Finding.at(clone.message, *last_place(clone.trace), tensor=clone.tensor,
                                            bytes=clone.bytes))
            missed = ReinplaceCounters.get_total_missed_bytes() - missed_before - sum(clone.bytes for clone in found)
            if missed > 0:
                self._note_clone(Finding("torch counts more bytes that it could not write in place", bytes=missed))
            return code

        patches = {"triton.cudagraphs": True} if self.on_cuda else {}
        with mock.patch.object(GraphLowering, "codegen", codegen), self.cuda.compiling():
            return compile_fx(graph, inputs, config_patches=patches)

    def _note_clone(self, clone: Finding) -> None:
        self._clones.setdefault((clone.tensor, clone.file, clone.line, clone.bytes), clone)

    def _note_breaks(self) -> None:
        for reason in graph_break_reasons:
            stack = "".join(f'File "{frame.filename}", line {frame.lineno}\n' for frame in reason.user_stack)
            self._add(self.breaks, Finding.at(first_line(reason.reason), *last_place(stack)))

    def _note_recompiles(self, graphs: int) -> None:
        if not graphs:
            return
        reasons = [(metrics.recompile_reason, metrics.co_filename, metrics.co_firstlineno)
                   for metrics in get_compilation_metrics() if metrics.recompile_reason]
        for reason, file, line in reasons:
            place = last_place(reason) if 'File "' in reason else (file, line)
            guard = re.sub(r"\s+#.*", "", first_line(reason))
            self._add(self.recompiles, Finding.at(f"no graph fits any more, failed guard {guard}", *place))
        if not reasons:
            self._add(self.recompiles, Finding("a graph was compiled, torch does not say why"))

    @staticmethod
    def _add(findings: list[Finding], finding: Finding) -> None:
        if finding not in findings:
            findings.append(finding)

