"""Which kernel serves a CUDA call of an op: Triton (our own), FlashInfer, or the plain torch reference.

    set_backend("triton")                                   # every op, until further notice
    with set_backend("flashinfer", ["mamba2_replay"]):      # one op, within the block
        ...

CPU tensors run the C++ kernels of `native` where it has one that takes the call, and the reference elsewhere, or
everywhere under "naive". "auto", the default, runs what `measure` found fastest for the
sizes at hand, and without a measurement Triton, or where Triton is not installed FlashInfer or the reference. A call
that FlashInfer cannot serve goes to Triton without an error; `describe` counts such calls and says why. A CUDA graph
replays the kernels that it recorded: choose, and measure, before compiled steps are warmed up.

A module that `register(flashinfer=...)` names holds, for an op `name`,
    name            the kernel, with the calling convention of every kernel;
    name_limits     keyword arguments of the op -> None, or why FlashInfer cannot serve this call;
    name_key        keyword arguments -> (sizes, build): `build` tells apart what FlashInfer compiles separately, both
                    together what is worth measuring separately;
    name_scratch    keyword arguments -> those of a call of the same key whose pools are small and its own and whose
                    rows are all live: what a warm-up times for a call on rows of padding.
Limits and key look at shapes, dtypes, strides and addresses only, never at values, which would stop the host.
"""

import functools
import importlib
import importlib.util
import statistics
import sys
import warnings
from collections import Counter
from typing import Any, Callable, Iterable, Optional, Union

import torch

from .table import OPS

NAMES = ("auto", "triton", "flashinfer", "naive")
MEASURED_DEVICES = ("cuda",)  # types of device on which there is a choice

_choices: dict[Optional[str], str] = {None: "auto"}  # by op; None: the ops without an entry of their own
_measured: dict[str, dict[tuple, dict[str, float]]] = {}  # by op and key: microseconds of each back end
_refused: Counter = Counter()  # (op, reason) of calls that asked for FlashInfer and got something else
_broken: dict[tuple, str] = {}  # (op, build): why FlashInfer failed
_proven: set[tuple] = set()  # (op, build) that FlashInfer has run


class _Scope:
    """What `set_backend` returns: as a context manager it puts the earlier choices back."""

    def __init__(self, saved: dict):
        self.saved = saved

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception) -> None:
        _choices.clear()
        _choices.update(self.saved)


def set_backend(name: str, ops: Union[str, Iterable[str], None] = None) -> _Scope:
    """Chooses the back end of CUDA calls, for the process, or within a `with` block for as long as it lasts.

    Args:
        name: "auto", "triton", "flashinfer" or "naive". With "flashinfer", calls and ops that it cannot serve run as
            under "auto".
        ops: names of the ops concerned. None: all of them, which drops choices made for single ops.

    Raises:
        ValueError: unknown back end or op; a back end that is not installed, or that an op in `ops` does not have.
    """
    if name not in NAMES:
        raise ValueError(f"set_backend: name is {name!r}, expected one of {', '.join(NAMES)}")
    names = None if ops is None else [ops] if isinstance(ops, str) else list(ops)
    for op in names or ():
        if op not in OPS:
            raise ValueError(f"set_backend: ops names {op!r}, expected some of {', '.join(sorted(OPS))}")
        if not _has(OPS[op], name):
            having = [other.name for other in OPS.values() if _has(other, name)]
            raise ValueError(f"set_backend: {op} has no {name} kernel, expected some of {', '.join(having) or 'none'}")
    if name in ("triton", "flashinfer") and (missing := _why_missing(name)):
        raise ValueError(f"set_backend: name is {name!r}, but {missing}")
    scope = _Scope(dict(_choices))
    if names is None:
        _choices.clear()
        _choices[None] = name
    else:
        _choices.update(dict.fromkeys(names, name))
    return scope


