"""Warm-up launches what serving will launch, at its sizes, and leaves every byte where it was."""

import contextlib

import pytest
import torch
from harness import raw
from test_replay_context import context
from tiny import engine, tiny_model

from torch_replay import ReplayContext
from torch_replay.ops.registry import OPS, override_kernel
from torch_replay.states import warmup

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def live_tensors(ctx: ReplayContext) -> list[torch.Tensor]:
    return [*ctx.block_copy_tensors(), *(getattr(ctx, name) for name in warmup.TABLES)]


def fill(ctx: ReplayContext) -> None:
    """Values in every byte that a live context could hold, NaN among the floating-point ones."""
    generator = torch.Generator().manual_seed(5)
    for pool in ctx.block_copy_tensors()[:-2]:
        pool.copy_(torch.randn(pool.shape, generator=generator))
        if pool.is_floating_point() and pool.element_size() > 1:
            pool.view(-1)[::7] = float("nan")
    ctx.ring_start.copy_(torch.randint(0, ctx.ring_len, ctx.ring_start.shape, generator=generator))
    ctx.ring_committed.copy_(torch.randint(0, ctx.window + 1, ctx.ring_start.shape, generator=generator))
    for name in warmup.TABLES:
        table = getattr(ctx, name)
        table.copy_(torch.randint(0, 3, table.shape, generator=generator))


@contextlib.contextmanager
def untouched(tensors):
    """Every byte of `tensors` is afterwards as it was before."""
    before = [raw(tensor).clone() for tensor in tensors]
    yield
    assert all(torch.equal(raw(tensor), kept) for tensor, kept in zip(tensors, before)), "a live tensor has changed"


