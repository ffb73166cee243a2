"""Which back end is faster for the calls that a decode step will make: found out before the step is compiled."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops import backends
from .step import DecodeStep


class _Calls(TorchDispatchMode):
    """Notes the last call of each of `ops` while they run."""

    def __init__(self, ops: list[str]):
        super().__init__()
        self.ops, self.seen = {f"torch_replay::{name}": name for name in ops}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.OpOverload) and function.name() in self.ops:
            self.seen[self.ops[function.name()]] = args, kwargs
        return function(*args, **kwargs)


def measure_back_ends(decode: DecodeStep) -> None:
    """Times, for every op of the step that has a choice on its device, the back ends at the step's own sizes.

    The step runs once, not compiled, on rows of padding, which change no state; the timed calls then run on pools of
    their own. Where there is no choice, as on a CPU, nothing runs. Layers of one kind have one geometry: one call each.
    """
    undecided = backends.undecided(decode.state.memory.device)
    if not undecided:
        return
    compiled, decode.run = decode.run, {"greedy": decode.greedy_step}
    try:
        with _Calls(undecided) as calls:
            decode([], "greedy")
    finally:
        decode.run = compiled
    for name, (args, kwargs) in calls.seen.items():
        backends.measure_alike(name, args, kwargs)
