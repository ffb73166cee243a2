"""Choice of the kernel behind a CUDA call: names, scopes, fallback, measurement, report."""

import sys

import pytest
import torch
from fake_flashinfer import BF16, GEOMETRY, build, compare, copies, fake_module, fresh_backends, run  # noqa: F401
from harness import assert_close, raw

from torch_replay.ops import OPS, backends
from torch_replay.ops.backends import measure, select, set_backend
from torch_replay.ops.mamba2.samples import replay
from torch_replay.ops.registry import override_kernel


@pytest.fixture
def no_flashinfer(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)


def test_unknown_names():
    """A wrong back end, a wrong op, and an op without that kernel are named in a ValueError; nothing is changed."""
    for bad, message in (("cudnn", "cudnn.*expected one of auto"), ("", "expected one of")):
        with pytest.raises(ValueError, match=message):
            set_backend(bad)
    with pytest.raises(ValueError, match="no_such_op.*mamba2_replay"):
        set_backend("naive", ["mamba2_replay", "no_such_op"])
    with pytest.raises(ValueError, match="gdn_replay has no flashinfer kernel.*mamba2_replay"):
        set_backend("flashinfer", "gdn_replay")
    assert backends._choices == {None: "auto"}


def test_missing_back_ends(monkeypatch, no_flashinfer):
    """What is not installed cannot be chosen, but auto runs all the same, on what there is."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("flashinfer", "triton"):
        with pytest.raises(ValueError, match=f"{name} is not installed"):
            set_backend(name)
    op = OPS["mamba2_replay"]
    monkeypatch.setitem(op.kernels, "cuda", "torch_replay.ops.mamba2.kernels")
    arguments = build("mamba2_replay", replay, **GEOMETRY)
    compare("mamba2_replay", arguments)
    assert backends.describe("mamba2_replay")["backend"] == "naive"
    assert "triton is not installed" in backends.describe("mamba2_replay")["why"]


def test_broken_installation(monkeypatch):
    """A package that is there but does not import is reported with its own message."""
    def fail(name):
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(backends, "installed", lambda package: True)
    monkeypatch.setattr(backends.importlib, "import_module", fail)
    with pytest.raises(ValueError, match="importing flashinfer failed: OSError: libcudart"):
        set_backend("flashinfer")


def test_auto_without_triton_uses_flashinfer(monkeypatch, fake):
    """Without Triton, auto runs FlashInfer where it can and the reference elsewhere."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(OPS["mamba2_replay"].kernels, "cuda", "torch_replay.ops.mamba2.kernels")
    compare("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY))
    assert fake.calls["checkpointing_ssu"] == 1
    compare("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY | dict(dim=32)))
    assert fake.calls["checkpointing_ssu"] == 1


def test_scopes(fake):
    """A scope ends with the choices before it, also when its body raises; scopes nest; per-op entries win."""
    name = "mamba2_replay"
    arguments = build(name, replay, **GEOMETRY)
    runs = {"naive": OPS[name].kernel("cpu"), "triton": OPS[name].kernel("cuda")}

    def chosen():
        kernel = select(OPS[name], (), arguments)
        return next((key for key, value in runs.items() if value is kernel), "flashinfer")

    assert chosen() == "triton"
    with set_backend("naive"):
        assert chosen() == "naive"
        with set_backend("flashinfer", name):
            assert chosen() == "flashinfer" and backends.describe("gdn_replay")["backend"] == "naive"
        assert chosen() == "naive"
        with pytest.raises(RuntimeError), set_backend("triton"):
            raise RuntimeError
        assert chosen() == "naive"
    assert chosen() == "triton"
    set_backend("naive", [name])
    set_backend("triton")
    assert chosen() == "triton"  # a choice for all ops replaces those for one
    set_backend("naive")
    assert chosen() == "naive"


def test_cpu_tensors_run_the_reference(fake):
    """The choice is about CUDA calls: CPU tensors take the reference under every back end."""
    arguments = build("mamba2_replay", replay, **GEOMETRY)
    with set_backend("flashinfer"):
        OPS["mamba2_replay"].overload(**arguments)
    assert fake.calls["checkpointing_ssu"] == 0 and OPS["mamba2_replay"].kernels["cuda"].calls == 0


def test_override_wins(fake):
    """override_kernel decides under every back end."""
    def mine(*args, **kwargs):
        raise AssertionError

    with override_kernel("mamba2_replay", "cuda", mine), set_backend("flashinfer"):
        assert select(OPS["mamba2_replay"], (), {}) is mine
    assert not OPS["mamba2_replay"].overridden


def test_failed_build_is_remembered(fake, monkeypatch):
    """A build that fails warns once, and its calls run on Triton from then on; other builds are still tried."""
    def fail(*args, **kwargs):
        fake.calls["checkpointing_ssu"] += 1
        raise RuntimeError("Could not find nvcc\nlong log")

    monkeypatch.setattr(fake, "checkpointing_ssu", fail)
    with set_backend("flashinfer"):
        with pytest.warns(UserWarning, match="Could not find nvcc"):
            compare("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY))
        compare("mamba2_replay", build("mamba2_replay", replay, seed=1, **GEOMETRY | dict(rows=2)))
        assert fake.calls["checkpointing_ssu"] == 1
        with pytest.warns(UserWarning):
            compare("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY | dict(state_dtype=BF16)))
    assert fake.calls["checkpointing_ssu"] == 2
    assert list(backends.describe("mamba2_replay")["refused"].values()) == [3]


def test_device_faults_are_not_swallowed(fake, monkeypatch):
    """Running out of memory says nothing about the back end."""
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(fake, "checkpointing_ssu", fail)
    with set_backend("flashinfer"), pytest.raises(torch.OutOfMemoryError):
        run("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY))


@pytest.mark.parametrize("faster", ("flashinfer", "triton"))
def test_auto_follows_the_measurement(fake, faster):
    """Measured sizes run what was faster, others Triton; measuring leaves the caller's tensors as they were."""
    name = "mamba2_replay"
    arguments = build(name, replay, **GEOMETRY)
    order = iter((1.0, 2.0) if faster == "flashinfer" else (2.0, 1.0))
    before = copies(arguments)

    def timer(call):
        call()
        return next(order)

    assert backends._measure(OPS[name], arguments, timer) == faster
    assert all(torch.equal(raw(v), raw(before[k])) for k, v in arguments.items() if isinstance(v, torch.Tensor))
    fake.calls["checkpointing_ssu"] = 0
    run(name, arguments)
    assert fake.calls["checkpointing_ssu"] == (faster == "flashinfer")
    run(name, build(name, replay, **GEOMETRY | dict(slots=40)))  # a larger pool is no other size
    assert fake.calls["checkpointing_ssu"] == 2 * (faster == "flashinfer")
    run(name, build(name, replay, **GEOMETRY | dict(rows=4)))
    assert fake.calls["checkpointing_ssu"] == 2 * (faster == "flashinfer")
    assert backends.describe(name)["measured"] == {faster: 1}


def test_nothing_to_measure(fake, no_flashinfer):
    """Measuring is a no-op on a CPU, and where FlashInfer is missing or cannot serve the call."""
    def timer(call):
        raise AssertionError("timed")

    arguments = build("mamba2_replay", replay, **GEOMETRY)
    assert measure("mamba2_replay", (), arguments) is None
    assert backends._measure(OPS["mamba2_replay"], arguments, timer) is None
    assert backends._measure(OPS["gdn_replay"], {}, timer) is None


def test_default_arguments_may_be_dropped(fake):
    """The dispatcher leaves out arguments that equal their defaults; the choice is the same."""
    arguments = build("mamba2_replay", replay, **GEOMETRY)
    short = [arguments[key] for key in list(arguments)[:15]]
    with set_backend("flashinfer"):
        kernel = select(OPS["mamba2_replay"], tuple(short), {"window": 16})
        out = torch.empty_like(arguments["x"])
        kernel(*short, window=16, out=out)
    assert fake.calls["checkpointing_ssu"] == 1
    assert_close("y", out, run("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY)), 0.0)


def test_info(fake):
    """`torch-replay info` names the back end of every op, why, and what FlashInfer refused."""
    from torch_replay.command.info import describe, render

    with set_backend("flashinfer"):
        run("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY | dict(dim=32)))
        facts = describe()
    entry = facts["ops"]["mamba2_replay"]
    assert entry["cpu"] == "C++, reference (torch)" and entry["flashinfer"] == "torch_replay.ops.mamba2.flashinfer"
    assert facts["backends"]["mamba2_replay"]["backend"] == "flashinfer"
    text = render(facts)
    assert facts["ops"]["copy_slots"]["cpu"] == "reference (torch)" and "C++ kernels for CPU tensors: " in text
    assert "flashinfer (chosen)" in text and "1 x heads of 32 x 128" in text
