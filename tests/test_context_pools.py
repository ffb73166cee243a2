"""A context over tensors of a host's own, and pools that grow or are bound anew: contents and cursors of live slots."""

import pytest
import torch
from harness import raw
from test_replay_context import context, run, step_inputs

from torch_replay import ContextPools, ReplayContext
from torch_replay.states.pools import layers_of


def paged(like: ReplayContext, slots: int, conv: bool = True, seed: int = 3) -> ContextPools:
    """Pools as an engine lays them out: a page a slot, in it all that a layer keeps there, at offsets that no vector
    load could use. Filled at random, NaN between the parts."""
    generator = torch.Generator().manual_seed(seed)
    pools = {name: pool for name, pool in like.pools.named() if conv or name != "conv_ring"}
    sizes = [pool[0, 0].numel() for pool in pools.values()]
    page = sum(sizes) + len(sizes)
    found = {name: [] for name in pools}
    for _ in like.layers:
        memory, offset = torch.full((slots * page + 1,), float("nan")), 1
        for (name, pool), size in zip(pools.items(), sizes):
            view = memory.as_strided((slots, *pool.shape[2:]), (page, *pool[0].stride()[1:]), offset)
            found[name].append(view.copy_(torch.rand(view.shape, generator=generator)))
            offset += size + 1
    return ContextPools(found["state"], tuple(found[f"rings[{i}]"] for i in range(3)), found.get("conv_ring"))


def over(like: ReplayContext, pools: ContextPools, columns: int = 1) -> ReplayContext:
    return ReplayContext.create(list(like.groups), 3, num_slots=layers_of(pools.state)[0].shape[0], columns=columns,
                                pools=pools)


def contents(ctx: ReplayContext, slots: int) -> list[torch.Tensor]:
    """Copies of the first slots of all pools and trackers."""
    tensors = [view for pool in ctx.block_copy_tensors()[:-2] for view in layers_of(pool)]
    return [raw(tensor[:slots]).clone() for tensor in tensors] + [
        t[:, :slots].clone() for t in (ctx.ring_start, ctx.ring_committed)]


def equal(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("own", [True, False], ids=["own", "host"])
def test_grown_pools_keep_live_slots(own):
    """More slots: contents and cursors of those that were there, nulls in the new ones, and decoding goes on as in a
    context that was large from the start."""
    small, large = context(slots=5), context(slots=9)
    if not own:
        small = over(small, paged(small, 5))
    torch.manual_seed(2)
    slots, q = torch.tensor([1, 2, 4]), torch.tensor([3, 1, 2])
    for (_, mine), (_, theirs) in zip(small.pools.named(), large.pools.named()):
        theirs[:, :5] = torch.stack(list(layers_of(mine)))

    def decode(*contexts):
        inputs = step_inputs("mamba2", 3, 3)
        for ctx in contexts:
            ctx.block_tables[0, :, 0] = slots
            for place in range(2):
                run(ctx, place, inputs, slots, q)
            ctx.postprocess(torch.zeros(3, dtype=torch.int32), q.int(), torch.zeros(3, dtype=torch.bool),
                            torch.tensor(3), query_lens=q)

    for _ in range(3):
        decode(small, large)
    before = contents(small, 5)
    assert small.ring_committed.any()
    if own:
        small.grow(9)
        assert not small.state[:, 5:].any()
    else:
        small.bind(paged(large, 9, seed=8), 9)
    assert equal(contents(small, 5), before) and small.num_slots == 9
    assert not small.ring_start[:, 5:].any() and not small.ring_committed[:, 5:].any()
    decode(small, large)
    assert equal(contents(small, 5), contents(large, 5))


def test_shrunk_and_grown_again():
    """Trackers stay at their addresses while they are large enough; a slot that comes back is a new one."""
    ctx = context(slots=9)
    start, committed = ctx.ring_start, ctx.ring_committed
    start.fill_(2), committed.fill_(3), ctx.state.fill_(1.0)
    ctx.grow(4)
    ctx.grow(9)
    assert ctx.ring_start is start and ctx.ring_committed is committed
    assert start[0].tolist() == [2] * 4 + [0] * 5 and committed[0].tolist() == [3] * 4 + [0] * 5
    assert (ctx.state[:, :4] == 1).all() and not ctx.state[:, 4:].any()


def test_bound_without_a_copy():
    """A host that has moved the contents itself keeps what it put there; the same memory bound again is no copy."""
    ctx = context(slots=5)
    ctx.state.fill_(1.0), ctx.ring_committed.fill_(4)
    pools = ContextPools.allocate(ctx.spec, 2, 5, "cpu")
    pools.state.fill_(7.0)
    ctx.bind(pools, 5, copy=False)
    assert (ctx.state == 7).all() and (ctx.ring_committed == 4).all()
    ctx.bind(ctx.pools, 5)
    assert (ctx.state == 7).all()


def replaced(pools: ContextPools, **changes) -> ContextPools:
    return ContextPools(**({"state": pools.state, "rings": pools.rings, "conv_ring": pools.conv_ring,
                            "state_scale": pools.state_scale} | changes))


@pytest.mark.parametrize("change, message", [
    (lambda p: {"state": p.state[:1]}, "state has 1 layers, expected 2"),
    (lambda p: {"state": [p.state[0], p.state[1].double()]}, "layer 1 of state has dtype torch.float64, expected"),
    (lambda p: {"state": [p.state[0], None]}, "layer 1 of state is NoneType, expected Tensor"),
    (lambda p: {"rings": p.rings[:2]}, "rings holds 2 pools, expected 3"),
    (lambda p: {"rings": (p.rings[0], p.rings[1], p.rings[2][..., :-1])}, r"layer 0 of rings\[2\] has shape"),
    (lambda p: {"conv_ring": p.conv_ring[:, :4]}, "layer 0 of conv_ring has shape"),
    (lambda p: {"state_scale": p.state[..., 0]}, "state_scale is given, expected row scales exactly for 8-bit"),
    (lambda p: {"state": [p.state[0], p.state[1].mT.contiguous().mT]}, "layer 1 of state has strides"),
    (lambda p: {"conv_ring": p.conv_ring.to("meta")}, "layer 0 of conv_ring has device meta, expected cpu"),
])
def test_pools_that_do_not_fit(change, message):
    """Each is named, with what came and what was expected, at creation and when bound, which changes nothing."""
    ctx = context(slots=5)
    kept, before = ctx.pools, contents(ctx, 5)
    pools = replaced(kept, **change(kept))
    with pytest.raises((ValueError, TypeError), match=message):
        ReplayContext.create(list(ctx.groups), 3, num_slots=5, pools=pools)
    with pytest.raises((ValueError, TypeError), match=message):
        ctx.bind(pools, 5)
    with pytest.raises(ValueError, match="pools: are on meta, expected cpu"):
        ctx.bind(ContextPools.allocate(ctx.spec, 2, 5, "meta"), 5)
    assert ctx.state is kept.state and equal(contents(ctx, 5), before)


def test_layers_in_one_place():
    """`layer` gives views of the pools and of its own group's trackers."""
    ctx = context(groups=3, slots=5)
    for index, group in enumerate((0, 0, 1, 2, 2, 2)):
        memory = ctx.layer(index)
        memory.state.fill_(index + 1), memory.ring_start.fill_(group + 1)
    assert ctx.state[:, 0, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 6] and ctx.ring_start[:, 0].tolist() == [1, 2, 3]
