"""`torch-replay audit`: finds the function to audit, a preset or one of the user's, and the calls to make of it."""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from torch_replay_command import PRESETS

from ..progress import Ticker
from .options import UserError, find_device, load_model

PROMPTS = ("for line in lines:", "x")


def decode_target(engine, prompts, params) -> tuple[Callable, Callable]:
    """The decode step of an engine, and a drive of it for `graphs.audit.audit`.

    A sweep generates from `prompts`, so that lengths, cursors, drafts and rows vary as in service. The engine is made
    with compiled=False: the audit compiles.
    """
    route = "sampled" if params.temperature else "greedy"
    engine.steps = [engine.decode]  # the largest, for every step
    engine.warm_up(sampling=route == "sampled", greedy=route == "greedy")

    def drive(call: Callable) -> None:
        engine.decode.run[route] = call
        engine.generate(prompts, params)

    return getattr(engine.decode, f"{route}_step"), drive


def run(arguments) -> int:
    """Runs `audit` on parsed arguments."""
    from ..graphs.audit import AuditError, audit
    from ..graphs.audit_report import render_html, render_text

    if arguments.html is not None:
        try:
            Path(arguments.html).open("a").close()  # before the work, not after it
        except OSError as error:
            raise UserError(f"--html {arguments.html}: {error.strerror}") from None
    if arguments.target in PRESETS:
        if arguments.inputs is not None:
            raise UserError(f"--inputs {arguments.inputs}: preset {arguments.target} makes its own")
        fn, drive = _preset(PRESETS[arguments.target], arguments.device)
    elif ":" in arguments.target:
        fn = _find("TARGET", arguments.target)
        drive = _calls(_find("--inputs", arguments.inputs) if arguments.inputs is not None else tuple, arguments.inputs)
    elif Path(arguments.target).is_dir():
        from .audit_hugging_face import folder_target

        if arguments.inputs is not None:
            raise UserError(f"--inputs {arguments.inputs}: model folder {arguments.target} makes its own")
        try:
            fn, drive = folder_target(arguments.target, find_device(arguments.device))
        except ValueError as error:
            raise UserError(f"TARGET {error}") from None
    else:
        raise UserError(f"TARGET {arguments.target}: expected package.module:callable, a Hugging Face model folder or "
                        f"{' or '.join(PRESETS)}")
    try:
        # what the target prints is none of the report
        with Ticker("auditing", quiet=arguments.json), contextlib.redirect_stdout(sys.stderr):
            report = audit(fn, drive, name=arguments.target, allow=dict(arguments.allow))
    except AuditError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"TARGET {arguments.target}: {error}") from None
    if arguments.html is not None:
        try:
            Path(arguments.html).write_text(render_html(report), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {arguments.html}: {error.strerror}") from None
    print(json.dumps(report.as_dict()) if arguments.json else render_text(report))
    return 0 if report.ok else 1


def _preset(route: str, device: str) -> tuple[Callable, Callable]:
    from ..engine.engine import Engine, EngineConfig
    from ..engine.request import SamplingParams

    model, tokenizer = load_model(None, find_device(device))
    engine = Engine(model, tokenizer, EngineConfig(max_num_seqs=2, num_spec=2, compiled=False))
    # longer than the ring, so that rows flush
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8 if route == "sampled" else 0.0)
    return decode_target(engine, list(PROMPTS), params)


def _find(option: str, path: str) -> Callable:
    """The callable at `package.module:name`, modules of the current folder included."""

    module, _, name = path.partition(":")
    if not module or not name:
        raise UserError(f"{option} {path}: expected package.module:callable")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise UserError(f"{option} {path}: cannot import {module}: {type(error).__name__}: {error}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"{option} {path}: {module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{option} {path}: is {type(found).__name__}, expected something to call")
    return found


def _calls(factory: Callable, name: str | None) -> Callable:

    def drive(call: Callable) -> None:
        try:
            given = factory()
        except Exception as error:
            raise UserError(f"--inputs {name}: {type(error).__name__}: {error}") from error
        for arguments in [given] if isinstance(given, tuple) else given:
            if not isinstance(arguments, tuple):
                raise TypeError(f"the inputs are {type(arguments).__name__}, expected a tuple of arguments")
            call(*arguments)

    return drive
