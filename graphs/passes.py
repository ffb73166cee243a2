"""A post-grad pass for compiled steps: compilation fails where functionalisation left a clone of a persistent cache.

    torch.compile(step, fullgraph=True, options={"post_grad_custom_post_pass": NoCacheClones()})
"""

import inspect
from collections import defaultdict
from unittest import mock

import torch
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes import post_grad
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.fx_utils import FakeTensorUpdater
from torch.fx import Graph, GraphModule, Node

from . import audit_code, audit_finding
from .audit_code import bytes_of, clones_left
from .audit_finding import last_place


class CacheCloned(RuntimeError):
    """A compiled step would copy a persistent tensor at every run. The message names tensor, bytes and line."""


class NoCacheClones(CustomGraphPass):
    """Raises `CacheCloned`, as cause of Inductor's error, for clones of inputs that the graph writes.

    A persistent cache is an input that the graph writes, of at least `least` bytes. What counts as a clone, see
    `audit_code.clones_left`; one that the compiled code itself asks for by `clone()` does not. The graph is left as it
    is.

    Inductor runs passes of users before it decides which writes can be done in place, so that nothing can be seen in
    the graph that they get. This pass therefore lets Inductor decide on a copy of the graph, by its own passes, and
    looks at the copy. Its counter of missed chances could not replace that, for it stays at zero if one op writes two
    slices of one storage, of which one is cloned.

    A graph that comes from a compile cache is not looked at again, and need not be: `uuid` is part of the key, so that
    whatever is found under it was compiled with the same pass, which raised nothing, and an error leaves nothing in
    the cache. Whoever changes what the pass lets through changes these files, and with them the key.
    """

    def __init__(self, least: int = 0):
        self.least = least

    def __call__(self, graph: Graph) -> None:
        caches = [node.name for node in written_inputs(graph) if bytes_of(node.meta["val"]) >= self.least]
        if not caches:
            return
        own = {node.name for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)}
        clones = clones_left(settled(graph), caches, own)
        if clones:
            raise CacheCloned("; ".join(map(_describe, clones)))

    def uuid(self) -> str:
        files = (__file__, audit_code.__file__, audit_finding.__file__)
        return get_hash_for_files(files, f"least={self.least}").hex()


def written_inputs(graph: Graph) -> list[Node]:
    """Inputs that a graph writes: while it is functional, it does so by copies at its end."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [node.args[0] for node in copies if node.args[0].op == "placeholder"]


def settled(graph: Graph) -> Graph:
    """A copy of a graph as it is when passes of users run, with the passes applied that settle writes in place.

    The one that then puts clones and mutating ops into the graph traces each of them and takes as long as all the rest
    of a compilation without generated kernels; `clones_left` reads the decisions that it follows.
    """
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    module = GraphModule(graph.owning_module, copied)
    # it takes a graph in torch 2.11, a module later
    takes_module = "gm" in inspect.signature(FakeTensorUpdater).parameters
    updater = FakeTensorUpdater(module if takes_module else module.graph)
    for node in module.graph.nodes:
        if "val" not in node.meta:  # another pass added it
            updater.processed_hashes.discard(updater.hash_node(node))
    with mock.patch.object(ReinplaceCounters, "_values", defaultdict(int)):  # the graph itself will be counted
        post_grad.stable_topological_sort(module.graph)
        updater.incremental_update()
        reinplace_inplaceable_ops(updater, module.graph)
        if hasattr(post_grad, "fix_auto_functionalized_dtype_views"):  # not in torch 2.11
            post_grad.fix_auto_functionalized_dtype_views(module.graph)
    return module.graph


def _describe(clone: audit_code.Clone) -> str:
    file, line = last_place(clone.trace)
    where = f", from {file}:{line}" if file else ""
    return f"{clone.tensor}: {clone.bytes} bytes {clone.message}{where}"
