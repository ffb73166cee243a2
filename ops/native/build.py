"""Compiles the C++ kernels of this folder, once, and calls them. They need what torch.compile needs: a C++ compiler.

The library lies in the user's cache folder under a name that holds the sources, the compiler and the processor, so that
the second start finds it. Kernels know nothing of torch: they get addresses, sizes and strides, and no header of torch
is read, which would take the compiler ten times as long.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from array import array
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

SWITCH = "TORCH_REPLAY_NATIVE"  # environment variable; "0" leaves CPU tensors to the reference kernels
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4, torch.bool: 5,
          torch.uint8: 5, torch.int8: 5}
DIMS = 5
NOTHING = (0,) * (2 + 2 * DIMS)


def compiler() -> Optional[str]:
    """The C++ compiler: $CXX, or the first of c++, g++ and clang++ on the path."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None)


@functools.cache
def library() -> Optional[ctypes.CDLL]:
    """The kernels; None without a compiler that takes them, and then `problem` says why."""
    global problem
    if os.environ.get(SWITCH) == "0":
        problem = f"{SWITCH} is 0"
        return None
    found = compiler()
    if found is None:
        problem = "no C++ compiler was found"
        return None
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    path = _library_path(found, sources)
    try:
        if not path.exists():
            _compile(found, sources, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        problem = f"{found} failed: {said.strip().splitlines()[0] if said.strip() else error}"
        return None


problem: Optional[str] = None


def _library_path(found: str, sources: list[Path]) -> Path:
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60).stdout
    parts = [version, _processor(), *FLAGS, *(source.read_text() for source in _read(sources))]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_replay"
    return folder / f"native-{name}.so"


def _read(sources: list[Path]) -> list[Path]:
    return [*sources, *sorted(Path(__file__).parent.glob("*.h"))]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return torch.backends.cpu.get_cpu_capability()


def _compile(found: str, sources: list[Path], path: Path) -> None:
    """One object a source, side by side, linked into `path`, which appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        for openmp in (("-fopenmp",), ("-fopenmp-simd",)):  # threads where the compiler has them
            built = Path(scratch) / "built.so"
            objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
            jobs = [subprocess.Popen([found, *FLAGS, *openmp, "-c", str(source), "-o", str(target)],
                                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                    for source, target in zip(sources, objects, strict=True)]
            failed = [(job, error) for job in jobs if ((error := job.communicate()[1]) is not None) and job.returncode]
            if not failed:
                subprocess.run([found, "-shared", *openmp, *map(str, objects), "-o", str(built)], check=True,
                               capture_output=True, text=True, timeout=300)
                os.replace(built, path)
                return
        job, error = failed[0]
        raise subprocess.CalledProcessError(job.returncode, job.args, stderr=error)


def call(name: str, tensors: tuple[Optional[Tensor], ...], integers: tuple[int, ...] = (),
         floats: tuple[float, ...] = ()) -> bool:
    """Runs the kernel `name`. False, and nothing done, if there is no library, a tensor's dtype is none of DTYPES, or
    the kernel refuses the values of its arguments."""
    kernels = library()
    if kernels is None:
        return False
    packed = array("q")
    for tensor in tensors:
        if tensor is None:
            packed.extend(NOTHING)
            continue
        code, gap = DTYPES.get(tensor.dtype), (0,) * (DIMS - tensor.dim())
        if code is None:
            return False
        packed.extend((tensor.data_ptr(), code, *tensor.shape, *gap, *tensor.stride(), *gap))
    whole, real = array("q", integers or (0,)), array("d", floats or (0.0,))
    refused = getattr(kernels, name)(*(ctypes.c_void_p(part.buffer_info()[0]) for part in (packed, whole, real)),
                                     ctypes.c_int(torch.get_num_threads()))
    return not refused
