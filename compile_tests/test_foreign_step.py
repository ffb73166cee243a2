"""A foreign step of our ops under CUDA-graph trees: lifetimes, rebound caches, padding. On a CPU without trees.

Caches are tensors marked by `mark_static_address(..., guard=False)`, inputs are written into others of that kind.
"""

import contextlib

import pytest
import torch
from cuda_graphs import STRICT, device_calls
from harness import assert_close
from mini_step import MiniStep, batches

from torch_replay.graphs.audit_cuda import CudaWatch
from torch_replay.graphs.passes import NoCacheClones

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ROWS, EMPTY = 4, 1
COLUMNS = 80  # blocks of a sequence, for as many steps as the tests make


class Step(torch.nn.Module):
    """`MiniStep` over inputs that stay in place. `latest`: where it also leaves its first result, for good."""

    def __init__(self, device: str):
        super().__init__()
        self.step = MiniStep(columns=COLUMNS, device=device)
        first = next(batches(ROWS, 1, empty=EMPTY, device=device))
        for name, value in zip(("h", "idx_mapping", "query_lens", "accepted"), first):
            self.register_buffer(name, value)
        self.register_buffer("latest", torch.zeros_like(self.h))
        for buffer in self.buffers():
            torch._dynamo.mark_static_address(buffer, guard=False)

    def fill(self, batch) -> None:
        for name, value in zip(("h", "idx_mapping", "query_lens", "accepted"), batch):
            getattr(self, name).copy_(value)

    def forward(self):
        out, live = self.step(self.h, self.idx_mapping, self.query_lens, self.accepted)
        self.latest.copy_(out)
        return out, live


class Trees:
    """A compiled `Step`, the same in eager, and what the trees have recorded of the former."""

    def __init__(self, device: str):
        self.cuda, self.module, self.eager = device == "cuda", Step(device), MiniStep(columns=COLUMNS, device=device)
        self.steps = batches(ROWS, 400, empty=EMPTY, device=device, seed=5)
        self.watch = CudaWatch()
        self.compile()

    def compile(self) -> None:
        how = {"options": {"post_grad_custom_post_pass": NoCacheClones(),
                           **torch._inductor.list_mode_options("reduce-overhead"), "graph_partition": False}}
        how = how if self.cuda else {}
        self.run = torch.compile(self.module, fullgraph=True, dynamic=False,
                                 backend="inductor" if self.cuda else "aot_eager", **how)

    def __call__(self):
        """Fills the inputs, runs the step, and checks what it returns and leaves against eager."""
        batch = next(self.steps)
        self.module.fill(batch)
        torch.compiler.cudagraph_mark_step_begin()
        got, want = self.run(), self.eager(*batch)
        assert_close("out", got[0], want[0], 1e-5)
        assert torch.equal(got[1], want[1])
        return got

    def check_caches(self) -> None:
        for name, cache in self.eager.caches().items():
            found = getattr(self.module.step, name)
            if cache.is_floating_point():
                assert_close(name, found, cache, 1e-5)
            else:
                assert torch.equal(found, cache), name

    def recorded(self) -> int:
        """Recordings since the last look; 0 of all but CUDA graphs."""
        count, self.watch.recordings = self.watch.recordings, 0
        return count if self.cuda else 0


@pytest.fixture(params=DEVICES)
def trees(request):
    """Warmed up: the first call ran eagerly in the graphs' memory, the second was recorded, the third replayed."""
    torch._dynamo.reset()
    strict = torch._inductor.config.patch(STRICT) if request.param == "cuda" else contextlib.nullcontext()
    with strict, torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        made = Trees(request.param)
        with made.watch.running():
            for _ in range(3):
                made()
            assert made.recorded() == made.cuda
            yield made
    torch._dynamo.reset()


def test_steps(trees):
    """Steps with drafts of every length, through wraps of the rings and snapshots: all replays of one recording."""
    for _ in range(20):
        trees()
    trees.check_caches()
    assert trees.recorded() == 0 and not trees.watch.skips and trees.watch.partitions == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_recorded_non_static_inputs"] == trees.watch._copied


