"""The table of registered ops, which registration fills and dispatch reads."""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Callable, Optional, Union

import torch

NAMESPACE = "torch_replay"

# A Library that is garbage-collected takes its ops with it, and defining a name twice raises. importlib.reload keeps
# module globals, so a reload finds both of these in place.
if "LIBRARY" not in globals():
    LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
    OPS: dict[str, "Op"] = {}


@dataclass
class Op:
    """A registered op. `kernels` maps a device type to a callable, or to the dotted module that holds one of the
    op's name and is imported when the device is first dispatched to. `flashinfer` is the dotted module of a second CUDA
    kernel, if there is one; `backends` chooses. A device in `overridden` runs what `override_kernel` gave it."""

    name: str
    schema: str
    mutates: tuple[str, ...]
    body: Callable
    signature: inspect.Signature
    check_values: Optional[Callable]
    kernels: dict[str, Union[str, Callable]] = field(default_factory=dict)
    overload: Optional[torch._ops.OpOverload] = None
    out_overload: Optional[torch._ops.OpOverload] = None  # writes the caller's `out` in place of returning a tensor
    wrapper: Optional[Callable] = None
    flashinfer: Optional[str] = None
    inline_on_cpu: bool = False
    overridden: set[str] = field(default_factory=set)
    cursor_dims: Optional[int] = None
    written: tuple[int, ...] = ()  # places of `mutates` among the arguments
    pools: tuple[tuple[int, str], ...] = ()  # places and names of the arguments that may be lists, see layers.py
    layers_schema: str = ""
    layers_overload: Optional[torch._ops.OpOverload] = None  # takes lists for all of `pools`
    cursors: tuple[int, ...] = ()  # places of the cursors

    def __post_init__(self):
        names = list(self.signature.parameters)
        self.written = tuple(names.index(name) for name in self.mutates)
        if self.cursor_dims is not None:
            self.cursors = tuple(names.index(name) for name in ("ring_start", "ring_committed"))

    def overload_of(self, arguments: dict) -> torch._ops.OpOverload:
        """The overload that takes these arguments, by name."""
        lists = any(isinstance(arguments.get(name), (list, tuple)) for _, name in self.pools)
        return self.layers_overload if lists else self.overload

    def kernel(self, device: str) -> Callable:
        found = self.kernels[device]
        if isinstance(found, str):
            found = self.kernels[device] = getattr(importlib.import_module(found), self.name)
        return found
