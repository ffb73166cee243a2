"""Clones in what Inductor generates: in its last graph, by tensor, and in the text of the code, by size."""

import math
import operator
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch._guards import TracingContext
from torch._inductor.graph import GraphLowering
from torch.fx import Graph, Node

ALLOCATION = re.compile(r"= empty_strided\w*\(\(([^)]*)\), \([^)]*\), torch\.(\w+)")
CLONED = "cloned at every step, though it is written"
VIEWS = ("as_strided", "view", "reshape", "select", "slice", "squeeze", "unsqueeze", "permute", "transpose", "t",
         "expand", "alias", "split", "unbind", "diagonal", "detach")
# a copy of their first argument with a part replaced
WRITES = ("index_put", "_unsafe_index_put", "select_scatter", "slice_scatter", "as_strided_scatter",
          "diagonal_scatter", "scatter", "scatter_add", "scatter_reduce")


@dataclass
class Clone:
    """A copy made at every run: of which tensor, how large, and the stack of the code that asked for it."""

    message: str
    tensor: str
    bytes: int
    elements: int
    dtype: torch.dtype
    trace: Optional[str]


def clones_left(graph: Graph, mutated: Collection[str], known: Collection[str] = ()) -> list[Clone]:
    """Copies of inputs that the graph writes, which writing in place would have avoided.

    graph: in which Inductor has settled what is written in place, whether or not it has yet put mutating ops, and
    clones, in place of the functional ones. mutated: names of the inputs that it writes. known: names of nodes that are
    not worth mention.

    Three kinds: a clone; a write that replaces a part of a copy, which is then copied back; and a write through a view
    of another dtype, after which the tensor is copied onto itself.
    """
    names, found = input_names(graph), []

    def note(message: str, value: Node, size: int, trace: Optional[str]) -> None:
        tensor, element = _root(value), value.meta["val"].element_size()
        if tensor.op == "placeholder" and tensor.name in mutated:
            found.append(Clone(message, names.get(tensor.name, tensor.name), size, size // element,
                               value.meta["val"].dtype, trace))

    for node in graph.nodes:
        if node.op != "call_function" or node.name in known:
            continue
        for value in _to_be_cloned(node):
            note(CLONED, value, _bytes_from_start(value.meta["val"]), node.stack_trace)
        if node.target is torch.ops.aten.clone.default:
            note(CLONED, node.args[0], bytes_of(node.args[0].meta["val"]), _trace(node))
        elif node.target is torch.ops.aten.copy_.default:
            message = _copied_back(*node.args[:2])
            if message:
                note(message, node.args[0], bytes_of(node.args[0].meta["val"]), _trace(node))
    return found


def large_allocations(lowering: GraphLowering, code: str, least: int, known: list[Clone]) -> list[Clone]:
    """Allocations in `code`, but for the `known` clones, with dtype and size of a mutated input or of its storage.

    least: bytes of such an input.
    """
    inputs = [node for node in lowering.module.graph.nodes
              if node.op == "placeholder" and node.name in lowering.mutated_inputs]
    explained = [(clone.elements, clone.dtype) for clone in known]
    names, found = input_names(lowering.module.graph), []
    for shape, name in ALLOCATION.findall(code):
        sizes = [size.strip() for size in shape.split(",") if size.strip()]
        dtype = getattr(torch, name)
        if not all(size.isdigit() for size in sizes):
            continue  # a symbolic size
        elements = math.prod(int(size) for size in sizes)
        if (elements, dtype) in explained:
            explained.remove((elements, dtype))
            continue
        for node in inputs:
            value = node.meta["val"]
            storage = value.untyped_storage().nbytes() // value.element_size()
            if value.dtype == dtype and bytes_of(value) >= least and elements in (value.numel(), storage):
                found.append(Clone(f"the generated code allocates ({shape}) {name}, as large as this tensor",
                                   names.get(node.name, node.name), elements * value.element_size(), elements, dtype,
                                   node.stack_trace))
                break
    return found


def input_names(graph: Graph) -> dict[str, str]:
    """Graph inputs as the source code names them, by the name of their node: `self.cache` for Dynamo's L['self'].cache.

    Only while Dynamo compiles; what it does not know is left out. AOTAutograd reorders, drops and merges inputs, but
    each remains a view of the fake storage that was made for the real tensor, of which Dynamo noted the source. An
    input that was merged from several has all their names.
    """
    sources = list(_sources())
    names = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            same_storage = [(fake, name) for fake, name in sources if _storage(fake) == _storage(value)]
            same = [name for fake, name in same_storage if _place(fake) == _place(value)]
            found = same[:1] or [name for _, name in same_storage]
            if found:
                names[node.name] = " and ".join(found)
    return names


