"""Where an engram table lies: on the device, in pinned host memory, or in a file that is read row by row.

A table is `weight [R, D]` (16-bit or float32, or float8_e4m3fn with `scales [R, D / 32]` uint8 exponents), as
`ops.engram_lookup` takes it. `EngramStore.place` puts one into a model.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from .. import ops

SCALED = 32  # values of a float8 row that share one exponent
LARGEST = 448.0  # of float8_e4m3fn
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
           "U8": torch.uint8}


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """[R, D] -> float8_e4m3fn [R, D] and exponents uint8 [R, D / 32]: the smallest power of two that holds each group.

    Raises ValueError unless D is a multiple of 32.
    """
    if values.dim() != 2 or values.shape[1] % SCALED:
        raise ValueError(f"values: got shape {list(values.shape)}, expected [rows, a multiple of {SCALED}]")
    groups = values.float().unflatten(1, (-1, SCALED))
    # frexp: amax / 448 = mantissa * 2^exponent with mantissa in [1/2, 1), so 2^exponent is just large enough
    mantissa, exponent = torch.frexp(groups.abs().amax(-1) / LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    rows = torch.ldexp(groups, -exponent[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return rows, (exponent + 127).to(torch.uint8)


@dataclass
class DeviceTable:
    """A table in the memory of the device that looks it up."""

    weight: Tensor
    scales: Optional[Tensor] = None

    def lookup(self, rows: Tensor) -> Tensor:
        """rows [tokens, columns] -> [tokens, columns, D]; see `ops.engram_lookup`."""
        return ops.engram_lookup(self.weight, self.scales, rows)

    def needs_prefetch(self, device: torch.device) -> bool:
        """Whether a step on `device` cannot look rows up itself, so that the host must fetch them before it."""
        return False


class PinnedTable(DeviceTable):
    """A table in pinned host memory, which a CUDA kernel reads over the bus: only rows asked for travel.

    `weight` and `scales` are CUDA tensors over the pinned memory (unified addressing gives it one address on both
    sides), so that a compiled step sees a table like any other and CUDA graphs need no exception for CPU tensors.
    """

    def __init__(self, weight: Tensor, scales: Optional[Tensor] = None, device="cuda"):
        given = [value for value in (weight, scales) if value is not None]
        self.host = [value.cpu().contiguous().pin_memory() for value in given]
        super().__init__(*(_device_view(value, torch.device(device)) for value in self.host))


class _Exported:
    """An address in the form in which torch takes over another library's device memory."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor  # must outlive every view
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() * tensor.itemsize,), "typestr": "|u1", "data": (tensor.data_ptr(), False),
            "version": 2}


def _device_view(pinned: Tensor, device: torch.device) -> Tensor:
    """A CUDA tensor over the memory of a pinned one."""
    flat = torch.as_tensor(_Exported(pinned), device=device)
    if flat.data_ptr() != pinned.data_ptr():
        raise RuntimeError(f"pinned memory: got a copy on {flat.device}, expected a view (unified addressing)")
    return flat.view(pinned.dtype).view(pinned.shape)


class MappedTable(DeviceTable):
    """A table in a safetensors file, mapped into memory and never read as a whole: it may exceed all memory there is.

    On a CPU it serves like any table: a lookup reads the pages of its rows. A GPU cannot read it: there the engine
    fetches the rows of a step on the host before the step begins (`graphs.engram.HostPrefetch`), and `lookup` by itself
    waits for the row ids, gathers on the host and copies the result.

    Args:
        path: the file. name, scales_name: its tensors; scales_name None for a table that is not float8.

    Raises:
        FileNotFoundError without the file; ValueError if it is no safetensors file, lacks a tensor, or holds it in
        another dtype than a table has.
    """

    def __init__(self, path: str | Path, name: str, scales_name: Optional[str] = None):
        path = Path(path)
        self.path, self.name = path, name
        begin, header = _read_header(path)
        keys = (name, scales_name)
        super().__init__(*(None if key is None else _map_tensor(path, begin, header, key) for key in keys))

    def lookup(self, rows: Tensor) -> Tensor:
        found = ops.engram_lookup(self.weight, self.scales, rows.cpu())
        return found.to(rows.device)

    def needs_prefetch(self, device: torch.device) -> bool:
        return device.type != "cpu"


def _read_header(path: Path) -> tuple[int, dict]:
    """Offset of a safetensors file's data, and its description: an 8-byte length, JSON of that length, the data."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, expected a safetensors file")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path}: got a header of {size} bytes, expected a safetensors file")
        try:
            return 8 + size, json.loads(file.read(size))
        except ValueError as error:
            raise ValueError(f"{path}: not readable as safetensors ({error})") from error


def _map_tensor(path: Path, begin: int, header: dict, name: str) -> Tensor:
    if name not in header:
        raise ValueError(f"{path}: got no tensor {name}, expected one of {sorted(set(header) - {'__metadata__'})}")
    entry = header[name]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: {name}: got dtype {entry['dtype']}, expected one of {', '.join(_DTYPES)}")
    first, end = (begin + offset for offset in entry["data_offsets"])
    if end > path.stat().st_size:
        raise ValueError(f"{path}: {name}: got a file of {path.stat().st_size} bytes, expected {end} or more")
    mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=first, shape=(end - first,))
    with warnings.catch_warnings():  # torch knows no read-only tensors; nothing here writes
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(mapped).view(_DTYPES[entry["dtype"]]).view(entry["shape"])
