"""ReplayContext: what it refuses, what it keeps, and that a snapshot is the live request's state at the edge."""

from dataclasses import replace

import pytest
import torch
from harness import assert_close

from torch_replay import ReplayContext, ops
from torch_replay.states.replay_context import KVCacheConfig, PlainStates, StateGroup, StateLayer

LAYER = StateLayer("0.mamba2", "mamba2", heads=4, groups=2, head_dim=8, state_dim=16, conv_dim=12, window=6,
                   ring_len=11, max_tokens=3)


def layer(index: int, family: str = "mamba2", **changes) -> StateLayer:
    return replace(LAYER, name=f"{index}.{family}", family=family, **changes)


def context(groups=1, mode="none", columns=1, family="mamba2", slots=12, **changes) -> ReplayContext:
    sizes = [2, 1, 3][:groups]  # groups may differ in layer count
    listed = [StateGroup(f"group {g}", tuple(layer(10 * g + i, family, **changes) for i in range(count)), 4, mode)
              for g, count in enumerate(sizes)]
    return ReplayContext.create(listed, max_num_reqs=3, num_slots=slots, columns=columns)


@pytest.mark.parametrize("groups, message", [
    ([], "groups is empty"),
    ([StateGroup("a", ())], "without layers"),
    ([StateGroup("a", (LAYER,)), StateGroup("b", (LAYER,), 32)], "group b: block_size is 32, expected 16 as in"),
    ([StateGroup("a", (LAYER,), mode="some")], "group a: mode is 'some'"),
    ([StateGroup("a", (LAYER, layer(7, ring_len=12)))], "layer 7.mamba2: ring_len is 12, expected 11"),
    ([StateGroup("a", (LAYER, layer(7, state_dtype=torch.float16)))], "layer 7.mamba2: state_dtype is torch.float16"),
    ([StateGroup("a", (LAYER, layer(7, A_dtype=torch.float64)))], "layer 7.mamba2: A_dtype is torch.float64"),
    ([StateGroup("a", (layer(3, max_tokens=7),))], "layer 3.mamba2: max_tokens is 7, expected 1 to window 6"),
    ([StateGroup("a", (layer(3, ring_len=8),))], "layer 3.mamba2: ring_len is 8, expected at least"),
    ([StateGroup("a", (layer(3, "mamba"),))], "layer 3.mamba: family is 'mamba'"),
])
def test_create_refuses(groups, message):
    """Each violation names the layer or the group, what came and what was expected."""
    with pytest.raises(ValueError, match=message):
        ReplayContext.create(groups, 2, num_slots=3)


def test_trackers_keep_their_addresses():
    """The pair that compiled graphs hold stays while it is large enough and on the same device; else a new pair."""
    ctx = context(groups=2)
    start, committed = ctx.ring_start, ctx.ring_committed
    start.fill_(3), committed.fill_(4)
    ctx.initialize_ring_trackers(KVCacheConfig(8, "cpu"))
    assert ctx.ring_start is start and ctx.ring_committed is committed
    assert (start[:, :8] == 3).all() and (committed[:, :8] == 4).all(), "live slots keep their cursors"
    assert not start[:, 8:].any() and not committed[:, 8:].any()
    ctx.initialize_ring_trackers(KVCacheConfig(13, "cpu"))
    assert ctx.ring_start is not start and ctx.ring_start.shape == (2, 13)
    assert torch.equal(ctx.ring_start[:, :12], start) and not ctx.ring_committed[:, 8:].any()
    small = context(slots=5)
    small.initialize_ring_trackers(KVCacheConfig(5, "meta"))
    assert small.ring_start.device.type == "meta"


