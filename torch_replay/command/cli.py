"""The command line: `torch-replay generate`, `audit`, `bench` and `info`, also as `python -m torch_replay`."""

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from .. import __version__
from ..engine.parallel import TIMEOUT_SECONDS, RankFailure, StepAgreement, launched_by_torchrun
from ..progress import Ticker, TokenBar
from .audit import add_parser as add_audit
from .bench import add_parser as add_bench
from .options import UserError, find_device, integer, load_model, real

BUILT_IN_PROMPTS = (
    'def read_config(path):\n    """Read the configuration',
    "for line in lines:\n",
    "In the beginning God created the heaven and the earth. And",
    "Blessed is the man that",
)


DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 0, 1 if another rank failed or an audit finds fault, 2 for bad input,
    130 after an interrupt, 141 where the reader of the output has left.
    """
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has left; the interpreter must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print(f"torch-replay: {error}", file=sys.stderr)
        return 2
    except RankFailure as failure:
        print(f"torch-replay: rank {os.environ['RANK']} stops: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ntorch-replay: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torch-replay", description="Hybrid language models under torch.compile.")
    parser.add_argument("--version", action="version", version=f"torch_replay {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="write text from prompts", description=(
        "Streams the continuation of each prompt, then prints what the run did. Without prompts, built-in ones run."))
    generate.set_defaults(run=_generate)
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
    generate.add_argument("--eager", action="store_true", help="compile nothing, and need no C++ compiler")
    for option, what in (("--dtype", "weights, activations, keys and values"), ("--state-dtype", "recurrent states")):
        generate.add_argument(option, choices=DTYPES, default="float32", help=f"of {what} (float32)")
    generate.add_argument("--quiet", action="store_true", help="the text alone, without progress and numbers")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead")
    generate.add_argument("--rank-timeout", type=integer(1), default=TIMEOUT_SECONDS, metavar="S",
                          help="under torchrun, seconds until a rank that does not answer has failed (30)")
    generate.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (cpu)")
    info = commands.add_parser("info", help="versions, devices and ops")
    info.set_defaults(run=_info)
    info.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_audit(commands)
    add_bench(commands)
    return parser


def _prompts(arguments) -> list[str]:
    prompts = []
    for prompt in arguments.prompts:
        try:
            prompts.append(sys.stdin.read() if prompt == "-" else prompt)
            prompts[-1].encode()
        except UnicodeError:
            raise UserError(f"PROMPT {prompt if prompt == '-' else ascii(prompt)}: not UTF-8 text") from None
    for name in arguments.file:
        try:
            prompts.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UserError(f"--file {name}: {reason}") from None
        if not prompts[-1]:
            raise UserError(f"--file {name}: the file is empty, expected a prompt")
    if any(not prompt for prompt in prompts):
        raise UserError("PROMPT is empty, expected text")
    return prompts or list(BUILT_IN_PROMPTS)


def _generate(arguments) -> int:
    prompts = _prompts(arguments)
    if arguments.top_p == 0:
        raise UserError("--top-p 0: expected a number above 0")
    if arguments.prefix_cache and arguments.no_replay:
        raise UserError("--prefix-cache: not with --no-replay, only rings make snapshots of recurrent states")
    if not all(arguments.stop):
        raise UserError("--stop is empty, expected text")
    if not launched_by_torchrun():
        return _serve(arguments, prompts, find_device(arguments.device), None)
    device = find_device(arguments.device, int(os.environ["LOCAL_RANK"]))
    agreement = StepAgreement.from_torchrun(device.type == "cuda", arguments.rank_timeout)
    status = _serve(arguments, prompts, device, agreement)
    agreement.close()
    return status


def _serve(arguments, prompts: list[str], device: torch.device, agreement: StepAgreement | None) -> int:
    """Runs this rank's share of the prompts, every world_size-th; the first rank prints what all of them wrote."""
    from ..engine.engine import Engine, EngineConfig
    from ..engine.request import SamplingParams
    from ..engine.stats import add_up, summarize

    rank, world_size = (0, 1) if agreement is None else (agreement.rank, agreement.world_size)
    share = range(rank, len(prompts), world_size)
    model, tokenizer = load_model(arguments.model, device, getattr(torch, arguments.dtype))
    batch = min(-(-len(prompts) // world_size), 8) if arguments.batch is None else arguments.batch
    try:
        engine = Engine(model, tokenizer, EngineConfig(
            max_num_seqs=batch, num_spec=arguments.spec, replay=not arguments.no_replay,
            prefix_cache=arguments.prefix_cache, compiled=_compiles(arguments.eager, device),
            dtype=getattr(torch, arguments.dtype), state_dtype=getattr(torch, arguments.state_dtype)),
            agreement=agreement)
    except ValueError as error:
        raise UserError(str(error)) from None
    places = {}
    for index in share:
        params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature,
                                top_k=arguments.top_k, top_p=arguments.top_p, stop=arguments.stop,
                                seed=None if arguments.seed is None else arguments.seed + index)
        try:
            places[engine.add_request(prompts[index], params)] = index
        except ValueError as error:
            raise UserError(f"prompt {index + 1}: {error}") from None
    quiet = arguments.json or arguments.quiet or rank > 0
    with Ticker("compiling the decode step", quiet) as ticker:
        if places:
            engine.warm_up(sampling=arguments.temperature > 0, greedy=arguments.temperature == 0, quiet=quiet)
    if agreement is not None:
        with Ticker("waiting for the other ranks", quiet):
            agreement.meet()
    streams = not arguments.json and rank == 0
    shown = TokenBar(prompts, arguments.max_tokens, len(share), arguments.quiet) if streams else None
    outputs = _run(engine, places, shown)
    result = (outputs, engine.stats.counters(), engine.compile_counts.as_dict(), ticker.seconds)
    results = [result] if agreement is None else agreement.gather(result)
    if results is None:
        return 0
    all_outputs, counters, compiled, seconds = zip(*results)
    stats = {**summarize(add_up(counters)), "graphs": max(counts["graphs"] for counts in compiled),
             **{name: sum(counts[name] for counts in compiled) for name in ("graph_breaks", "recompiles")},
             "compile_seconds": max(seconds), "device": str(device), "batch": batch, "spec": arguments.spec}
    if agreement is not None:
        stats["ranks"] = [summarize(each) for each in counters]
    final = {index: output for outputs in all_outputs for index, output in outputs.items()}
    if arguments.json:
        listed = [_describe(prompt, len(tokenizer.encode(prompt).ids), final[index])
                  for index, prompt in enumerate(prompts)]
        print(json.dumps({"requests": listed, "stats": stats}))
        return 0
    for index, output in sorted(final.items()):
        if index not in share:
            shown.show(index, replace(output, new_text=output.text))
    if arguments.temperature:
        stats["seeds"] = [final[index].seed for index in sorted(final)]
    if not arguments.quiet:
        sys.stdout.flush()
        print(_table(stats), file=sys.stderr)
    return 0


def _compiles(eager: bool, device: torch.device) -> bool:
    """Whether steps compile: not where they would on a CPU and there is no C++ compiler, which one line tells."""
    if eager or device.type != "cpu":
        return not eager
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        print("torch-replay: no C++ compiler was found, so steps run eagerly (--eager says so without this line)",
              file=sys.stderr)
        return False
    return True


def _run(engine, places: dict[str, int], shown) -> dict:
    """Runs the engine to its end. places: prompt number of each request. Returns final outputs by prompt number."""
    final = {}
    while engine.has_work:
        for output in engine.step():
            final[places[output.id]] = output
            if shown is not None:
                shown.show(places[output.id], output)
    if shown is not None:
        shown.close()
    return final


def _describe(prompt: str, prompt_tokens: int, output) -> dict:
    return {"prompt": prompt, "text": output.text, "token_ids": output.token_ids,
            "finish_reason": output.finish_reason, "prompt_tokens": prompt_tokens,
            "output_tokens": len(output.token_ids), "seed": output.seed}


def _table(stats: dict) -> str:
    def number(value, form="{:,.1f}"):
        return "-" if value is None else form.format(value)

    route = {True: "measured", False: "computed"}
    rows = [
        ("prefill", f"{stats['prefill_tokens']} tokens, {number(stats['prefill_tokens_per_second'])} a second"),
        ("decode", f"{stats['decode_tokens']} tokens, {number(stats['tokens_per_second'])} a second, "
                   f"{stats['decode_steps']} steps"),
        ("drafts accepted", number(stats["acceptance_rate"], "{:.1%}")),
        ("steps of a row that flush", number(stats["flush_rate"], "{:.1%}")),
        ("state bytes written per token", f"{number(stats['state_bytes_per_token_replay'], '{:,.0f}')} with replay "
                                          f"({route[stats['replay']]}), "
                                          f"{number(stats['state_bytes_per_token_plain'], '{:,.0f}')} without "
                                          f"({route[not stats['replay']]})"),
        *_prefix_rows(stats),
        *_rank_rows(stats),
        *([("seeds", " ".join(map(str, stats["seeds"])))] if "seeds" in stats else []),
        ("compiled graphs a decode step", str(stats["graphs"])),
        ("graph breaks", str(stats["graph_breaks"])),
        ("recompiles after warm-up", str(stats["recompiles"])),
        ("compile seconds", number(stats["compile_seconds"])),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _prefix_rows(stats: dict) -> list[tuple[str, str]]:
    if "prefix_hits" not in stats:
        return []
    return [
        ("prefix hits", f"{stats['prefix_hits']} requests, {stats['prefix_hit_tokens']} tokens, of which "
                        f"{stats['prefix_replayed_tokens']} replayed"),
        ("prefixes published", f"{stats['prefix_published_blocks']} blocks, {stats['prefix_published_snapshots']} "
                               f"snapshots, {stats['prefix_evictions']} evicted"),
    ]


def _rank_rows(stats: dict) -> list[tuple[str, str]]:
    return [(f"rank {rank}", f"{own['prefill_tokens']} tokens prefilled, {own['decode_tokens']} decoded in "
                             f"{own['decode_steps']} steps") for rank, own in enumerate(stats.get("ranks", []))]


def _info(arguments) -> int:
    from .info import describe, render

    facts = describe()
    print(json.dumps(facts) if arguments.json else render(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
