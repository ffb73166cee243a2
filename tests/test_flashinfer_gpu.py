"""FlashInfer itself behind our ops, on a GPU: it is what runs, and it agrees with the truth and with Triton.

Only the heads of Nemotron-H (128 of 64 x 128, 8 groups) are used: FlashInfer compiles a module for every geometry.
"""

import dataclasses
import importlib

import pytest
import torch
from cuda_graphs import STRICT, recordings
from harness import assert_close, check_sample, clone, named
from tiny import tiny_config
from triton_harness import GPU, on_device, triton_kernel

from torch_replay import Engine, EngineConfig, HybridModel, SamplingParams, ops
from torch_replay.ops import backends
from torch_replay.ops.backends import installed, set_backend
from torch_replay.ops.mamba2 import flashinfer as adapter
from torch_replay.ops.mamba2.samples import materialize, replay
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import Sample

needed = pytest.mark.skipif(not (GPU and installed("flashinfer")), reason="needs a GPU and FlashInfer")
pytestmark = [*on_device, needed]
HEADS = dict(heads=128, dim=64, state_dim=128, groups=8)
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
# FlashInfer multiplies in bf16 what the recurrence has in float32
RATIO = 1e-2


def replay_builder(rng, **options):
    args, kwargs = replay(rng, **HEADS | options)
    fields = named("mamba2_replay", args, kwargs)
    for name in ("A", "D", "dt_bias"):
        if fields[name] is not None:
            fields[name] = fields[name].float()
    return tuple(fields[name] for name in list(fields)[: len(args)]), kwargs


def materialize_builder(rng, **options):
    args, kwargs = materialize(rng, layers=3, ring_len=17, **(HEADS | {"state_groups": HEADS["groups"]} | options))
    return (*args[:4], args[4].float(), *args[5:]), kwargs


def sample(op, builder, name, **options):
    return Sample(op, name, lambda rng: builder(rng, **options))


@pytest.fixture(autouse=True)
def fresh():
    backends.reset()
    yield
    backends.reset()


def truth(op):
    return getattr(importlib.import_module("truth_mamba2"), op)


def served(op):
    """FlashInfer ran, and refused nothing."""
    assert any(name == op for name, _ in backends._proven), f"{op}: FlashInfer did not run"
    assert not backends.describe(op)["refused"] and not backends._broken


@STATES
@pytest.mark.parametrize("options", [dict(rows=4), dict(rows=5, padded=2), dict(rows=1)], ids=str)
def test_replay_against_truth(options, state_dtype):
    """Flushing, padded and single rows equal the float64 recurrence; dead ring rows (NaN) are not read."""
    with set_backend("flashinfer", "mamba2_replay"):
        check_sample(sample("mamba2_replay", replay_builder, "fi", state_dtype=state_dtype, **options),
                     truth("mamba2_replay"), "cuda", torch.bfloat16)
    served("mamba2_replay")


@STATES
def test_replay_agrees_with_triton(state_dtype):
    """Outputs and folded states of the two back ends differ by rounding only."""
    arguments = named("mamba2_replay", *sample("mamba2_replay", replay_builder, "fi", rows=16,
                                               state_dtype=state_dtype).make("cuda", torch.bfloat16))
    own = {name: clone(value) for name, value in arguments.items()}
    with set_backend("flashinfer", "mamba2_replay"):
        got = OPS["mamba2_replay"].overload(**arguments)
    served("mamba2_replay")
    with triton_kernel("mamba2_replay"):
        want = OPS["mamba2_replay"].overload(**own)
    assert_close("y", got, want, RATIO)
    real = arguments["slots"][arguments["slots"] > 0].long()
    for name in ("state", "dt_ring"):
        assert_close(name, arguments[name][real].float(), own[name][real].float(), RATIO)


