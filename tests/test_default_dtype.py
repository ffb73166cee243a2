"""torch.set_default_dtype changes nothing that this project allocates or computes."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from harness import named, raw, stacked
from tiny import engine, tiny_model

import torch_replay
from torch_replay import SamplingParams
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples
from torch_replay.states.replay_context import StateLayer, allocate_states

PACKAGES = [Path(torch_replay.__file__).parent, Path(torch_replay.ops.__file__).parent,
            Path(torch_replay.graphs.__file__).parent]
ALLOCATE = {"empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randn",
            "scalar_tensor", "tensor", "zeros"}  # `arange` and `randint` of integers are int64, whatever the default


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def unnamed(source: str) -> list[int]:
    """Lines with a call of torch that allocates floats, or might, and names no dtype."""
    def allocates(node) -> bool:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            return False
        floats = any(isinstance(value, ast.Constant) and isinstance(value.value, float) for value in node.args)
        return node.func.attr in ALLOCATE or (node.func.attr == "arange" and floats)

    return [node.lineno for node in ast.walk(ast.parse(source)) if allocates(node)
            and not any(keyword.arg in ("dtype", None) for keyword in node.keywords)]  # None: **kwargs


def test_every_allocation_names_its_dtype():
    """In ops, graphs and torch_replay."""
    files = [file for package in PACKAGES for file in package.rglob("*.py")]
    assert len(files) > 60
    assert [f"{file}:{line}" for file in files for line in unnamed(file.read_text())] == []


def test_an_allocation_without_dtype_is_found():
    """Negative control."""
    source = "torch.zeros(3)\ntorch.zeros(3, dtype=d)\ntorch.arange(0.5)\ntorch.arange(3)\ntorch.full(s, 1)"
    assert unnamed(source) == [1, 3, 5]


def run(sample) -> list[torch.Tensor]:
    """The sample's arguments, what the op returns, and the arguments after it."""
    before, arguments = named(sample.op, *sample.make()), named(sample.op, *sample.make())
    out = OPS[sample.op].overload_of(arguments)(**arguments)
    out = () if out is None else out if isinstance(out, tuple) else (out,)
    values = map(stacked, (*before.values(), *out, *arguments.values()))
    return [value for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("op", OPS)
@torch.no_grad()
def test_ops(op):
    """Every sample is drawn, and every op computes, the same bits."""
    for sample in samples(op):
        want = run(sample)
        with default_dtype(torch.bfloat16):
            got = run(sample)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(raw(a), raw(b)), sample


def test_engine():
    """An engine made and run under bfloat16 samples the same tokens, and its buffers have the same dtypes."""
    model = tiny_model(pattern=("mamba2", "gdn", "swa", "full"))
    prompts = [[5, 9, 14, 3, 8, 2, 11], [7, 1, 30]]
    params = [SamplingParams(max_tokens=8, ignore_eos=True),
              SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, top_p=0.83, seed=1)]

    def run_engine(dtype: torch.dtype) -> tuple[dict, dict]:
        with default_dtype(dtype):
            runner, tokens = engine(model, num_spec=1), {}
            for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                runner.add_request(prompt, param, str(number))
            while runner.has_work:
                tokens.update({output.id: output.token_ids for output in runner.step()})
        held = [*runner.memory.states.values(), runner.state.requests]
        return tokens, [{name: value.dtype for name, value in vars(holder).items() if isinstance(value, torch.Tensor)}
                        for holder in held]

    want, got = run_engine(torch.float32), run_engine(torch.bfloat16)
    assert got == want and len(got[0]) == 2 and got[1][-1]["temperature"] == torch.float32


def test_scales_of_states():
    """Row scales of 8-bit states, and the decay rates of a new model."""
    spec = StateLayer("layer", "mamba2", heads=2, groups=1, head_dim=4, state_dim=8, conv_dim=8, state_dtype=torch.int8)
    with default_dtype(torch.bfloat16):
        state, scale = allocate_states(spec, layers=1, slots=3, device="cpu")
        mixer = tiny_model(pattern=("mamba2",)).layers[0].mixer
    assert (state.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert {mixer.A_log.dtype, mixer.dt_bias.dtype, mixer.D.dtype} == {torch.float32}
