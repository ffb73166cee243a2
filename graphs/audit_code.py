"""Clones in what Inductor generates: in its last graph, by tensor, and in the text of the code, by size."""

import math
import re
from dataclasses import dataclass
from typing import Optional

import torch
from torch._inductor.graph import GraphLowering

ALLOCATION = re.compile(r"= empty_strided\w*\(\(([^)]*)\), \([^)]*\), torch\.(\w+)")
VIEWS = ("as_strided", "view", "reshape", "select", "slice", "squeeze", "unsqueeze", "permute", "transpose", "t",
         "expand", "alias", "split", "unbind", "diagonal", "detach")


@dataclass
class Clone:
    """A copy made at every run: of which tensor, how large, and the stack of the code that asked for it."""

    message: str
    tensor: str
    bytes: int
    elements: int
    dtype: torch.dtype
    trace: Optional[str]


def clones_left(lowering: GraphLowering, names: list[str]) -> list[Clone]:
    """Clones of mutated inputs in the graph that is turned into code, where every write in place has been settled.

    names: of the inputs of Dynamo's graph.
    """
    found = []
    for node in lowering.module.graph.nodes:
        if node.target is torch.ops.aten.clone.default:
            root = _root(node.args[0])
            if root.op == "placeholder" and root.name in lowering.mutated_inputs:
                value = node.meta["val"]
                found.append(Clone("cloned at every step, though it is written",
                                   _name(root, names), value.numel() * value.element_size(), value.numel(),
                                   value.dtype, node.stack_trace or root.stack_trace))
    return found


def large_allocations(lowering: GraphLowering, names: list[str], code: str, least: int,
                      known: list[Clone]) -> list[Clone]:
    """Allocations in `code`, but for the `known` clones, with dtype and size of a mutated input or of its storage.

    least: bytes of such an input.
    """
    inputs = [node for node in lowering.module.graph.nodes
              if node.op == "placeholder" and node.name in lowering.mutated_inputs]
    explained = [(clone.elements, clone.dtype) for clone in known]
    found = []
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
            if (value.dtype == dtype and value.numel() * value.element_size() >= least
                    and elements in (value.numel(), storage)):
                found.append(Clone(f"the generated code allocates ({shape}) {name}, as large as this tensor",
                                   _name(node, names), elements * value.element_size(), elements, dtype,
                                   node.stack_trace))
                break
    return found


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a chain of views begins with."""
    while (node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
           and node.target.namespace == "aten" and node.target._schema.name.split("::")[1] in VIEWS):
        node = node.args[0]
    return node


def _name(placeholder: torch.fx.Node, names: list[str]) -> str:
    """AOTAutograd reorders inputs and notes where each came from."""
    index = getattr(placeholder.meta.get("desc"), "idx", None)
    return names[index] if index is not None and index < len(names) else placeholder.name