@contextlib.contextmanager
def recorded(*names):
    """Calls of ops on the CPU, (name, args, kwargs), tensors as they were at the call."""
    calls = []

    def recording(name, kernel):
        def run(*args, **kwargs):
            calls.append((name, [a.clone() if isinstance(a, torch.Tensor) else a for a in args], kwargs, args))
            return kernel(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(override_kernel(name, "cpu", recording(name, OPS[name].kernels["cpu"])))
        yield calls


FAMILIES = pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
SLOTS = {"mamba2": 14, "gdn": 13, "kda": 13}  # position of `slots` among the arguments of the replay op


@FAMILIES
@pytest.mark.parametrize("capture, tokens, slots, want", [
    ((1, 2, 3, 8), None, 12, [1, 2, 3]),  # max_num_reqs is 3
    ((3, 1, 1), None, 12, [1, 3]),
    ((1, 2, 3), None, 3, [1, 2]),  # two non-null slots
    ((1, 2, 3), 8, 12, [1, 2]),  # T is 3
    ((), None, 12, [3]),
    ((4, 8), None, 12, [3]),
    ((), 5, 12, [1]),
])
def test_decode_sizes(family, capture, tokens, slots, want):
    """Every captured size up to the limit, else the limit; each with distinct non-null slots, in every layer."""
    ctx = context(groups=2, family=family, slots=slots)
    fill(ctx)
    with recorded(f"{family}_replay", "conv_replay") as calls, untouched(live_tensors(ctx)):
        assert warmup.warm_up_decode(ctx, capture, max_num_tokens=tokens) == want
    rows = [args[SLOTS[family]] for name, args, *_ in calls if name != "conv_replay"]
    assert [row.tolist() for row in rows] == [list(range(1, size + 1)) for size in want for _ in ctx.layers]
    assert len(calls) == 2 * len(rows)
    pools = {live[0].data_ptr() for name, _, _, live in calls if name != "conv_replay"}
    assert pools == {state.data_ptr() for state in ctx.state}, "it runs on the runtime's own pools"
    inputs = next(args[6] for name, args, *_ in calls if name != "conv_replay")
    assert inputs.std() > 0.5, "inputs are random"


def test_decode_windows_and_dtypes():
    """Both windows of a context that alternates run; 8-bit states with their scales are put back too."""
    ctx = context(state_dtype=torch.int8)
    with recorded("mamba2_replay") as calls, untouched(live_tensors(ctx)):
        warmup.warm_up_decode(ctx, [2], windows=(ctx.window, 0))
    assert [kwargs["window"] for _, _, kwargs, _ in calls] == [6, 0] * len(ctx.layers)


def test_decode_refuses():
    """No non-null slot, too few tokens for a row, and an empty step are refused by name."""
    ctx = context()
    with pytest.raises(ValueError, match="max_num_tokens is 2, expected at least the 3"):
        warmup.warm_up_decode(ctx, max_num_tokens=2)
    with pytest.raises(ValueError, match="capture_sizes holds 0"):
        warmup.warm_up_decode(ctx, [0, 1])
    ctx.grow(1)
    with pytest.raises(ValueError, match="1 slots, expected a non-null slot"):
        warmup.warm_up_decode(ctx)


def test_decode_keeps_the_random_state():
    """The caller's random numbers are the same with and without a warm-up."""
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    warmup.warm_up_decode(context())
    assert torch.equal(torch.rand(3), want)


LIFECYCLE = ("ring_reset", "ring_commit", "compact_active", "copy_slots")


@FAMILIES
@pytest.mark.parametrize("slots, mode, columns", [(12, "align", 5), (2, "align", 5), (12, "none", 1), (2, "align", 1)])
def test_lifecycle(family, slots, mode, columns):
    """All four kinds of kernel run, on slots 1 and 2 at most and a table of the live one's strides; live tables and
    slots keep every byte."""
    ctx = context(groups=2, mode=mode, columns=columns, family=family, slots=slots)
    fill(ctx)
    with recorded(*LIFECYCLE) as calls, untouched(live_tensors(ctx)):
        warmup.warm_up_lifecycle(ctx)
    assert {name for name, *_ in calls} == set(LIFECYCLE)
    used = set()
    for name, args, _, live in calls:
        if name == "copy_slots":
            used |= set(args[1].flatten().tolist()) | set(args[2].flatten().tolist())
        table = live[{"ring_reset": 2, "ring_commit": 6}[name]] if name.startswith("ring") else None
        if table is not None:
            used |= set(table.flatten().tolist())
            assert table.stride() == ctx.block_tables.stride() and table.shape == ctx.block_tables.shape
            assert table.data_ptr() != ctx.block_tables.data_ptr()
    assert used == ({0, 1, 2} if slots > 2 and columns > 1 else {0, 1})


def test_lifecycle_publishes():
    """In mode align the commit makes a plan, so that what follows it runs as it does at a block's edge."""
    ctx = context(mode="align", columns=4)
    with recorded("compact_active", "copy_slots") as calls:
        warmup.warm_up_lifecycle(ctx)
    counts = next(args[0] for name, args, *_ in calls if name == "compact_active")
    assert counts[0, 0] == 1 and (counts[0, 1:] == -1).all()
    assert (calls[-1][1][1][0, 0], calls[-1][1][2][0, 0]) == (2, 1)


def test_lifecycle_without_slots():
    """A context whose pool holds the null slot alone needs nothing, and gets nothing."""
    ctx = context()
    ctx.grow(1)
    with recorded(*LIFECYCLE) as calls:
        assert warmup.warm_up_lifecycle(ctx) is None
    assert calls == []


def test_lifecycle_on_live_tables_is_noticed(monkeypatch):
    """Negative control: a warm-up that works on the live table changes bytes that the tests above compare."""
    ctx = context(mode="align", columns=4)
    ctx.block_tables.fill_(5)
    monkeypatch.setattr(warmup.copy, "copy", lambda live: live)
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", lambda self, *sizes: self)
    monkeypatch.setattr(warmup, "temporary_ring_state", lambda *args: contextlib.nullcontext())
    with pytest.raises(AssertionError, match="live tensor has changed"), untouched(live_tensors(ctx)):
        warmup.warm_up_lifecycle(ctx)


MATERIALIZE = ("mamba2_materialize", "gdn_materialize")


def test_materializer_once_per_signature():
    """Contexts of one geometry share a launch, others get their own, and a repetition launches nothing."""
    alike = [context(mode="align", columns=4) for _ in range(2)]
    other = [context(mode="align", columns=4, slots=9), context(mode="align", columns=4, family="gdn"),
             context(mode="align", columns=4, ring_dtype=torch.float16)]
    for ctx in (*alike, *other):
        fill(ctx)
    with recorded(*MATERIALIZE) as calls, untouched([t for ctx in (*alike, *other) for t in live_tensors(ctx)]):
        assert warmup.warm_up_materializer([*alike, *other]) == len(calls) == 4
        assert warmup.warm_up_materializer(alike[1]) == warmup.warm_up_materializer(other) == 0
    assert len(calls) == 4
    for name, args, *_ in calls:
        counts, active = (args[8], args[10]) if name == "mamba2_materialize" else (args[7], args[9])
        assert (counts == -1).all() and (active == -1).all() and counts.shape == alike[0].plan_count.shape


def test_materializer_after_a_resize():
    """A resized pool is warmed again, and nothing else is; new strides count as well as new shapes."""
    first, second = context(mode="align", columns=4), context(mode="align", columns=4, family="gdn")
    assert warmup.warm_up_materializer([first, second]) == 2
    first.grow(20)
    with recorded(*MATERIALIZE) as calls:
        assert warmup.warm_up_materializer([first, second]) == 1
    assert [name for name, *_ in calls] == ["mamba2_materialize"] and calls[0][1][0].shape[1] == 20
    second.rings = (second.rings[0].transpose(3, 4).contiguous().transpose(3, 4), *second.rings[1:])
    assert warmup.warm_up_materializer([first, second]) == 1


def test_active_materializer_is_noticed():
    """Negative control: with one request active the same call writes a slot."""
    ctx = context(mode="align", columns=4)
    fill(ctx)
    ones = torch.ones_like(ctx.plan_count)
    plan = [ones, 2 * ones, 0 * ones, 0 * ones]
    with pytest.raises(AssertionError, match="live tensor has changed"), untouched(live_tensors(ctx)):
        ctx.materialize(plan, torch.tensor([0, -1, -1]), -torch.ones(2, 4))


def scribble(ctx: ReplayContext, slots: list[int]) -> None:
    for pool in ctx.block_copy_tensors():
        pool.view(INTEGERS[pool.element_size()])[:, slots] += 1
    for name in warmup.TABLES:
        getattr(ctx, name).fill_(9)


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("raising", [False, True])
def test_temporary_ring_state(state_dtype, raising):
    """Slots, ring rows, cursors and tables end bit for bit as they were, also when the body raises."""
    ctx = context(groups=3, mode="align", columns=4, state_dtype=state_dtype)
    fill(ctx)
    expected = pytest.raises(Broken) if raising else contextlib.nullcontext()
    with untouched(live_tensors(ctx)), expected, warmup.temporary_ring_state(ctx, [1, 4, 11]):
        scribble(ctx, [1, 4, 11])
        with pytest.raises(AssertionError), untouched([ctx.state[:, 4]]):  # the body does change it
            scribble(ctx, [4])
        if raising:
            raise Broken


def test_temporary_ring_state_keeps_only_its_slots():
    """Negative control: what the body writes beyond the slots it named stays, and the comparison sees it."""
    ctx = context()
    fill(ctx)
    with pytest.raises(AssertionError, match="live tensor has changed"), untouched(live_tensors(ctx)), \
            warmup.temporary_ring_state(ctx, [1, 2]):
        scribble(ctx, [1, 2, 3])


def test_temporary_ring_state_with_overlapping_views():
    """Views that begin at one address are each kept at their own width; one width for both would lose bytes."""
    storage = torch.randn(2, 5, 24)
    narrow, wide, other = storage[:, :, :4], storage[:, :, :], storage.view(torch.int16)[:, :, 8:30]
    assert narrow.data_ptr() == wide.data_ptr()
    for views in ([narrow, wide], [wide, narrow], [other, narrow, wide]):
        with untouched([storage]), warmup.temporary_ring_state(views, [2, 3]):
            for view in views:
                view[:, 2:4] = 7
    with pytest.raises(AssertionError), untouched([storage]), warmup.temporary_ring_state([narrow, narrow], [2, 3]):
        wide[:, 2:4] = 7


def test_temporary_ring_state_refuses():
    """A slot outside the smallest pool is refused by name, before the body runs."""
    for slot in (12, -1):
        with pytest.raises(ValueError, match=rf"slots holds {slot}, expected slots in \[0, 12\)"), \
                warmup.temporary_ring_state(context(), [1, slot]):
            pytest.fail("the body ran")


def test_replay_kernels():
    """Padding runs with a prefix cache, gathering with decoder-side replay, at the windows of the state."""
    pattern = ("mamba2", "full", "swa", "mlp")
    model = tiny_model(pattern=pattern)
    runner = engine(model, prefix_cache=True, state_block_size=3)
    names = ("pad_replayed_slots", "gather_replay_rows")
    with recorded(*names) as calls:
        warmup.warm_up_replay_kernels(runner.state)
        assert [(name, kwargs["window"]) for name, _, kwargs, _ in calls] == [("pad_replayed_slots", 9)]
        calls.clear()
        runner.state.tail_windows = 1
        warmup.warm_up_replay_kernels(runner.state)
        assert [(name, kwargs["window"]) for name, _, kwargs, _ in calls] == [(names[0], 9), (names[1], 9)]
        calls.clear()
        warmup.warm_up_replay_kernels(engine(model).state)
        runner.decode([], "greedy")
        assert calls == []  # the reason for the warm-up: padding launches neither
