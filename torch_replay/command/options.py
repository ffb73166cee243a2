"""What several commands share: devices, models, and the error for what a user gave."""

import re
from pathlib import Path

import torch


class UserError(Exception):
    """Something the user gave cannot be used; the message is the one line that they see."""


# field that an engine's message may name -> the flag that set it
FLAGS = {"num_spec": "--spec", "max_num_seqs": "--batch", "prefix_cache": "--prefix-cache", "replay": "--no-replay",
         "dtype": "--dtype", "state_dtype": "--state-dtype", "prompt_ids": "PROMPT", "max_tokens": "--max-tokens",
         "temperature": "--temperature", "top_k": "--top-k", "top_p": "--top-p", "stop": "--stop", "seed": "--seed"}


def in_flags(message: str) -> str:
    """An engine's message about a field, which it names first, as one about the flag."""
    field = re.match(r"\w+", message)
    return message if field is None else FLAGS.get(field[0], field[0]) + message[field.end():]


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
