"""Which back end is faster for the calls that a decode step will make: found out before the step is compiled."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops import backends
from .decode_step import DecodeStep


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


def measure_back_ends(steps: list[DecodeStep]) -> None:
    """Times, for every op of the steps that has a choice on its device, the back ends at each step's own sizes.

    A step runs once, not compiled, on rows of padding, which change no state; the timed calls then run on pools of
    their own. Where there is no choice, as on a CPU, nothing runs. Layers of one kind have one geometry: one call each.
    """
    undecided = backends.undecided(steps[0].state.memory.device)
    for step in steps if undecided else ():
        compiled, step.run = step.run, {"greedy": step.greedy_step}
        try:
            with _Calls(undecided) as calls:
                step([], "greedy")
        finally:
            step.run = compiled
        for name, (args, kwargs) in calls.seen.items():
            backends.measure_alike(name, args, kwargs)
