"""A place in the source that breaks a rule of the audit."""

import contextlib
import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch

from ..ops import registry

_NOT_USERS = (str(Path(torch.__file__).parent), contextlib.__file__, str(Path(__file__).parent / "audit"),
              str(Path(registry.__file__).parent))


@dataclass
class Finding:
    """One place that breaks a rule: what, in which file and line, and where it applies the tensor and its bytes."""

    message: str
    file: Optional[str] = None
    line: Optional[int] = None
    code: str = ""
    tensor: Optional[str] = None
    bytes: Optional[int] = None

    @classmethod
    def at(cls, message: str, file: Optional[str], line: Optional[int], **details) -> "Finding":
        return cls(message, file, line, linecache.getline(file, line).strip() if file else "", **details)


def first_line(text: str) -> str:
    return (text.strip() or "no message").splitlines()[0]


def last_place(trace: Optional[str]) -> tuple[Optional[str], Optional[int]]:
    """File and line of the innermost frame in a printed stack that the user wrote."""
    found = [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace or "")
             if is_users(file)]
    return found[-1] if found else (None, None)


def is_users(file: str) -> bool:
    """False for the code of torch, of the audit, and of the wrappers that ops are called through."""
    return not file.startswith(_NOT_USERS)