@pytest.mark.parametrize("trees", [pytest.param("cuda", marks=GPU)], indirect=True)
def test_one_launch(trees):
    """A step is one graph launch: no kernel beside it, no copy of an input. Negative control: a kernel is seen."""
    def steps(count=7):
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            trees.run()

    calls = device_calls(steps)
    assert calls["cudaGraphLaunch"] == 7
    assert not [name for name in calls if "LaunchKernel" in name or "Memcpy" in name], calls
    beside = device_calls(lambda: (steps(1), torch.ones(3, device="cuda") + 1))
    assert any("LaunchKernel" in name for name in beside)


def test_lifetime_of_outputs(trees):
    """What a step returns can be read until the next call, as often as one likes. After it, under trees, it is dead:
    reading it raises, or, where torch hands out one tensor object for all replays, gives the new results. A copy, and
    what the step wrote into a tensor of ours, live on."""
    out, live = trees()
    kept = out.clone()
    torch.ones(1 << 20, device=out.device).mul_(2)  # other work of the device does not touch it
    assert torch.equal(out, kept) and torch.equal(out, trees.module.latest) and live.shape == (ROWS,)
    latest = trees.module.latest
    new, _ = trees()
    if not trees.cuda:
        assert torch.equal(out, kept)
    else:
        try:
            stale = out + 0
        except RuntimeError as error:
            assert "overwritten by a subsequent run" in str(error)
        else:
            assert torch.equal(stale, new)
    assert not torch.equal(new, kept)
    assert kept.isfinite().all() and latest is trees.module.latest and not torch.equal(latest, kept)


def rebind(trees, name: str = "swa") -> torch.Tensor:
    """Puts a copy in place of a cache; returns the old one, which must stay alive lest its address is used again."""
    old = getattr(trees.module.step, name)
    new = old.clone()
    torch._dynamo.mark_static_address(new, guard=False)
    setattr(trees.module.step, name, new)
    return old


def test_rebound_cache(trees):
    """A cache that another tensor took the place of is recorded anew, once, without a new compilation; the step writes
    the new tensor and leaves the old one alone."""
    for name in ("swa", "state"):
        old = rebind(trees, name)
        before = old.clone()
        for _ in range(6):
            trees()
        assert trees.recorded() == trees.cuda
        assert torch.equal(old, before) and not torch.equal(getattr(trees.module.step, name), old)
    trees.check_caches()


def test_130_rebinds(trees):
    """A cache may be replaced as often as one likes: re-recordings of static inputs do not count towards the 128 after
    which trees give a function up. torch 2.11 counts them, too, but not against tensors that Dynamo treats as inputs,
    as it does by default (`inline_inbuilt_nn_modules`); a function that is compiled anew begins at zero."""
    old, times = [], 130 if trees.cuda else 3
    for _ in range(times):
        old.append(rebind(trees))
        trees()
    trees.check_caches()
    assert trees.recorded() == times * trees.cuda and not trees.watch.skips
    if trees.cuda:
        assert device_calls(trees)["cudaGraphLaunch"] == 1
    trees()


def test_compiled_anew(trees):
    """After `torch._dynamo.reset` a fresh compilation of the same module goes on with the same caches."""
    torch._dynamo.reset()
    trees.compile()
    for _ in range(4):
        trees()
    trees.check_caches()
    assert trees.recorded() == trees.cuda


def test_padded_rows(trees):
    """Rows without a request change no slot or block of anyone, whatever lies in the rest of their inputs."""
    step, module = trees.module.step, trees.module
    h, idx, lens, accepted = next(trees.steps)
    idx[1:], lens[1:], accepted[1:] = -1, 0, 0
    h[1:] = float("nan")
    module.fill((h, idx, lens, accepted))
    before = {name: cache.clone() for name, cache in step.caches().items()}
    out, live = trees.run()
    used = int(idx[0])
    own = {*step.state_tables[0, used].tolist(), 0}
    others = [slot for slot in range(step.state.shape[1]) if slot not in own]
    for name, cache in step.caches().items():
        if name == "num_computed":
            rest = [index for index in range(cache.shape[0]) if index != used]
            assert torch.equal(cache[rest], before[name][rest])
        else:  # tables of states and of blocks are alike
            assert torch.equal(cache[:, others], before[name][:, others]), name
            assert not cache.isnan().any() if cache.is_floating_point() else True, name
    assert live[1:].eq(step.committed[0, 0]).all() and out[0, : int(lens[0])].isfinite().all()