def test_pools_are_storages_of_their_own():
    """Two mutated slices of one storage would be cloned at every step."""
    ctx = context(groups=2, state_dtype=torch.int8)
    tensors = ctx.block_copy_tensors()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors) == 8
    assert [t.shape[1] for t in tensors] == [12] * 8


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_reset_new_slots(state_dtype):
    """Copy with a source, zero without one, and nothing for rows that are empty or out of range, per group."""
    ctx = context(groups=2, columns=3, state_dtype=state_dtype)
    for pool in ctx.block_copy_tensors():
        values = torch.randint(1, 5, pool.shape)
        pool.copy_(values)
    before = [pool.clone() for pool in ctx.block_copy_tensors()]
    ctx.block_tables.copy_(torch.tensor([[[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[2, 0, 4], [5, 6, 7], [8, 9, 10]]]))
    # rows hold requests 2, -, 0; request 2 moves from column 0 to 1, request 0 gets column 2 new
    ctx.reset_new_slots(torch.tensor([-1, 0, 0]), torch.tensor([2, 1, 1]), torch.tensor([2, -1, 0]))
    # group 0: row 0 copies slot 1 to 2, row 2 clears 9; group 1: row 0 has a null destination, row 2 clears 10
    group_of = {0: 0, 1: 0, 2: 1}
    for index, (pool, old) in enumerate(zip(ctx.block_copy_tensors(), before)):
        trackers = index >= len(before) - 2
        for lead in range(pool.shape[0]):
            group = lead if trackers else group_of[lead]
            want, source = old[lead].clone(), old[lead]
            if want.dtype == torch.float8_e4m3fn:
                want, source = want.view(torch.uint8), source.view(torch.uint8)
            if group == 0:
                want[2] = source[1]
            cleared = 9 if group == 0 else 10
            # rings and conv rings of a cleared slot may keep what they held: no cursor reaches it
            if trackers or pool is ctx.state or pool is ctx.state_scale:
                want[cleared] = 0
            assert torch.equal(pool[lead].view(torch.uint8), want.view(torch.uint8)), (index, lead)


@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
def test_snapshots(family):
    """Over 60 ragged steps every slot published at a block edge holds the state of exactly that many tokens."""
    torch.manual_seed(3)
    block, tokens, columns = 4, 3, 40
    ctx = context(mode="align", columns=columns, family=family, slots=3 * columns + 1)
    mirror = context(family=family)  # the same tokens, one accepted token a step, no drafts, no snapshots
    tables = torch.arange(1, 3 * columns + 1, dtype=torch.int32).view(1, 3, columns)
    ctx.request_tables.copy_(tables)
    mirror.block_tables[0, :, 0] = torch.tensor([1, 2, 3])
    idx = torch.tensor([2, 0, 1])
    ops.gather_block_tables(ctx.block_tables, ctx.request_tables, idx, torch.tensor(3))
    computed = torch.zeros(3, dtype=torch.int32)
    live_cols = torch.full((3,), -1, dtype=torch.int32)
    published = 0
    decode = torch.zeros(3, dtype=torch.bool)
    for _ in range(60):
        q = torch.randint(0, tokens + 1, (3,))
        if (computed + tokens >= block * columns).any():
            break
        live = ((computed[idx] + q - 1).clamp(min=0) // block).to(torch.int32)
        by_req, src_cols, live_cols = torch.zeros(3, dtype=torch.int32), live_cols, live_cols.clone()
        live_cols[idx] = live  # column of the step's last token; the state moves there from where it was
        ctx.reset_new_slots(src_cols, torch.where(src_cols == live_cols, -1, live_cols), idx)
        slots = ctx.block_tables[0].gather(1, live.long()[:, None])[:, 0]
        inputs = step_inputs(family, 3, tokens)
        for place in range(2):
            run(ctx, place, inputs, slots, q)
        accepted = torch.stack([torch.randint(min(1, int(n)), int(n) + 1, ()) for n in q])
        by_req[idx] = accepted.to(torch.int32)
        ctx.postprocess(computed, by_req, decode, torch.tensor(3), query_lens=q, live_cols=live_cols, idx_mapping=idx,
                        A=DECAY if family == "mamba2" else None)
        for t in range(tokens):
            single = {name: value[:, t : t + 1] for name, value in inputs.items()}
            taken = (t < accepted).long()
            for place in range(2):
                run(mirror, place, single, torch.tensor([1, 2, 3]), taken, window=0)
            mirror.postprocess(torch.zeros(3, dtype=torch.int32), taken, decode, torch.tensor(3), query_lens=taken,
                               window=0)
            for row in range(3):
                edge = int(computed[idx[row]]) + t + 1
                if t < accepted[row] and edge % block == 0 and edge > int(computed[idx[row]] + accepted[row]) - block:
                    got = ctx.state[:, int(tables[0, idx[row], edge // block - 1])]
                    if int(ctx.plan_count[0, row]) >= 0:
                        want = logical_state(mirror, row + 1)
                        assert_close("snapshot", got, want, 1e-5)
                        published += 1
        computed[idx] += accepted.to(torch.int32)
    assert published > 20


def step_inputs(family, rows, tokens):
    heads, groups, dim, n = LAYER.heads, LAYER.groups, LAYER.head_dim, LAYER.state_dim
    wide, narrow = (rows, tokens, heads, dim), (rows, tokens, groups, n)
    if family == "mamba2":
        return {"x": torch.randn(wide), "dt": torch.randn(rows, tokens, heads), "B": torch.randn(narrow),
                "C": torch.randn(narrow)}
    decay = (rows, tokens, heads, n) if family == "kda" else (rows, tokens, heads)
    return {"q": torch.randn(narrow), "k": torch.randn(narrow), "v": torch.randn(wide), "a": torch.randn(decay),
            "b": torch.randn(rows, tokens, heads)}


DECAY = torch.tensor([[-0.3, -0.9, -0.2, -0.5], [-0.7, -0.1, -0.4, -0.6]])


def run(ctx, place, inputs, slots, q, window=None):
    window = ctx.window if window is None else window
    memory = (ctx.state[place], *(ring[place] for ring in ctx.rings), *ctx.cursors(place))
    if ctx.family == "mamba2":
        ops.mamba2_replay(*memory, inputs["x"], inputs["dt"], DECAY[place], inputs["B"], inputs["C"], None, None, None,
                          slots, q, window=window)
    else:
        replay = ops.gdn_replay if ctx.family == "gdn" else ops.kda_replay
        replay(*memory, *inputs.values(), DECAY[place].neg().log(), torch.zeros(ctx.spec.decay_shape), slots, q,
               window=window, scale=0.25, l2norm=True)


def logical_state(ctx, slot):
    """The state with the live ring rows folded in, [L, ...], by a materialise into a scratch copy."""
    state = ctx.state.clone()
    src = torch.full((1, 1), slot)
    where = (src, src, ctx.ring_start[:, slot : slot + 1], ctx.ring_committed[:, slot : slot + 1], ctx.layer_group,
             torch.tensor([0]))
    if ctx.family == "mamba2":
        ops.mamba2_materialize(state, *ctx.rings, DECAY, *where)
    else:
        getattr(ops, f"{ctx.family}_materialize")(state, *ctx.rings, *where)
    return state[:, slot]


def test_plain_states_swap_in_the_accepted():
    """Acceptance picks a state by index; 0 accepted and padding change nothing; no slot is ever lost."""
    states = PlainStates([LAYER], max_num_reqs=3)
    own = states.own_slots.clone()
    assert states.step_slots(torch.tensor([2, -1, 0]), 1)[1].tolist() == [[own[2, 1]], [0], [own[0, 1]]]
    slots, kept = states.step_slots(torch.tensor([2, -1, 0]), 3)
    assert slots.tolist() == [own[2, 0], 0, own[0, 0]]
    assert kept.tolist() == [own[2, 1:].tolist(), [0, 0, 0], own[0, 1:].tolist()]
    states.accept(torch.tensor([2, -1, 0]), torch.tensor([3, 2, 0]))
    want = own.clone()
    want[2, 0], want[2, 3] = own[2, 3], own[2, 0]
    assert torch.equal(states.own_slots, want)
