"""`torch-replay generate`: serves prompts, in this process or as one of torchrun's, and prints what was written."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ..engine.parallel import StepAgreement, launched_by_torchrun
from ..ops.native import build as native
from ..progress import Ticker, TokenBar
from .options import UserError, find_device, in_flags, load_model

BUILT_IN_PROMPTS = (
    'def read_config(path):\n    """Read the configuration',
    "for line in lines:\n",
    "In the beginning God created the heaven and the earth. And",
    "Blessed is the man that",
)


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


def run(arguments) -> int:
    """Runs `generate` on parsed arguments."""
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
    compiled = _compiles(arguments.compiled, device)
    model, tokenizer = load_model(arguments.model, device, getattr(torch, arguments.dtype))
    batch = min(-(-len(prompts) // world_size), 8) if arguments.batch is None else arguments.batch
    try:
        engine = Engine(model, tokenizer, EngineConfig(
            max_num_seqs=batch, num_spec=arguments.spec, replay=not arguments.no_replay,
            prefix_cache=arguments.prefix_cache, compiled=compiled,
            dtype=getattr(torch, arguments.dtype), state_dtype=getattr(torch, arguments.state_dtype)),
            agreement=agreement)
    except ValueError as error:
        raise UserError(in_flags(str(error))) from None
    places = {}
    for index in share:
        params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature,
                                top_k=arguments.top_k, top_p=arguments.top_p, stop=arguments.stop,
                                seed=None if arguments.seed is None else arguments.seed + index)
        try:
            places[engine.add_request(prompts[index], params)] = index
        except ValueError as error:
            raise UserError(f"prompt {index + 1}: {in_flags(str(error))}") from None
    quiet = arguments.json or arguments.quiet or rank > 0
    with Ticker("compiling the decode step" if compiled else "warming up", quiet) as ticker:
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


def _compiles(asked: bool | None, device: torch.device) -> bool:
    """Whether steps compile: where it was asked for or, if nothing was, on a GPU: on a CPU, compiling takes longer than
    thousands of tokens gain. Not on a CPU without a C++ compiler, which one line tells."""
    if device.type != "cpu" or asked is False:
        return asked is not False
    if _finds_compiler(bool(asked)):
        return bool(asked)
    print("torch-replay: no C++ compiler was found, so steps run eagerly and on reference kernels, which are slower "
          "(--eager says so without this line)", file=sys.stderr)
    return False


def _finds_compiler(of_torch: bool) -> bool:
    """Whether there is a C++ compiler for the kernels of `ops.native`, or the one that torch.compile looks for."""
    if not of_torch:
        return native.compiler() is not None
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:
        return False


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
        ("compiled graphs a decode step", str(stats["graphs"]) if stats["graphs"] else "none, steps ran eagerly"),
        ("graph breaks", str(stats["graph_breaks"])),
        ("recompiles after warm-up", str(stats["recompiles"])),
        ("warm-up seconds", number(stats["compile_seconds"])),
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
