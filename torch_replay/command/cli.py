"""Runs what `torch_replay_command` has parsed, and turns errors of the user's and of other ranks into one line."""

import importlib
import os
import sys

from ..engine.parallel import RankFailure
from .options import UserError


def run(arguments) -> int:
    """Runs the command of parsed `arguments`; returns its exit status, see `torch_replay_command.main`."""
    try:
        return importlib.import_module(f".{arguments.command}", __package__).run(arguments)
    except UserError as error:
        print(f"torch-replay: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"torch-replay: rank {os.environ['RANK']} stops: {failure}", file=sys.stderr)
        return 1
