"""Copies to the device and back: layout, what a copy under way still owns, what the arrays hold."""

import numpy as np
import pytest
import torch

from torch_replay.graphs.transfer import IN_FLIGHT, Download, Upload

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
SHAPES = {"count": (1,), "ids": (3, 5), "nothing": (0, 4), "lens": (3,)}


def filled(upload: Upload, value: int) -> None:
    arrays = upload.begin()
    for place, (name, array) in enumerate(arrays.items()):
        array[...] = value + place
        assert array.shape == SHAPES[name] and array.dtype == np.int32
    upload.send()


@pytest.mark.parametrize("device", DEVICES)
def test_upload(device):
    """Every array arrives at a place of its own, at a multiple of 16 bytes, in one tensor that never moves."""
    upload = Upload(SHAPES, device)
    at = upload.buffer.data_ptr()
    for value in (10, 20, 30):
        filled(upload, value)
        for place, (name, shape) in enumerate(SHAPES.items()):
            assert torch.equal(upload.view(name).cpu(), torch.full(shape, value + place, dtype=torch.int32))
            assert (upload.view(name).data_ptr() - at) % 16 == 0 or not upload.view(name).numel()
    assert upload.buffer.data_ptr() == at


@pytest.mark.parametrize("device", DEVICES[1:])
def test_copies_under_way_keep_their_memory(device):
    """Uploads and downloads behind a busy device: each step reads what was sent for it, not what was sent later."""
    upload, download = Upload({"value": (1,)}, device), Download((1,), torch.int32, device)
    busy = torch.randn(4096, 4096, device=device)
    got, tickets = [], []
    for step in range(6):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        upload.begin()["value"][0] = step
        upload.send()
        tickets.append(download.start(upload.view("value") * 3))
        if len(tickets) == IN_FLIGHT:
            got.append(int(download.wait(tickets.pop(0))[0]))
    got += [int(download.wait(ticket)[0]) for ticket in tickets]
    assert got == [0, 3, 6, 9, 12, 15]


@pytest.mark.parametrize("device", DEVICES)
def test_download(device):
    """A result is there until as many more have begun, whatever happens to the tensor that it came from."""
    download = Download((2, 2), torch.int32, device)
    source = torch.ones(2, 2, dtype=torch.int32, device=device)
    first = download.start(source)
    source.fill_(2)
    second = download.start(source)
    source.fill_(3)
    assert download.wait(first).tolist() == [[1, 1], [1, 1]]
    assert download.wait(second).tolist() == [[2, 2], [2, 2]]
    assert download.wait(download.start(source)).tolist() == [[3, 3], [3, 3]]
