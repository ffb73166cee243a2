"""The command as a user types it: text, JSON, errors in one line."""

import ast
import dataclasses
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import torch_replay
import torch_replay_command
from torch_replay import EngineConfig, SamplingParams
from torch_replay.command import bench, generate
from torch_replay.command.options import FLAGS, in_flags
from torch_replay.models import small_model_dir
from torch_replay.ops import registry
from torch_replay_command import main

ROOT = Path(__file__).resolve().parent.parent
GENERATE_HELP = torch_replay_command.parser()._subparsers._group_actions[0].choices["generate"].format_help()


@pytest.fixture(autouse=True)
def eager_steps(monkeypatch):
    """These tests are about the command; --compile compiles nothing. Compiled steps are tested in compile_tests."""
    import torch_replay.engine.decode_step as step

    monkeypatch.setattr(step, "compile_alone", lambda method, **options: method)


def run_json(capsys, *arguments) -> dict:
    assert main(["generate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_json(capsys):
    """One object with every request and the run's numbers."""
    prompts = ["self.x = x\nself.y = y\nself.", "In the beginning"]  # the first repeats itself, which makes drafts
    result = run_json(capsys, *prompts, "--max-tokens", "12", "--spec", "3")
    assert [request["prompt"] for request in result["requests"]] == prompts
    for request in result["requests"]:
        assert len(request["token_ids"]) == request["output_tokens"] == 12
        assert request["finish_reason"] == "length" and request["text"]
    stats = result["stats"]
    assert (stats["graph_breaks"], stats["recompiles"]) == (0, 0)
    assert stats["decode_tokens"] == 22 and stats["prefill_tokens"] > 4  # the first token of each comes from prefill
    assert 0 <= stats["acceptance_rate"] <= 1 and stats["tokens_per_second"] > 0
    assert 0 < stats["state_bytes_per_token_replay"] < stats["state_bytes_per_token_plain"]
    assert stats["state_bytes_per_token"] == stats["state_bytes_per_token_replay"]


@pytest.mark.slow
def test_routes_write_the_same_text(capsys):
    """--no-replay, --spec, --batch: the same greedy text; the same seed: the same sampled text."""
    prompts = ["import os\n", "And God said", "class Error(Exception):"]
    for sampling in ([], ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--seed", "5"]):
        texts = set()
        for options in ([], ["--no-replay"], ["--spec", "4"], ["--no-replay", "--spec", "2"], ["--batch", "1"]):
            result = run_json(capsys, *prompts, "--max-tokens", "24", *options, *sampling)
            texts.add(tuple(tuple(request["token_ids"]) for request in result["requests"]))
            assert result["stats"]["replay"] == ("--no-replay" not in options)
        assert len(texts) == 1


def test_prefix_cache(capsys, tmp_path):
    """--prefix-cache: hits, replayed tokens, snapshots and evictions, in JSON and in the table; off: not a word."""
    shared = "".join(f"    value_{i} = read({i})\n" for i in range(30))
    (tmp_path / "a.py").write_text("def f():\n" + shared + "    return")
    (tmp_path / "b.py").write_text("def f():\n" + shared + "    print(value_3)\n    raise")
    files = ["--file", str(tmp_path / "a.py"), "--file", str(tmp_path / "b.py"), "--max-tokens", "40", "--batch", "1"]
    stats = run_json(capsys, *files, "--prefix-cache", "--spec", "2")["stats"]
    assert stats["prefix_hits"] == 1 and stats["prefix_hit_tokens"] > 64 == stats["prefix_replayed_tokens"]
    assert stats["prefix_published_blocks"] > 4 and stats["prefix_published_snapshots"] > 2
    # a row has room for 4 snapshots and those of a window of 64 tokens, blocks have room left
    assert stats["prefix_evictions"] == max(stats["prefix_published_snapshots"] - (4 + 64 // 16), 0) > 0
    assert not any(name.startswith("prefix") for name in run_json(capsys, *files)["stats"])
    assert main(["generate", *files, "--prefix-cache", "--spec", "2"]) == 0
    out = capsys.readouterr().err
    assert f"1 requests, {stats['prefix_hit_tokens']} tokens, of which 64 replayed" in out
    assert "prefixes published" in out and f"{stats['prefix_evictions']} evicted" in out


def test_text(capsys, tmp_path):
    """Prompts and their continuations in order; the table beside them, on stderr."""
    (tmp_path / "prompt.txt").write_text("def read(path):\n")
    assert main(["generate", "import sys\n", "--file", str(tmp_path / "prompt.txt"), "--max-tokens", "10"]) == 0
    out, err = capsys.readouterr()
    assert out.index("import sys") < out.index("--- prompt 2 of 2\ndef read(path):")
    for line in ("prefill ", "decode ", "drafts accepted", "steps of a row that flush", "state bytes written per token",
                 "compiled graphs a decode step", "graph breaks", "recompiles after warm-up"):
        assert line in err and line not in out


def test_built_in_prompts(capsys):
    """No arguments: built-in prompts run."""
    assert len(run_json(capsys, "--max-tokens", "2")["requests"]) == 4


def test_seeds(capsys):
    """Fresh ones without --seed, told in the JSON, which give the same text again."""
    sampled = ["x", "x", "--max-tokens", "6", "--temperature", "1", "--eager"]
    first = run_json(capsys, *sampled)["requests"]
    assert len({request["seed"] for request in first}) == 2
    again = run_json(capsys, *sampled[1:], "--seed", str(first[0]["seed"]))["requests"]
    assert again[0]["token_ids"] == first[0]["token_ids"]


def test_stop_and_quiet(capsys, monkeypatch):
    """--stop cuts the text; --quiet leaves it alone; - is stdin."""
    monkeypatch.setattr("sys.stdin", io.StringIO("import sys\n"))
    options = ["--max-tokens", "10", "--eager"]
    text = run_json(capsys, "import sys\n", *options)["requests"][0]["text"]
    assert main(["generate", "-", *options, "--quiet", "--stop", text[3:6]]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("import sys\n|" + text[:3] + "\n\n") and err == ""


def test_without_a_compiler(capsys, monkeypatch):
    """One line of warning, and eager steps; with --eager nobody looks for one."""
    def missing():
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    monkeypatch.setattr("torch_replay.ops.native.build.compiler", lambda: None)
    monkeypatch.setattr("torch_replay.engine.decode_step.compile_alone",
                        lambda *args, **options: pytest.fail("compiles"))
    for options, warned in (([], True), (["--compile"], True), (["--eager"], False)):
        assert main(["generate", "x", "--max-tokens", "2", "--json", *options]) == 0
        out, err = capsys.readouterr()
        assert len(json.loads(out)["requests"]) == 1
        assert err == "" if not warned else "no C++ compiler was found" in err and len(err.splitlines()) == 1


def test_what_compiles(capsys, monkeypatch):
    """On a CPU steps compile with --compile alone, and write the same text; a GPU compiles unless told --eager."""
    compiled = []
    monkeypatch.setattr("torch_replay.engine.decode_step.compile_alone",
                        lambda method, **options: compiled.append(method) or method)
    tokens, counts = [], []
    for options in ([], ["--eager"], ["--compile"]):
        tokens.append(run_json(capsys, "x", "--max-tokens", "4", *options)["requests"][0]["token_ids"])
        counts.append(len(compiled))
    assert counts[:2] == [0, 0] and counts[2] > 0 and tokens[0] == tokens[1] == tokens[2]
    gpu = torch.device("cuda")
    assert [generate._compiles(asked, gpu) for asked in (None, True, False)] == [True, True, False]
    with pytest.raises(SystemExit):
        main(["generate", "x", "--compile", "--eager"])


def test_messages_speak_of_flags(capsys, monkeypatch):
    """What an engine or a request refuses is told by the name of the flag that gave it."""
    assert main(["generate", "word " * 3000]) == 2
    assert "torch-replay: prompt 1: PROMPT: expected 1 to" in capsys.readouterr().err
    fields = {field.name for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams))}
    for field, flag in FLAGS.items():
        assert field in fields | {"prompt_ids"}, "a field of this name is no longer there"
        assert in_flags(f"{field} is 3, expected 2") == f"{flag} is 3, expected 2"
        assert flag == "PROMPT" or flag in GENERATE_HELP
    source = inspect.getsource(generate._serve)
    given = set(re.findall(r"(\w+)=[^=]*?arguments\.", source)) & fields
    assert given - set(FLAGS) == set(), "a flag sets this field, and messages would name the field"


@pytest.mark.parametrize("arguments, status, said", [
    (["--help"], 0, "generate"), (["--version"], 0, "torch_replay 0."), (["generate", "--help"], 0, "--compile"),
    (["generate", "--version"], 0, "torch_replay 0."), (["audit", "--help"], 0, "TARGET"),
    (["bench", "--help"], 0, "drift"), (["bench", "ops", "--help"], 0, "--geometry"), (["info", "--help"], 0, "--json"),
    (["generate", "--spec", "99"], 2, "expected an integer from 0 to 15"),
    (["audit", "nomod:f"], 2, "TARGET nomod:f: cannot import nomod: there is no such module\n"),
    (["audit", "json:dumps", "--inputs", "nomod.sub:f"], 2, "--inputs nomod.sub:f: cannot import nomod"),
])
def test_answers_without_torch(arguments, status, said):
    """Help, version, bad flags and modules that are nowhere: answered without importing torch or the package."""
    code = ("import sys\nfrom torch_replay_command import main\ntry:\n    status = main(sys.argv[1:])\n"
            "except SystemExit as stop:\n    status = stop.code or 0\n"
            "assert not {'torch', 'torch_replay', 'numpy'} & set(sys.modules), 'imported'\nsys.exit(status)\n")
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and said in done.stdout + done.stderr, done.stderr


def test_what_the_parser_repeats():
    """The parser must not import torch, so it repeats names and numbers of modules that do."""
    from torch_replay.engine.parallel import TIMEOUT_SECONDS
    from torch_replay.graphs.audit import RULES

    assert list(torch_replay_command.RULES) == list(RULES)
    families = bench.load("families")
    assert set(torch_replay_command.GEOMETRIES) == set(families.GEOMETRIES)
    assert torch_replay_command.parser().parse_args(["generate"]).rank_timeout == TIMEOUT_SECONDS
    version = re.search(r"^version = (.*)$", (ROOT / "setup.cfg").read_text(), re.M).group(1)
    assert version == torch_replay.__version__ == torch_replay_command.__version__


def test_dtypes(capsys):
    """--dtype and --state-dtype run."""
    options = ["--eager", "--dtype", "bfloat16", "--state-dtype", "float16"]
    assert len(run_json(capsys, "x", "--max-tokens", "3", *options)["requests"][0]["token_ids"]) == 3


def test_reader_that_leaves():
    """`generate | head -1` and prompts that are no UTF-8 end without a traceback."""
    code = "import sys; from torch_replay_command import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code, "info"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 141 and done.stderr == b""
    assert main(["generate", "a\udcff"]) == 2


def test_audit_names_who_failed(capsys, tmp_path, monkeypatch):
    """A target that raises is told with file and line; inputs that raise are not blamed on it; --json stands alone."""
    (tmp_path / "audited_step.py").write_text(
        "import torch\n\n\ndef inputs():\n    return (torch.ones(2),)\n\n\ndef broken():\n    raise OSError('x')\n\n\n"
        "def raises(x):\n    print('its own')\n    raise KeyError('no such key')\n")
    monkeypatch.chdir(tmp_path)
    target = ["audit", "audited_step:raises", "--inputs"]
    assert main([*target, "audited_step:inputs", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "TARGET audited_step:raises: KeyError" in err and "audited_step.py:14" in err
    assert main([*target, "audited_step:broken"]) == 2
    assert "--inputs audited_step:broken: OSError: x" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("torch_replay 0.")


def test_unwritable_report(capsys, tmp_path):
    """--html is tried before anything runs."""
    assert main(["audit", "json:dumps", "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "torch-replay: --html" in capsys.readouterr().err


def test_public_names():
    assert {"Engine", "SamplingParams", "nn", "ops"} <= set(dir(torch_replay))


def test_types_arrive():
    """A type checker sees what is imported on first use, from the same modules, and each op as its body declares it."""
    source = (ROOT / "torch_replay" / "__init__.py").read_text()
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If)
                 and getattr(node.test, "id", "") == "_TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {"nn": None, **torch_replay._LAZY}
    body = typing.Callable[registry.P, registry.R]
    assert typing.get_type_hints(registry.register)["return"] == typing.Callable[[body], body]
    for op in registry.OPS.values():
        hints = typing.get_type_hints(op.wrapper)
        assert set(op.signature.parameters) | {"return"} <= set(hints), op.name


BAD = {
    "unknown folder": (["x", "--model", "no/such/folder"], "no/such/folder: no such folder"),
    "no file": (["--file", "no/such/file"], "--file no/such/file: No such file"),
    "a folder for a file": (["--file", "."], "--file .: Is a directory"),
    "long prompt": (["word " * 3000], "prompt 1:"),
    "empty prompt": ([""], "PROMPT is empty"),
    "no tokens": (["x", "--max-tokens", "0"], "--max-tokens: '0', expected an integer of at least 1"),
    "not a number": (["x", "--spec", "many"], "--spec: 'many', expected an integer from 0 to 15"),
    "too many drafts": (["x", "--spec", "16"], "expected an integer from 0 to 15"),
    "cold": (["x", "--temperature", "-1"], "--temperature: '-1', expected a number of at least 0"),
    "nan": (["x", "--temperature", "nan"], "expected a number"),
    "top-p": (["x", "--top-p", "1.5"], "--top-p: '1.5', expected a number from 0 to 1"),
    "top-p 0": (["x", "--top-p", "0"], "--top-p 0"),
    "batch": (["x", "--batch", "0"], "--batch: '0'"),
    "device": (["x", "--device", "nope"], "--device nope: unknown"),
    "snapshots without a ring": (["x", "--prefix-cache", "--no-replay"], "--prefix-cache: not with --no-replay"),
    "no GPU": (["x", "--device", "cuda:99"], "--device cuda:99: this machine has no such device"),
}


@pytest.mark.parametrize("arguments, message", BAD.values(), ids=BAD)
def test_bad_arguments(capsys, arguments, message):
    """One clear line on stderr, a non-zero status, no traceback, nothing on stdout."""
    try:
        status = main(["generate", *arguments])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert message in err and "Traceback" not in err
    assert len([line for line in err.splitlines() if not line.startswith(("usage", " "))]) == 1


def test_empty_and_binary_files(capsys, tmp_path):
    """Files that hold no prompt."""
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (("empty", "the file is empty"), ("binary", "not UTF-8 text")):
        assert main(["generate", "--file", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_broken_model_folders(capsys, tmp_path, missing):
    """A model folder without one of its files, or with garbage in it, is named in one line."""
    folder = tmp_path / "model"
    shutil.copytree(small_model_dir(), folder)
    (folder / missing).write_bytes(b"garbage")
    assert main(["generate", "x", "--model", str(folder)]) == 2
    assert missing in capsys.readouterr().err
    (folder / missing).unlink()
    assert main(["generate", "x", "--model", str(folder)]) == 2
    assert missing in capsys.readouterr().err


def test_info(capsys):
    """Versions and the kernel of every op."""
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ops"]["mamba2_replay"]["cpu"] == "C++, reference (torch)" and facts["packages"]["torch"]
    assert main(["info"]) == 0
    assert "gdn_replay" in capsys.readouterr().out


def test_module_in_a_clone():
    """`python -m torch_replay` works inside a clone, where this folder shadows an installed package."""
    done = subprocess.run([sys.executable, "-m", "torch_replay", "info"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "mamba2_replay" in done.stdout, done.stderr


def test_import_needs_no_triton():
    """The package imports, with its ops, where triton and flashinfer cannot be imported."""
    code = ("import builtins, sys\nreal = builtins.__import__\n"
            "def refuse(name, *args, **kwargs):\n"
            "    if name.split('.')[0] in ('triton', 'flashinfer') and 'torch_replay' in args[0]['__name__']:\n"
            "        raise ImportError(name)\n"
            "    return real(name, *args, **kwargs)\n"
            "builtins.__import__ = refuse\n"
            "import torch_replay, torch\n"
            "import torch_replay.engine.engine\n"
            "assert torch.ops.torch_replay.mamba2_replay and 'flashinfer' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
