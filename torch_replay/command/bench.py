"""`torch-replay bench`: finds the scripts in the clone's `benchmarks/` folder and runs them.

The scripts do not install: what they measure and how is part of the source, not of the library. They capture CUDA
graphs by hand, too, which nothing that installs may do.
"""

import importlib
import json
import shlex
import sys
import types
from pathlib import Path

import torch

from .options import UserError, find_device

PACKAGE = "torch_replay_benchmarks"
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def folder() -> Path:
    """Where the scripts lie: beside this package if it runs from the clone, or in the clone that holds the current
    folder, whose package may be installed elsewhere."""
    here = Path.cwd()
    clones = [place / "benchmarks" for place in (here, *here.parents) if (place / "torch_replay/command").is_dir()]
    return next((found for found in (FOLDER, *clones) if (found / "ops.py").is_file()), FOLDER)


def load(name: str) -> types.ModuleType:
    """Script `name` of the benchmarks folder, which is imported under a package name of its own.

    Raises FileNotFoundError where the folder is not there.
    """
    scripts = folder()
    if not (scripts / f"{name}.py").is_file():
        raise FileNotFoundError(f"no {name}.py in {scripts}: benchmarks run from a clone of the repository, they are "
                                "not part of the installed package")
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(scripts)]
        sys.modules[PACKAGE] = package
    return importlib.import_module(f"{PACKAGE}.{name}")


def run(arguments) -> int:
    """Runs `bench` on parsed arguments."""
    arguments.quiet = arguments.json or not sys.stderr.isatty()
    arguments.command = shlex.join(["torch-replay", *sys.argv[1:]])
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
        print(f"torch-replay: measures on {arguments.device} (--device)", file=sys.stderr)
    find_device(arguments.device)
    try:
        script = load(arguments.benchmark.replace("-", "_"))
    except FileNotFoundError as error:
        raise UserError(str(error)) from None
    result = script.run(arguments)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report = load("report") if arguments.benchmark == "ops" else script
    print(json.dumps(result) if arguments.json else report.table(result))
    if getattr(arguments, "plot", None) and not report.plot(result, Path(arguments.plot)):
        print("torch-replay: no plot, matplotlib is not installed", file=sys.stderr)
    return 0
