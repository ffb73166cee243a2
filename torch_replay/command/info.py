"""Facts for `torch-replay info`: versions, devices, and the kernel behind every op."""

import importlib.metadata
import json
import platform

import torch

from ..ops import OPS, backends
from ..ops.native import build
from ..ops.native import kernels as native

PACKAGES = ("torch", "triton", "flashinfer-python", "numpy", "safetensors", "tokenizers", "transformers")


def run(arguments) -> int:
    """Runs `info` on parsed arguments."""
    facts = describe()
    print(json.dumps(facts) if arguments.json else render(facts))
    return 0


def describe() -> dict:
    """Versions of the packages that matter, devices, for each op the kernels there are, and in "backends" which of them
    CUDA tensors get in this process and why (`ops.backends.describe`)."""
    from .. import __version__

    return {
        "torch_replay": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))],
        "threads": torch.get_num_threads(),
        "ops": {name: _kernels(op) for name, op in OPS.items()},
        "cpu_kernels": _native(),
        "backends": {name: backends.describe(name) for name in OPS},
    }


def render(facts: dict) -> str:
    """`describe()` as text."""
    lines = [f"torch_replay {facts['torch_replay']}, Python {facts['python']}"]
    lines += [f"  {name:<18} {version or 'not installed'}" for name, version in facts["packages"].items()]
    lines += ["devices", *(f"  {name}" for name in facts["devices"]), "ops (torch.ops.torch_replay) and their kernels"]
    width = max(len(name) for name in facts["ops"])
    for name, kernels in facts["ops"].items():
        lines.append(f"  {name:<{width}}  " + ", ".join(f"{device}: {kernel}" for device, kernel in kernels.items()))
    lines.append(f"C++ kernels for CPU tensors: {facts['cpu_kernels']}")
    lines.append("what CUDA tensors run")
    for name, choice in facts["backends"].items():
        lines.append(f"  {name:<{width}}  {choice['backend']} ({choice['why']})")
        lines += [f"  {'':<{width}}    not flashinfer: {n} x {reason}" for reason, n in choice["refused"].items()]
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels(op) -> dict[str, str]:
    found = {device: _kernel(kernel) for device, kernel in op.kernels.items()}
    if hasattr(native, op.name):
        found["cpu"] = f"C++, {found['cpu']}"
    return found | ({"flashinfer": op.flashinfer} if op.flashinfer else {})


def _native() -> str:
    return "compiled" if build.library() is not None else f"none ({build.problem}), reference kernels serve"


def _kernel(kernel) -> str:
    module = kernel if isinstance(kernel, str) else kernel.__module__
    return "reference (torch)" if module.endswith(".naive") else module
