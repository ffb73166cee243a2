"""One copy each way a step: small arrays to the device and results back, through pinned memory, without waiting."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4  # elements of int32: CUDA-graph trees copy inputs that do not start at a multiple of 16 bytes
IN_FLIGHT = 2  # copies that may be under way while the next one is prepared


class Upload:
    """Named int32 arrays side by side in one device tensor, `buffer`, which stays where it is.

    `begin` gives numpy arrays to fill, `send` brings all of them to the device in one copy. On a GPU the arrays lie in
    pinned memory that a copy under way still owns: `begin` waits for the copy before the last. On a CPU they are
    the buffer itself.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device):
        self.places, size = {}, 0
        for name, shape in shapes.items():
            self.places[name] = size, tuple(shape)
            size += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self.pinned = self.buffer.is_cuda
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(IN_FLIGHT)
                         ] if self.pinned else [self.buffer]
        self._arrays = [{name: self._part(memory, name).numpy() for name in shapes} for memory in self._staging]
        self._copied = [torch.cuda.Event() for _ in self._staging] if self.pinned else []
        self._turn = 0
        self.records = True  # an event costs the host several microseconds

    def _part(self, memory: Tensor, name: str) -> Tensor:
        start, shape = self.places[name]
        return memory[start : start + math.prod(shape)].view(shape)

    def view(self, name: str) -> Tensor:
        """The device's array of that name: a view, which a traced function makes anew from `buffer`."""
        return self._part(self.buffer, name)

    def fix(self, name: str, values: np.ndarray) -> None:
        """An array that is sent along with the others and never filled again."""
        for arrays in self._arrays:
            arrays[name][...] = values

    def begin(self) -> dict[str, np.ndarray]:
        """Arrays to fill, which hold what was sent some time before."""
        if self.pinned:
            self._turn = (self._turn + 1) % IN_FLIGHT
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        """Copies the arrays of the last `begin`, in the order of the current stream."""
        if self.pinned:
            self.buffer.copy_(self._staging[self._turn], non_blocking=True)
            if self.records:
                self._copied[self._turn].record()

    def sent_before(self, event) -> None:
        """For an owner that set `records` to False: `event` was recorded after the last `send`."""
        self._copied[self._turn] = event


class Download:
    """Results of one shape and dtype on their way back, IN_FLIGHT at a time."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device):
        self.pinned = torch.device(device).type == "cuda"
        self._landing = [torch.empty(shape, dtype=dtype, pin_memory=self.pinned) for _ in range(IN_FLIGHT)]
        self._arrays = [memory.numpy() for memory in self._landing]
        self._copied = [torch.cuda.Event() for _ in self._landing] if self.pinned else []
        self._turn = 0

    def start(self, result: Tensor) -> int:
        """Begins to copy `result`, which may be overwritten afterwards by work of the same stream. Returns a ticket."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        self._landing[self._turn].copy_(result, non_blocking=True)
        if self.pinned:
            self._copied[self._turn].record()
        return self._turn

    @property
    def event(self):
        """Recorded when the last `start` had begun its copy."""
        return self._copied[self._turn]

    def wait(self, ticket: int) -> np.ndarray:
        """What `start` was given; valid until IN_FLIGHT further copies have begun."""
        if self.pinned:
            self._copied[ticket].synchronize()
        return self._arrays[ticket]
