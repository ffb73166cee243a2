"""Warm-up measures the back ends of the engine's own calls, and the step runs what was faster."""

import dataclasses

import pytest
import torch
from fake_flashinfer import BF16, MATERIALIZE, build, copies, fake_module, fresh_backends  # noqa: F401
from harness import raw
from tiny import tiny_config

from torch_replay import Engine, EngineConfig, HybridModel, SamplingParams
from torch_replay.engine.measure import measure_back_ends
from torch_replay.ops import OPS, backends
from torch_replay.ops.mamba2 import flashinfer as adapter
from torch_replay.ops.mamba2.samples import materialize, replay
from torch_replay.ops.registry import override_kernel
from torch_replay.states import warmup

REPLAY = "mamba2_replay"


def small_engine(**options) -> Engine:
    """A model that FlashInfer serves: heads of 64 x 64 in bf16, as many as keep the projection's parts aligned."""
    torch.manual_seed(0)
    config = dataclasses.replace(tiny_config(pattern=("mamba2", "mlp", "mamba2")), mamba_heads=8,
                                 mamba_head_dim=64, mamba_state_dim=64)
    model = HybridModel(config, dtype=BF16).eval().requires_grad_(False)
    return Engine(model, None, EngineConfig(max_num_seqs=3, compiled=False, dtype=BF16, **options))


@pytest.fixture(name="timed")
def cuda_like_cpu(monkeypatch):
    """CPU tensors go where CUDA tensors go. Times are made up: yields {back end: microseconds} and a list of calls."""
    times, timed = {"flashinfer": 1.0, "triton": 2.0}, []

    def median(call, repeats, device):
        call()
        timed.append(device.type)
        return times["flashinfer" if len(timed) % 2 else "triton"]  # in this order

    def chosen(*args, **kwargs):
        return backends.select(OPS[REPLAY], args, {k: v for k, v in kwargs.items() if k != "out"})(*args, **kwargs)

    monkeypatch.setattr(backends, "MEASURED_DEVICES", ("cpu",))
    monkeypatch.setattr(backends, "median_us", median)
    monkeypatch.setattr(warmup, "choose_windows", lambda context, sizes: None)  # which measures too
    with override_kernel(REPLAY, "cpu", chosen):
        yield times, timed


def kernel_calls(fake) -> tuple[int, int]:
    return fake.calls["checkpointing_ssu"], OPS[REPLAY].kernels["cuda"].calls


@pytest.mark.parametrize("faster", ["flashinfer", "triton"])
def test_step_runs_what_was_faster(fake, timed, faster):
    """One measurement for the layers of one geometry; steps then run the winner, and only it."""
    times, calls = timed
    times[faster] = 0.5
    engine = small_engine()
    engine.warm_up()
    assert len(calls) == 2 and backends.describe(REPLAY)["measured"] == {faster: 1}
    before = kernel_calls(fake)
    engine.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4))
    after = kernel_calls(fake)
    ran = [later - earlier for earlier, later in zip(before, after)]
    assert ran == [6, 0] if faster == "flashinfer" else ran == [0, 6]  # 2 layers, 3 steps after the prefill


def test_live_pools_are_not_written(fake, timed, monkeypatch):
    """Timed calls work on live rows, of scratch pools: pools, cursors and requests keep every byte."""
    engine = small_engine()
    states = engine.memory.states["mamba2"]
    for pool in states.block_copy_tensors():
        pool.copy_(torch.randn(pool.shape) if pool.is_floating_point() else torch.full_like(pool, 3))
    live = [*states.block_copy_tensors(), states.request_tables, engine.state.requests.num_computed]
    before = [raw(tensor).clone() for tensor in live]
    served = []

    def note(state, *args, **kwargs):
        served.append((len(state), args[13].tolist(), args[4].tolist()))

    monkeypatch.setitem(OPS[REPLAY].kernels, "cuda", note)
    engine.warm_up()
    assert (4, [1, 2, 3], [0, 1, 2, 3]) in served  # slots of the scratch pool, slots and committed counts
    assert all(torch.equal(raw(tensor), bytes_) for tensor, bytes_ in zip(live, before))


def test_every_size_is_measured(fake, timed):
    """Each step's own number of rows, for what wins at many may lose at few."""
    small_engine(decode_sizes=(1, 2, 3)).warm_up()
    assert len(timed[1]) == 6 and backends.describe(REPLAY)["measured"] == {"flashinfer": 3}


def test_no_choice_costs_nothing(fake, monkeypatch):
    """On a CPU, with a chosen back end or without FlashInfer the step does not run for a measurement."""
    engine = small_engine()
    monkeypatch.setattr(type(engine.decode), "__call__", None)
    measure_back_ends(engine.steps)
    monkeypatch.setattr(backends, "MEASURED_DEVICES", ("cpu",))
    assert backends.undecided(torch.device("cpu")) == ["mamba2_replay", "mamba2_materialize"]
    with backends.set_backend("triton"):
        measure_back_ends(engine.steps)
    monkeypatch.setattr(backends, "installed", lambda package: package != "flashinfer")
    measure_back_ends(engine.steps)


def test_calls_that_flashinfer_refuses(fake, timed):
    """Where FlashInfer cannot serve the step's calls nothing is timed."""
    small_engine(num_spec=2).warm_up()
    assert not timed[1] and not backends.describe(REPLAY)["measured"]


def test_scratch_is_bounded(fake):
    """What a measurement allocates does not follow the pool, nor the rows beyond some: here 400 rows, and a pool of
    4,000 slots a layer of which 9 are used."""
    arguments = build(REPLAY, replay, rows=400, dim=64, state_dim=64)
    scratch = adapter.mamba2_replay_scratch(**arguments)
    assert scratch["state"].shape[0] == adapter.SCRATCH_SLOTS + 1 and len(scratch["slots"]) == 400
    assert scratch["slots"].unique().tolist() == list(range(1, adapter.SCRATCH_SLOTS + 1))
    state = torch.empty(3, 4000, 4, 8, device="meta")
    small = adapter._small_pool(state, 1, 9)
    assert small.shape == (3, 9, 4, 8) and small.untyped_storage().nbytes() == small.numel() * 4
    within = adapter._small_pool(state.transpose(0, 1).contiguous().transpose(0, 1), 1, 9)  # slot after slot
    assert within.untyped_storage().nbytes() == small.numel() * 4


def test_scratch_snapshots(fake, timed):
    """A snapshot is measured on four live rows of small pools, under the key of the call."""
    name = "mamba2_materialize"
    arguments = build(name, materialize, rows=6, **MATERIALIZE)
    before = copies(arguments)
    scratch = adapter.mamba2_materialize_scratch(**arguments)
    assert adapter.mamba2_materialize_key(**scratch) == adapter.mamba2_materialize_key(**arguments)
    assert scratch["state"].shape[1] == 9 and scratch["active_rows"].tolist() == [0, 1, 2, 3, -1, -1]
    OPS[name].overload(**scratch)  # the reference looks at the values
    assert backends.measure_alike(name, (), arguments) == "flashinfer"
    assert fake.calls["replayssm_materialize"] > 0 and len(timed[1]) == 2
    assert all(torch.equal(raw(value), raw(before[key])) for key, value in arguments.items()
               if isinstance(value, torch.Tensor))