def bytes_of(value: torch.Tensor) -> int:
    """Bytes of a tensor; of one with symbolic sizes, as large as it was while tracing."""
    return math.prod(map(_number, value.size())) * value.element_size()


def _bytes_from_start(value: torch.Tensor) -> int:
    """Bytes that a clone with the same strides and offset has: it begins where the storage begins."""
    last = sum((_number(size) - 1) * _number(stride) for size, stride in zip(value.size(), value.stride()))
    return (_number(value.storage_offset()) + last + 1) * value.element_size() if bytes_of(value) else 0


def _number(size) -> int:
    """A size, or a symbol's value while tracing, without a guard on it."""
    return size if isinstance(size, int) else size.node.hint or 0


def _sources() -> Iterator[tuple[torch.Tensor, str]]:
    """Each tensor that Dynamo took as an input, as a fake, with its name."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return
    converter = context.fake_mode.fake_tensor_converter.meta_converter
    for real, number in list(converter.describer.lookup_tensor.items()):
        fake = converter.tensor_memo.get(number)
        source = getattr(context.tensor_to_context.get(real), "tensor_source", None)
        if fake is None or source is None:
            continue
        name = source.name if isinstance(source.name, str) else source.name()
        if not name.endswith("._base"):
            yield fake, _as_written(name)


def _as_written(name: str) -> str:
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([A-Za-z_]\w*)'\]", r".\1", name)
    return re.sub(r"\._modules\['(\d+)'\]", r"[\1]", name)


def _copied_back(target: Node, source: Node) -> Optional[str]:
    """What is wrong with copying `source` to a tensor, if it was made from that tensor."""
    written, root = _root(target), _root(source)
    if root is written and any(node.target is torch.ops.aten.view.dtype for node in _chain(source)):
        return "copied onto itself at every step, for it is written through a view of another dtype"
    made = root
    while _called(made) in WRITES:
        made = _root(made.args[0])
    if made is written and made is not root:
        return "cloned at every step, for a part of it is not written in place"
    return None


def _trace(node: Node) -> Optional[str]:
    """The stack of the code that a node comes from, or else what it reads: passes do not always hand it on."""
    nodes = [node, *(other for source in reversed(node.all_input_nodes) for other in _chain(source))]
    return next((other.stack_trace for other in nodes if other.stack_trace), None)


def _to_be_cloned(node: Node) -> list[Node]:
    """What a functional call of a mutating op or kernel will clone, now that Inductor has noted where it need not."""
    if node.target is torch.ops.higher_order.triton_kernel_wrapper_functional:
        return [node.kwargs["kwargs"][name] for name in node.kwargs["tensors_to_clone"]]
    if node.target is torch.ops.higher_order.auto_functionalized_v2:
        values = node.kwargs["_all_bases"]
        which = node.meta.get("only_clone_these_tensors", range(len(values)))
    elif node.target is torch.ops.higher_order.auto_functionalized:
        values, which = node.kwargs, node.meta.get("only_clone_these_tensors", ())
    else:
        return []
    cloned = [values[i] for i in which]
    return [value for each in cloned for value in (each if isinstance(each, (list, tuple)) else [each])]


def _written_in_place(node: Node) -> Optional[Node]:
    """The tensor that a functional call of a mutating op returns as written, if that will be the tensor itself."""
    call, index = node.args[:2]
    if call.target is not torch.ops.higher_order.auto_functionalized_v2:
        return None
    # the op's own results come first, one of them None if there are none
    base = index - max(1, len(call.args[0]._schema.returns))
    if base < 0 or base in call.meta.get("only_clone_these_tensors", (base,)):
        return None
    return call.kwargs["_all_bases"][base]


def _chain(node: Node) -> Iterator[Node]:
    """A tensor, what it is a view of, and so on."""
    while node is not None:
        yield node
        if _called(node) in VIEWS:
            node = node.args[0]
        elif node.target is operator.getitem:
            node = node.args[0] if _called(node.args[0]) in VIEWS else _written_in_place(node)
        else:
            node = None


def _root(node: Node) -> Node:
    """The tensor that a chain of views begins with."""
    return list(_chain(node))[-1]


def _called(node: Node) -> Optional[str]:
    """`select` for torch.ops.aten.select.int, None for what is no aten op."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return None
    return node.target._schema.name.split("::")[1]


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _place(value: torch.Tensor) -> tuple:
    return value.storage_offset(), value.size(), value.stride()