def installed(package: str) -> bool:
    """Whether `import package` would find something; imports nothing."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _why_missing(package: str) -> Optional[str]:
    if not installed(package):
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken installation can raise anything
        return f"importing {package} failed: {_first_line(error)}"
    return None


def _has(op, name: str) -> bool:
    if name == "flashinfer":
        return op.flashinfer is not None
    return name != "triton" or op.kernels["cuda"] is not op.kernels["cpu"]


def _default(op) -> str:
    """The back end of `op` where nothing was chosen or measured."""
    if not isinstance(op.kernels["cuda"], str) or installed("triton"):
        return "triton"  # for an op without Triton kernels this is the reference: kernels["cuda"] holds it
    return "flashinfer" if op.flashinfer and installed("flashinfer") else "naive"


def own_kernel(name: str) -> Callable:
    """The kernel of op `name` that serves what FlashInfer cannot: Triton where installed, else the reference."""
    op = OPS[name]
    return op.kernel("cuda" if _default(op) == "triton" else "cpu")


def chosen(name: str) -> str:
    """What `set_backend` chose for op `name`."""
    return _choices.get(name) or _choices[None]


def select(op, args: tuple, kwargs: dict) -> Callable:
    """The kernel for one CUDA call. Runs at every eager call, so the usual way through is two dict lookups."""
    if "cuda" in op.overridden:
        return op.kernels["cuda"]
    choice = chosen(op.name)
    if choice == "auto" or (choice == "flashinfer" and op.flashinfer is None):
        choice = _default(op)
        if op.name in _measured:
            times = _measured[op.name].get(_key(op, _arguments(op, args, kwargs)), {choice: 0.0})
            choice = min(times, key=times.get)
    if choice == "flashinfer":
        return _flashinfer(op, _arguments(op, args, kwargs))
    return op.kernel("cpu" if choice == "naive" else "cuda")


@functools.cache
def _defaults(op_name: str) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in OPS[op_name].signature.parameters.items()}


def _arguments(op, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments by name, defaults filled in: the dispatcher drops those that equal the default."""
    defaults = _defaults(op.name)
    return {**defaults, **dict(zip(defaults, args)), **kwargs}


def _key(op, arguments: dict) -> tuple:
    return getattr(importlib.import_module(op.flashinfer), f"{op.name}_key")(**arguments)


def _why_not(op, arguments: dict) -> Optional[str]:
    """Why FlashInfer cannot serve the call, from what is known before it is tried."""
    if not installed("flashinfer"):
        return "flashinfer is not installed"
    limit = getattr(importlib.import_module(op.flashinfer), f"{op.name}_limits")(**arguments)
    return limit or _broken.get((op.name, _key(op, arguments)[1]))


def _flashinfer(op, arguments: dict) -> Callable:
    reason = _why_not(op, arguments)
    if reason is not None:
        _refused[op.name, reason] += 1
        return own_kernel(op.name)
    build = _key(op, arguments)[1]
    kernel = getattr(importlib.import_module(op.flashinfer), op.name)
    return kernel if (op.name, build) in _proven else functools.partial(_first_call, op, kernel, build)


def _first_call(op, kernel: Callable, build, *args, **kwargs) -> None:
    """FlashInfer compiles on the first call of a build, which may fail for want of a compiler: nothing is written then,
    so that our own kernel can take over, for good."""
    try:
        kernel(*args, **kwargs)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the device's fault, not the back end's
    except Exception as error:
        _broken[op.name, build] = reason = f"FlashInfer failed: {_first_line(error)}"
        _refused[op.name, reason] += 1
        warnings.warn(f"{op.name}: {reason}; another kernel takes over", stacklevel=2)
        own_kernel(op.name)(*args, **kwargs)
    else:
        _proven.add((op.name, build))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def measure(name: str, args: tuple, kwargs: Optional[dict] = None, *, repeats: int = 20) -> Optional[str]:
    """Times the back ends of op `name` on one call and remembers the fastest for "auto". For warm-up, never in a step.

    Args:
        args, kwargs: the op's arguments, valid as for a call. What the op mutates is copied first, so nothing is
            written, but the copy takes memory: pass small pools.
        repeats: timed calls per back end; the median counts.

    Returns:
        The fastest back end, or None where there is nothing to choose: on a CPU, or with one back end only.
    """
    op = OPS[name]
    arguments = _arguments(op, tuple(args), kwargs or {})
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    if device.type not in MEASURED_DEVICES:
        return None
    return _measure(op, arguments, functools.partial(median_us, repeats=repeats, device=device))


