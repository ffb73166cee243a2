"""The C++ kernels of CPU tensors, and the reference kernels behind them. The tests of each family run the C++ kernel
where there is one; here the reference is held to the same truth, and both to each other."""

import inspect

import pytest
import torch
import truth_attention
import truth_conv
import truth_gdn
import truth_kda
import truth_mamba2
import truth_ring
import truth_tokens
from harness import check_sample, clone, compare, named

from torch_replay import ops
from torch_replay.ops.backends import set_backend
from torch_replay.ops.native import build, kernels
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

TRUTHS = (truth_attention, truth_conv, truth_gdn, truth_kda, truth_mamba2, truth_ring, truth_tokens)
NATIVE = [name for name, _ in inspect.getmembers(kernels, inspect.isfunction) if name in OPS]
SAMPLES = [sample for name in NATIVE for sample in samples(name)]

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


def truth(op):
    return next(getattr(module, op) for module in TRUTHS if hasattr(module, op))


def run(sample, dtype=torch.float32):
    """(whether the C++ kernel served the sample, arguments after it, what it returned)."""
    arguments = named(sample.op, *sample.make(dtype=dtype))
    op = OPS[sample.op]
    out = op.body(**arguments)
    served = getattr(kernels, sample.op)(**arguments, **({} if out is None else {"out": out}))
    return served, arguments, out


def test_every_kernel_serves():
    """Each kernel takes most samples of its op, in 32 and 16 bits: no test below passes by never running one."""
    for name in NATIVE:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            served = [run(sample, dtype)[0] for sample in samples(name)]
            assert sum(served) > len(served) / 2, (name, dtype)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_reference_against_truth(sample):
    coarse = ("state", "state_scale") if "int8" in sample.id or "fp8" in sample.id else ()
    with set_backend("naive"):
        check_sample(sample, truth(sample.op), skip=coarse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", NATIVE)
def test_both_kernels_agree(op, dtype):
    """Outputs and all that is written, NaN in dead rows included; integers bit for bit."""
    for sample in samples(op):
        served, arguments, out = run(sample, dtype)
        if not served:
            continue
        want = named(op, *sample.make(dtype=dtype))
        with set_backend("naive"):
            expected = OPS[op].overload(**want)
        if out is not None:
            compare(f"{sample}: out", out, expected)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                compare(f"{sample}: {name}", value, want[name])


def test_a_wrong_kernel_fails(monkeypatch):
    """Negative control: one that scales its output, and one that leaves the ring alone."""
    sample = next(s for s in samples("mamba2_replay") if run(s)[0])
    right = kernels.mamba2_replay

    def scaled(*args, out, **kwargs):
        served = right(*args, out=out, **kwargs)
        out.mul_(1.001)
        return served

    def forgetful(*args, out, **kwargs):
        args = [clone(value) if i == 1 else value for i, value in enumerate(args)]
        return right(*args, out=out, **kwargs)

    for wrong in (scaled, forgetful):
        monkeypatch.setattr(kernels, "mamba2_replay", wrong)
        with pytest.raises(AssertionError):
            check_sample(sample, truth("mamba2_replay"))


def test_threads_change_nothing():
    """Rows and heads are shared out over threads; each is computed by one of them."""
    for op in ("mamba2_replay", "gdn_replay", "paged_attention"):
        results = []
        before = torch.get_num_threads()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append([run(sample)[2] for sample in samples(op) if run(sample)[0]])
        torch.set_num_threads(before)
        assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("compiler,reason", [("/nonexistent", "no C++ compiler"), ("false", "failed"), ("", "is 0")])
def test_without_a_compiler(tmp_path, monkeypatch, compiler, reason):
    """The reference kernels serve, and `info` says why."""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": compiler}
    if compiler == "false":
        environment["PATH"] = "/usr/bin:/bin"
    if not compiler:
        environment[build.SWITCH] = "0"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "problem", None)
    build.library.cache_clear()
    try:
        y = ops.conv_replay(torch.zeros(2, 3, 4), torch.ones(1, 1, 3), torch.ones(3, 2), None,
                            torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), silu=False)
        assert torch.equal(y, torch.ones(1, 1, 3)) and build.library() is None
        assert reason in build.problem
    finally:
        build.library.cache_clear()


def test_the_library_is_kept(tmp_path, monkeypatch):
    """Compiled once; a second process, and a compiler that has gone, take the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    try:
        assert build.library() is not None
        build.library.cache_clear()
        monkeypatch.setattr(build, "_compile", lambda *args: pytest.fail("compiled again"))
        assert build.library() is not None
        assert [path.suffix for path in (tmp_path / "torch_replay").iterdir()] == [".so"]
    finally:
        build.library.cache_clear()
