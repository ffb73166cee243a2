"""The start-up cache: a second process takes over what the first compiled, and nothing else does."""

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny import engine, tiny_model

import torch_replay
from torch_replay.engine import startup_cache
from torch_replay.engine.startup_cache import SWITCH, cache_file, reused

CPU = torch.device("cpu")
START = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tiny import engine, tiny_model
from torch._dynamo.utils import counters
engine(tiny_model(pattern=("mamba2",)), 1, compiled=True).warm_up(sampling=False)
print(json.dumps(counters["inductor"]))
"""


def start(home: Path, run: int) -> dict:
    """Compiler counters of a process that warms up an engine; the compiler's own cache folder is new."""
    environment = {**os.environ, SWITCH: "1", "XDG_CACHE_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path),
                   "TORCHINDUCTOR_CACHE_DIR": str(home / f"inductor{run}"),
                   "TORCHINDUCTOR_VEC_ISA_OK": "1"}  # a new folder also asks the C++ compiler, for eight seconds
    done = subprocess.run([sys.executable, "-c", START, str(Path(__file__).parent)], env=environment, check=True,
                          capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_second_process(tmp_path):
    """The first start misses and makes one file; the second finds all of it there and writes nothing."""
    first = start(tmp_path, 1)
    assert first["fxgraph_cache_miss"] == 1 and "fxgraph_cache_hit" not in first
    file, = (tmp_path / "torch_replay").glob("*.bin")  # compiled CPU kernels lie there too
    before = file.stat().st_mtime_ns
    second = start(tmp_path, 2)
    assert second["fxgraph_cache_hit"] == 1 and "fxgraph_cache_miss" not in second
    assert file.stat().st_mtime_ns == before


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, a compiler that "compiles" by request, and the artifacts that were loaded."""
    loaded = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda artifacts: loaded.append(artifacts) or True)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", None))
    monkeypatch.setattr(startup_cache, "counters", {"inductor": {"fxgraph_cache_miss": 0}})
    return loaded


def compile_something() -> None:
    startup_cache.counters["inductor"]["fxgraph_cache_miss"] += 1


def test_changed_configuration(cache, monkeypatch):
    """Another configuration, device, version or op schema has a file of its own, so that nothing of it is loaded."""
    file = cache_file(CPU, "a", 1)
    with reused(file):
        compile_something()
    with reused(file):
        pass
    assert cache == [b"artifacts"] and file == cache_file(CPU, "a", 1)
    others = [cache_file(CPU, "a", 2)]
    for target, name, value in ((torch, "__version__", "0"), (torch_replay, "__version__", "0"),
                                (torch.backends.cpu, "get_cpu_capability", lambda: "other"),
                                (startup_cache, "_triton_version", lambda: "0"),
                                (startup_cache.OPS["ring_reset"], "schema", "changed")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            others.append(cache_file(CPU, "a", 1))
    assert len({file, *others}) == 7
    for other in others:
        with reused(other):
            pass
    assert len(cache) == 1


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 200])
def test_damaged_file(cache, content):
    """One warning, nothing loaded, and a sound file afterwards."""
    file = cache_file(CPU)
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged") as caught, reused(file):
        pass
    assert len(caught) == 1 and cache == []
    with warnings.catch_warnings(), reused(file):
        warnings.simplefilter("error")
    assert cache == [b"artifacts"]


def test_one_damaged_byte(cache):
    """A file that has rotted in the middle is not handed to the compiler."""
    file = cache_file(CPU)
    with reused(file):
        pass
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged"), reused(file):
        pass
    assert cache == []


def test_new_artifacts_are_added(cache, monkeypatch):
    """A start that compiles something more stores it; one that does not leaves the file alone."""
    file = cache_file(CPU)
    with reused(file):
        compile_something()
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"more", None))
    for compiles, want in ((False, b"artifacts"), (True, b"more")):
        with reused(file):
            if compiles:
                compile_something()
        assert file.read_bytes()[startup_cache.DIGEST_BYTES :] == want


def test_folder_that_cannot_be_written(cache, tmp_path, monkeypatch):
    """A warning, no failure."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot be"), reused(cache_file(CPU)):
        pass


def test_failed_warm_up_stores_nothing(cache):
    """What a start compiled before it failed is not kept."""
    with contextlib.suppress(RuntimeError), reused(cache_file(CPU)):
        raise RuntimeError
    assert not cache_file(CPU).exists()


@pytest.mark.parametrize("how", ["option", "environment", "not compiled", None])
def test_turned_off(cache, tmp_path, monkeypatch, how):
    """By option, by environment, and where nothing is compiled, no file is read or made; otherwise one is."""
    if how == "environment":
        monkeypatch.setenv(SWITCH, "0")
    runner = engine(tiny_model(pattern=("mamba2",)), 1, compiled=how != "not compiled", startup_cache=how != "option")
    runner.decode.run = {"greedy": lambda: torch.zeros(2, 3, dtype=torch.int64)}
    runner.warm_up(sampling=False)
    assert any((tmp_path / "torch_replay").glob("*.bin")) == (how is None)
