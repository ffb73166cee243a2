"""`torch-replay bench`: finds the scripts in the clone's `benchmarks/` folder and runs them.

The scripts do not install: what they measure and how is part of the source, not of the library. They capture CUDA
graphs by hand, too, which nothing that installs may do.
"""

import argparse
import importlib
import json
import shlex
import sys
import types
from pathlib import Path

from .options import UserError, find_device, integer

PACKAGE = "torch_replay_benchmarks"
GEOMETRIES = ("nemotron-h", "qwen3-next", "tiny-mamba2", "tiny-gdn")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> types.ModuleType:
    """Script `name` of the benchmarks folder, which is imported under a package name of its own.

    Raises FileNotFoundError where the folder is not there.
    """
    if not (FOLDER / f"{name}.py").is_file():
        raise FileNotFoundError(f"no {name}.py in {FOLDER}: benchmarks run from a clone of the repository, they are "
                                "not part of the installed package")
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(FOLDER)]
        sys.modules[PACKAGE] = package
    return importlib.import_module(f"{PACKAGE}.{name}")


def add_parser(commands) -> None:
    """Adds `bench` to the command line's subparsers."""

    bench = commands.add_parser("bench", help="measure the ops (needs a clone)", description=(
        "Runs the scripts in the clone's benchmarks folder."))
    which = bench.add_subparsers(dest="benchmark", required=True)
    ops = which.add_parser("ops", help="time of every decode op, beside its peers", description=(
        "Times the decode ops over full flush cycles. Peers that are installed are timed along."))
    ops.add_argument("--batch", type=integer(1), nargs="+", default=[1, 8, 64, 256], metavar="N",
                     help="batch sizes (1 8 64 256)")
    ops.add_argument("--geometry", nargs="+", metavar="G", choices=GEOMETRIES,
                     help="models (cuda: nemotron-h qwen3-next, cpu: tiny-mamba2 tiny-gdn)")
    ops.add_argument("--quick", action="store_true", help="float32 states and one token only")
    ops.add_argument("--seconds", type=_positive, default=0.03, metavar="S", help="time of one run of a row (0.03)")
    ops.add_argument("--time-limit", type=_positive, metavar="S", help="start no further row after S seconds")
    ops.add_argument("--plot", metavar="F", help="write a plot, where matplotlib is installed")
    drift = which.add_parser("drift", help="error of the state over 1,000 flush cycles", description=(
        "Compares states with a float64 recurrence, for each state and ring dtype."))
    drift.add_argument("--cycles", type=integer(2), default=1000, metavar="N", help="flush cycles (1000)")
    accuracy = which.add_parser("replay-accuracy", help="held-out loss after a prefix hit with bounded replay",
                                description="Scores text after a prefix hit: with replay, with window KV, and cold.")
    accuracy.add_argument("--corpus", default=".corpus", metavar="DIR",
                          help="folder that torch_replay.models.corpus wrote (.corpus)")
    accuracy.add_argument("--segments", type=integer(2), default=12, metavar="N", help="of held-out text a row (12)")
    accuracy.add_argument("--hits", type=integer(80), nargs="+", default=[128, 256, 512, 1024], metavar="H",
                          help="lengths of the prefix, in whole blocks of 16 (128 256 512 1024)")
    for parser, device in ((ops, "cuda"), (drift, "cpu"), (accuracy, "cpu")):
        parser.set_defaults(run=_run)
        parser.add_argument("--device", default=device, metavar="D", help=f"cpu or cuda ({device})")
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        parser.add_argument("--output", metavar="F", help="write the JSON object to a file too")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number above 0")
    return value


def _run(arguments) -> int:

    arguments.quiet = arguments.json or not sys.stderr.isatty()
    arguments.command = shlex.join(["torch-replay", *sys.argv[1:]])
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
