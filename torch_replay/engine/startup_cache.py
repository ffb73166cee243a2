"""What the compiler made at an earlier start, kept in the user's cache folder, so that the next start need not.

One file per device, versions of this package, torch and Triton, configuration and op schemas: the compiler's own keys
do not see schemas, so a file must not outlive a change of theirs. A file starts with the SHA-256 of the rest. It holds
pickled data, as the compiler's own caches do: it is as trustworthy as the folder that it lies in.
"""

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import torch
from torch._dynamo.utils import counters

from ..ops.backends import installed
from ..ops.registry import OPS

SWITCH = "TORCH_REPLAY_STARTUP_CACHE"  # environment variable; "0" turns the cache off
DIGEST_BYTES = 32


def cache_folder() -> Path:
    """`torch_replay` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_replay"


def cache_file(device: torch.device, *configurations) -> Path:
    """Where the artifacts of a start on `device` lie; configurations: anything whose repr tells it from others."""
    from .. import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    schemas = sorted(op.schema + op.layers_schema for op in OPS.values())
    parts = (device.type, name, __version__, torch.__version__, _triton_version(), configurations, schemas)
    return cache_folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.bin"


def _triton_version() -> Optional[str]:
    if not installed("triton"):
        return None
    import triton

    return triton.__version__


@contextlib.contextmanager
def reused(path: Path) -> Iterator[None]:
    """Within the block, what `path` holds need not be compiled again; what was compiled anew is added to the file.

    A file that is missing is made, one that is damaged is ignored with a warning and replaced. Nothing else than the
    time of the block depends on it.
    """
    if os.environ.get(SWITCH) == "0":
        yield
        return
    sound = _load(path)
    misses = counters["inductor"]["fxgraph_cache_miss"]
    yield
    if not sound or counters["inductor"]["fxgraph_cache_miss"] > misses:
        _store(path)


def _load(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        warnings.warn(f"start-up cache {path} cannot be read ({error}); compiling anew", stacklevel=4)
        return False
    digest, artifacts = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(artifacts).digest() != digest:
        warnings.warn(f"start-up cache {path} is damaged; compiling anew", stacklevel=4)
        return False
    return torch.compiler.load_cache_artifacts(artifacts) is not None


def _store(path: Path) -> None:
    """Writes beside the file and renames, so that another process never reads half of it."""
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        return
    artifacts = saved[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(artifacts).digest() + artifacts)
        os.replace(name, path)
    except OSError as error:
        warnings.warn(f"start-up cache {path} cannot be written ({error})", stacklevel=4)