@STATES
@pytest.mark.parametrize("groups", [1, 2])
def test_materialize_against_truth(groups, state_dtype):
    """One launch a group: snapshots of all layers equal the truth, and nothing else is written."""
    with set_backend("flashinfer", "mamba2_materialize"):
        check_sample(sample("mamba2_materialize", materialize_builder, "fi", groups=groups, state_dtype=state_dtype),
                     truth("mamba2_materialize"), "cuda", torch.bfloat16)
    served("mamba2_materialize")


def test_a_pool_that_moved():
    """Address tables follow a pool that was allocated again, and the old one is not written any more."""
    make = sample("mamba2_materialize", materialize_builder, "fi").make
    with set_backend("flashinfer", "mamba2_materialize"):
        first = named("mamba2_materialize", *make("cuda", torch.bfloat16))
        OPS["mamba2_materialize"].overload(**first)
        kept = first["state"].clone()
        known = len(adapter._known_tables)
        second = named("mamba2_materialize", *make("cuda", torch.bfloat16))  # the first is alive: other addresses
        OPS["mamba2_materialize"].overload(**second)
    served("mamba2_materialize")
    assert len(adapter._known_tables) == known + 1
    assert torch.equal(first["state"].nan_to_num(), kept.nan_to_num())
    assert torch.equal(second["state"].nan_to_num(), kept.nan_to_num())


def test_measured_choice():
    """"auto" runs what was faster here, on scratch copies, and says so."""
    arguments = named("mamba2_replay", *sample("mamba2_replay", replay_builder, "fi", rows=8).make(
        "cuda", torch.bfloat16))
    before = clone(arguments["state"])
    winner = backends.measure("mamba2_replay", (), arguments)
    assert winner in ("triton", "flashinfer")
    assert torch.equal(before, arguments["state"])
    described = backends.describe("mamba2_replay")
    assert described["measured"] == {winner: 1} and "fastest" in described["why"]
    got = OPS["mamba2_replay"].overload(**arguments)
    assert not got.isnan().any()


def test_limits_fall_back():
    """Several tokens, 8-bit states and windows that FlashInfer cannot serve run on Triton, and are counted."""
    for options in (dict(tokens=4), dict(state_dtype=torch.int8), dict(window=7)):
        refused = sample("mamba2_replay", replay_builder, "fi", rows=2, ring_len=21, **options)
        arguments = named("mamba2_replay", *refused.make("cuda", torch.bfloat16))
        with set_backend("flashinfer", "mamba2_replay"):
            ops.mamba2_replay(**arguments)
    assert sum(backends.describe("mamba2_replay")["refused"].values()) == 3 and not backends._proven


def test_recorded_step():
    """FlashInfer inside an engine's steps under CUDA-graph trees: recorded once, and the text of eager steps."""
    config = dataclasses.replace(tiny_config(pattern=("mamba2", "mlp", "mamba2")), mamba_heads=128, mamba_head_dim=64,
                                 mamba_state_dim=128, mamba_groups=8)
    torch.manual_seed(0)
    model = HybridModel(config, "cuda", torch.bfloat16).eval().requires_grad_(False)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [[3] * 20, [5, 6], [7] * 9]

    def text(**options):
        runner = Engine(model, None, EngineConfig(max_num_seqs=3, dtype=torch.bfloat16, window=16, ring_len=17,
                                                  compiled_prefill=False, startup_cache=False, **options))
        if runner.config.compiled:
            with recordings() as made, torch._inductor.config.patch(STRICT):
                runner.warm_up(quiet=True)
            assert len(made) == 2 * len(runner.steps)
        with recordings() as made:
            tokens = [output.token_ids for output in runner.generate(prompts, params)]
        assert not made
        return tokens

    with set_backend("flashinfer", "mamba2_replay"):
        got, want = text(compiled=True), text(compiled=False)
    assert got == want and not backends._broken
    assert any(name == "mamba2_replay" for name, _ in backends._proven)
    # what it refused is the warm-up's comparison with another window
    assert all(reason.startswith("window 0") for reason in backends.describe("mamba2_replay")["refused"])
