"""The command line of `torch-replay`: what `--help` and `--version` say, and bad flags, without waiting for torch.

It stands beside the package, for importing the package imports torch and registers the ops. The commands themselves are
the modules of `torch_replay.command`, one each.
"""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable

__version__ = "0.1.0"

DTYPES = ("float32", "bfloat16", "float16")
RULES = ("graphs", "breaks", "recompiles", "clones", "syncs", "ops", "skips", "partitions", "copied", "recordings",
         "launches")  # those of graphs.audit
GEOMETRIES = ("nemotron-h", "qwen3-next", "tiny-mamba2", "tiny-gdn")
# preset of `audit` -> route of the decode step
PRESETS = {"small": "greedy", "small-sampled": "sampled"}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 1 if another rank failed or an audit finds fault, 2 for bad input,
    130 after an interrupt, 141 where the reader of the output has left.
    """
    arguments = parser().parse_args(argv)
    try:
        problem = _missing_module(arguments) if arguments.command == "audit" else None
        if problem is not None:
            print(f"torch-replay: {problem}", file=sys.stderr)
            return 2
        from torch_replay.command.cli import run

        status = run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has left; the interpreter must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("\ntorch-replay: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; `command` of what it returns names the module of `torch_replay.command` to run."""
    top = argparse.ArgumentParser(prog="torch-replay", description="Hybrid language models under torch.compile.")
    top.add_argument("--version", action="version", version=f"torch_replay {__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    _add_generate(commands)
    info = commands.add_parser("info", help="versions, devices and ops")
    info.add_argument("--json", action="store_true", help="print one JSON object instead")
    _add_audit(commands)
    _add_bench(commands)
    for command in commands.choices.values():
        command.add_argument("--version", action="version", version=f"torch_replay {__version__}",
                             help=argparse.SUPPRESS)
    return top


def _add_generate(commands) -> None:
    generate = commands.add_parser("generate", help="write text from prompts", description=(
        "Streams the continuation of each prompt, then prints what the run did. Without prompts, built-in ones run."))
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; -: what stdin holds")
    generate.add_argument("--file", action="append", default=[], metavar="F", help="a file that is one more prompt")
    generate.add_argument("--model", metavar="DIR", help="model folder (default: the small model of the package)")
    generate.add_argument("--max-tokens", type=integer(1), default=128, metavar="N", help="tokens a prompt (128)")
    generate.add_argument("--spec", type=integer(0, 15), default=0, metavar="K",
                          help="drafts a step by prompt lookup (0)")
    generate.add_argument("--no-replay", action="store_true", help="write the recurrent state at every step")
    generate.add_argument("--prefix-cache", action="store_true",
                          help="prompts take over what earlier ones with the same first tokens computed")
    generate.add_argument("--batch", type=integer(1), metavar="N", help="requests that run together (at most 8)")
    generate.add_argument("--seed", type=integer(0, 2**62), metavar="S",
                          help="sampling seed of the first prompt, plus one for each further prompt (fresh ones)")
    generate.add_argument("--temperature", type=real(0.0, math.inf), default=0.0, metavar="X", help="0 is greedy (0)")
    generate.add_argument("--top-k", type=integer(0), default=0, metavar="N", help="sample among N tokens, 0: all (0)")
    generate.add_argument("--top-p", type=real(0.0, 1.0), default=1.0, metavar="X", help="probability to keep (1)")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT",
                          help="end a continuation before this text; may be given several times")
    steps = generate.add_mutually_exclusive_group()
    steps.add_argument("--compile", action="store_true", dest="compiled", default=None,
                       help="compile the steps (the default on a GPU; on a CPU it takes a minute and a C++ compiler)")
    steps.add_argument("--eager", action="store_false", dest="compiled", default=None,
                       help="compile nothing (the default on a CPU); the text is the same")
    for option, what in (("--dtype", "weights, activations, keys and values"), ("--state-dtype", "recurrent states")):
        generate.add_argument(option, choices=DTYPES, default="float32", help=f"of {what} (float32)")
    generate.add_argument("--quiet", action="store_true", help="the text alone, without progress and numbers")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead")
    generate.add_argument("--rank-timeout", type=integer(1), default=30, metavar="S",
                          help="under torchrun, seconds until a rank that does not answer has failed (30)")
    generate.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (cpu)")


def _add_audit(commands) -> None:
    audit = commands.add_parser("audit", help="what torch.compile makes of a function", description=(
        "Runs a function eagerly, compiled, and compiled again, and reports graph breaks, recompiles, clones of "
        "caches, waits for the device and ops without a fake, with source lines. Exit status 1 when a rule is broken."))
    audit.add_argument("target", metavar="TARGET", help="package.module:callable, the folder of a Hugging "
                       f"Face model for its decode step, or {' or '.join(PRESETS)} for that of the package's model")
    audit.add_argument("--inputs", metavar="M:F", help="package.module:factory, called before each of the sweeps: "
                       "returns the arguments as a tuple, or an iterable of tuples, one for each call (no arguments)")
    audit.add_argument("--allow", action="append", default=[], type=_allowance, metavar="RULE[=N]",
                       help="let a rule pass, or up to a value; rules go by the names that --json shows")
    audit.add_argument("--json", action="store_true", help="print one JSON object instead")
    audit.add_argument("--html", metavar="F", help="write the report as a page, too")
    audit.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda, for presets and folders (cpu)")


def _add_bench(commands) -> None:
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
    for benchmark, device, said in ((ops, None, "cuda where there is one"), (drift, "cpu", "cpu"),
                                    (accuracy, "cpu", "cpu")):
        benchmark.add_argument("--device", default=device, metavar="D", help=f"cpu or cuda ({said})")
        benchmark.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
        benchmark.add_argument("--output", metavar="F", help="write the JSON object to a file too")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Parses an integer from `low` to `high`."""
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
    """Parses a finite number from `low` to `high`."""
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


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number above 0")
    return value


def _allowance(text: str) -> tuple[str, int | None]:
    rule, equals, value = text.partition("=")
    if rule not in RULES:
        raise argparse.ArgumentTypeError(f"{text!r}, expected one of {', '.join(RULES)}")
    if equals and not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}, expected {rule}=N with an integer N of at least 0")
    return rule, int(value) if equals else None


def _missing_module(arguments) -> str | None:
    """What is wrong with a TARGET or --inputs of `audit` whose top module is nowhere, the current folder included."""
    sys.path.insert(0, os.getcwd())
    try:
        for option, path in (("TARGET", arguments.target), ("--inputs", arguments.inputs or "")):
            module = path.partition(":")[0].partition(".")[0]
            if ":" in path and module.isidentifier() and module not in sys.modules \
                    and importlib.util.find_spec(module) is None:
                return f"{option} {path}: cannot import {module}: there is no such module"
    finally:
        sys.path.pop(0)
    return None


if __name__ == "__main__":
    sys.exit(main())
