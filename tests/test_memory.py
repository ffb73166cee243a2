"""Nothing outside a prompt chunk allocates in proportion to rows times state: bytes of an 8B model at 512 rows.

Fake tensors: ops run their fakes, as they would be allocated on a GPU, and no byte exists."""

import json
import weakref

import numpy as np
import pytest
import torch
from tiny import tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_replay import Engine, EngineConfig, HybridModel, ops
from torch_replay.command import bench
from torch_replay.models.presets import hybrid_8b
from torch_replay.ops import backends
from torch_replay.states import warmup

ROWS, GIB = 512, 2**30


class Allocations(TorchDispatchMode):
    """The most bytes that tensors made within the mode hold at a time."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {id(t.untyped_storage()) for t in torch.utils._pytree.tree_leaves((args, kwargs))
                 if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and storage not in self.known:
                    self.known.add(storage)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, size: int) -> None:
        self.live -= size


@pytest.fixture(scope="module", name="engine")
def engine_of_512_rows():
    """An 8B model's engine, float32 states, with a prefix cache; all of it fake."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode() as fake, torch.no_grad():
        # arrays that share a buffer's memory, which a fake tensor has none of
        patch.setattr(torch.Tensor, "numpy", lambda tensor: np.zeros(tensor.shape, np.int32))
        model = HybridModel(hybrid_8b(1024), dtype=torch.bfloat16).eval().requires_grad_(False)
        made = Engine(model, None, EngineConfig(
            max_num_seqs=ROWS, dtype=torch.bfloat16, compiled=False, prefix_cache=True, num_snapshots=8))
    return made, fake


def slot_bytes(states) -> int:
    """Of all layers."""
    return sum(pool[:, 0].numel() * pool.element_size() for pool in states.block_copy_tensors()[:-2])


def peak(engine, run) -> int:
    made, fake = engine
    with fake, torch.no_grad(), Allocations() as seen:
        run(made)
    return seen.peak


def reset(made):
    states = made.memory.states["mamba2"]
    columns = torch.zeros(ROWS, dtype=torch.int32)
    states.reset_new_slots(columns - 1, columns)


def postprocess(made):
    states = made.memory.states["mamba2"]
    ones = torch.ones(ROWS, dtype=torch.int32)
    states.postprocess(ones, ones, ones == 0, ones[:1], query_lens=ones, live_cols=states.live_cols[:ROWS],
                       A=torch.zeros(len(states.layers), states.spec.heads))


def warm(made):
    warmup.warm_up_kernels(made.state, [(ROWS, 1)], quiet=True)


def choose(made):
    """As on a GPU, where windows are measured: the calls run once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "MEASURED_DEVICES", ("cpu",))
        patch.setattr(backends, "median_us", lambda call, repeats, device: call() or 1.0)
        warmup.choose_windows(made.memory.states["mamba2"], [(warmup.FEW_ROWS, 1)])


def decode(made):
    made.decode.greedy_step()


# the logits of a step are 0.25 GiB in float32; its rows' states would be 48 GiB, those of one layer 2 GiB
@pytest.mark.parametrize("run, limit", [(reset, 0.01), (postprocess, 0.01), (warm, 0.25), (choose, 1), (decode, 1)],
                         ids=lambda value: getattr(value, "__name__", value))
def test_bytes_at_512_rows(engine, run, limit):
    """Scratch stays under `limit` GiB, and it is counted."""
    assert ROWS * slot_bytes(engine[0].memory.states["mamba2"]) > 48 * GIB
    assert 0 < peak(engine, run) < limit * GIB


def test_gathered_slots_would_show(engine, monkeypatch):
    """Negative control: a reset that gathers the slots, and a warm-up that saves those of every row."""
    def gathering(pool, slots, layer_group):
        at = torch.arange(pool.shape[0])[:, None], slots[layer_group.long()].long()
        pool.index_put_(at, torch.where((at[1] > 0).view(*at[1].shape, *[1] * (pool.dim() - 2)), 0.0, pool[at]))

    with monkeypatch.context() as patch:
        patch.setattr(ops, "zero_slots", gathering)
        assert peak(engine, reset) > 48 * GIB
    monkeypatch.setattr(warmup, "FEW_ROWS", ROWS)
    assert peak(engine, warm) > 2 * GIB


def test_benchmark_runs(tmp_path, monkeypatch):
    """`python -m benchmarks.memory`, on a small model without compiling, records its bytes."""
    memory = bench.load("memory")
    monkeypatch.setitem(memory.PRESETS, "hybrid-8b", lambda: tiny_config(pattern=("mamba2", "mlp", "full")))
    measure = memory.measure
    monkeypatch.setattr(memory, "measure", lambda config, rows, device, dtype: measure(
        config, rows, device, dtype, tokens=3, compiled=False, length=64))
    got = memory.main(["--rows", "3", "--device", "cpu", "--output", str(tmp_path / "memory.json")])
    assert json.loads((tmp_path / "memory.json").read_text()) == {"preset": "hybrid-8b", **got}
    assert got["weights_bytes"] > 0 and got["pools_bytes"] > 0 and got["peak_beside_bytes"]["steps"] is None
