"""What several commands share: checked flag values, devices, models, and the error for what a user gave."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch


class UserError(Exception):
    """Something the user gave cannot be used; the message is the one line that they see."""


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low or (high is not None and value > high):
            limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise argparse.ArgumentTypeError(f"{text!r}, expected an integer {limit}")
        return value

    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            limit = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
            raise argparse.ArgumentTypeError(f"{text!r}, expected a number {limit}")
        return value

    return parse


def find_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device to run on. local_rank: which of its machine's ranks this is, each with a GPU of its own."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: unknown, expected cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: not supported, expected cpu or cuda")
    if device.type == "cuda" and local_rank is not None:
        if device.index is not None:
            raise UserError(f"--device {name}: expected cuda under torchrun, where each rank takes a device of its own")
        device = torch.device("cuda", local_rank)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= count):
        raise UserError(f"--device {device}: this machine has no such device ({count} CUDA devices); "
                        "--device cpu runs anywhere")
    return device


def load_model(folder: str | None, device: torch.device, dtype: torch.dtype = torch.float32):
    from ..models import HybridModel, load_tokenizer, small_model_dir

    folder = small_model_dir() if folder is None else Path(folder)
    try:
        model = HybridModel.from_pretrained(folder, device, dtype)
        return model.requires_grad_(False), load_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {error}") from None