def undecided(device: torch.device) -> list[str]:
    """Ops whose back end on `device` is for a measurement to choose: "auto", and both Triton and FlashInfer there."""
    if device.type not in MEASURED_DEVICES or not installed("flashinfer"):
        return []
    return [op.name for op in OPS.values() if op.flashinfer and _default(op) == "triton"
            and chosen(op.name) == "auto"]


def measure_alike(name: str, args: tuple, kwargs: dict) -> Optional[str]:
    """`measure` for calls like this one, on scratch pools: of the call's tensors only inputs are read, none written."""
    op = OPS[name]
    arguments = _arguments(op, args, kwargs)
    if _why_not(op, arguments):
        return None
    return measure(name, (), getattr(importlib.import_module(op.flashinfer), f"{name}_scratch")(**arguments))


def _measure(op, arguments: dict, timer: Callable[[Callable], float]) -> Optional[str]:
    if op.flashinfer is None or _default(op) != "triton" or _why_not(op, arguments):
        return None
    build = _key(op, arguments)[1]
    # through _first_call, which notes a failed build
    flashinfer = functools.partial(_first_call, op, getattr(importlib.import_module(op.flashinfer), op.name), build)
    times = {name: timer(_scratch_call(op, kernel, arguments))
             for name, kernel in (("flashinfer", flashinfer), ("triton", op.kernel("cuda")))}
    if (op.name, build) in _broken:
        return None
    _measured.setdefault(op.name, {})[_key(op, arguments)] = times
    return min(times, key=times.get)


def _scratch_call(op, kernel: Callable, arguments: dict) -> Callable[[], None]:
    """A call of the kernel on copies of what it mutates, strides kept."""
    def copy(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)

    given = {k: copy(v) if k in op.mutates and v is not None else v for k, v in arguments.items()}
    kinds = {name: parameter.kind for name, parameter in op.signature.parameters.items()}
    args = [value for name, value in given.items() if kinds[name] != kinds[name].KEYWORD_ONLY]
    kwargs = {name: value for name, value in given.items() if kinds[name] == kinds[name].KEYWORD_ONLY}

    def call() -> None:
        out = op.body(*args, **kwargs)
        kernel(*args, **kwargs, **({} if out is None else {"out": out}))

    return call


def median_us(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median microseconds of device time of `call`, which must take the host less than 20 ms / repeats."""
    with torch.cuda.device(device):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        # the device sleeps (about 20 ms) while the host queues the calls: events then bracket device time, not host's
        torch.cuda._sleep(40_000_000)
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in events)


def describe(name: str) -> dict:
    """What a CUDA call of op `name` runs and why: {"backend", "why", "measured", "refused"}, for `torch-replay info`.

    measured: sizes won by each back end; refused: calls that FlashInfer could not serve, by reason.
    """
    op = OPS[name]
    choice = chosen(name)
    backend, why = (_default(op), "auto") if choice == "auto" else (choice, "chosen")
    if backend == "flashinfer" and op.flashinfer is None:
        backend, why = _default(op), "chosen flashinfer has no kernel"
    if backend == "triton" and not _has(op, "triton"):
        backend, why = "naive", f"{why}, no Triton kernel"
    elif backend == "naive" and choice == "auto":
        why = "auto, triton is not installed"
    elif choice == "auto" and op.flashinfer:
        why = "auto, not measured" if installed("flashinfer") else "auto, flashinfer is not installed"
    wins = Counter(min(times, key=times.get) for times in _measured.get(name, {}).values())
    if wins and choice == "auto":
        why = "auto, fastest by size: " + ", ".join(f"{winner} at {count}" for winner, count in wins.items())
    refused = {reason: count for (refused_op, reason), count in _refused.items() if refused_op == name}
    return {"backend": backend, "why": why, "measured": dict(wins), "refused": refused}


def reset() -> None:
    """Forgets choices, measurements and what FlashInfer could not do."""
    _choices.clear()
    _choices[None] = "auto"
    for remembered in (_measured, _refused, _broken, _proven):
        remembered.clear()
