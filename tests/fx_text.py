"""The text of a traced graph without what says nothing: files, addresses, and names that a tracer makes up."""

import operator

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torch_replay.graphs.audit_code import input_names


def traced(fn, *args, functional: bool = False, dynamic: bool = False) -> tuple[Graph, dict[str, str]]:
    """Dynamo's graph of `fn(*args)`, and the names of its inputs in the source; functional: AOTAutograd's, in which
    what is written is returned and copied back."""
    found = []

    def keep(graph, inputs):
        found.extend((graph.graph, input_names(graph.graph)))
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, keep_inference_input_mutations=True) if functional else keep
    with torch.no_grad():
        torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)(*args)
    return tuple(found)


def text(graph: Graph, names: dict[str, str]) -> str:
    """One line a call. Inputs have the given names; without one they are p0, p1, ... in the order of their use, and so
    is a layer's slice `pool[layer]` of an input. Results are v0, v1, ..."""
    known: dict[Node, str] = {}
    lines = []

    def name(node: Node) -> str:
        if node not in known:
            known[node] = names.get(node.name, f"p{sum(each.startswith('p') for each in known.values())}")
        return known[node]

    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or _is_slice_of_input(node):
            continue
        args = [_show(map_arg(arg, name)) for arg in node.args]
        args += [f"{key}={_show(map_arg(value, name))}" for key, value in sorted(node.kwargs.items())]
        if node.op == "output":
            lines.append(f"return {args[0]}")
            continue
        known[node] = f"v{len(lines)}"
        lines.append(f"v{len(lines)} = {target(node)}({', '.join(args)})")
    return "\n".join(lines)


def target(node: Node) -> str:
    """`torch_replay.write_kv` for its overload, `getitem`, `.float` for a method."""
    if node.op == "call_method":
        return f".{node.target}"
    return str(node.target).removesuffix(".default") if isinstance(node.target, (
        torch._ops.OpOverload, torch._ops.HigherOrderOperator)) else node.target.__name__


def _is_slice_of_input(node: Node) -> bool:
    return (node.target is operator.getitem and node.args[0].op in ("placeholder", "get_attr")
            and isinstance(node.args[1], int))


def _show(value) -> str:
    """Node names without quotes."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_show, value)) + "]"
    if isinstance(value, torch._ops.OpOverload):
        return str(value).removesuffix(".default")
    return value if isinstance(value, str) else repr(value)
