"""Contexts over pages of a host's: one list of layer tensors a pool, with strides and alignments of their own."""

import pytest
import torch
from harness import raw
from test_context_pools import contents, equal, over, paged
from test_replay_context import DECAY, context, logical_state, run, step_inputs

from torch_replay.states import warmup
from torch_replay.states.pools import layers_of

FAMILIES = pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])


@FAMILIES
def test_steps_in_pages(family):
    """Random steps of three requests, resets and snapshots between them: pages hold what stacked pools hold."""
    columns = 6
    stacked = context(mode="align", columns=columns, family=family, slots=20)
    host = over(stacked, paged(stacked, 20), columns)
    for _, pool in stacked.pools.named():
        pool.zero_()
    for view in (view for _, pool in host.pools.named() for view in layers_of(pool)):
        view.zero_()
    generator = torch.Generator().manual_seed(0)
    tables = torch.arange(1, 19, dtype=torch.int32).view(1, 3, columns)
    for ctx in (stacked, host):
        ctx.block_tables.copy_(tables)
    computed, decode = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.bool)
    torch.manual_seed(1)
    for step in range(9):
        q = torch.randint(0, 4, (3,), generator=generator)
        accepted = torch.minimum(q, torch.randint(1, 4, (3,), generator=generator)).int()
        inputs, live = step_inputs(family, 3, 3), torch.full((3,), columns - 1, dtype=torch.int32)
        for ctx in (stacked, host):
            if step in (0, 5):  # request 1 begins anew; then goes on from the state of request 0's live column
                ctx.reset_new_slots(torch.full((3,), -1), torch.tensor([-1, columns - 1, -1]))
            for place in range(2):
                run(ctx, place, inputs, tables[0, :, -1], q)
            ctx.postprocess(computed, accepted, decode, torch.tensor(3), query_lens=q, live_cols=live,
                            A=DECAY if family == "mamba2" else None)
        computed += accepted
    assert (stacked.ring_committed > 0).sum() >= 3 and computed.min() >= 8, "edges were published"
    assert equal(contents(stacked, 20), contents(host, 20))
    exported = [ctx.export_slot(6, int(computed[0])) for ctx in (stacked, host)]
    assert all(torch.equal(raw(exported[0][name]), raw(exported[1][name])) for name in exported[0])
    host.import_slot(19, exported[0])
    if family == "mamba2":
        assert torch.equal(logical_state(stacked, 6), logical_state_of(host, 19))


def logical_state_of(ctx, slot):
    twin = context(slots=ctx.num_slots, mode=ctx.mode)
    for (_, mine), (_, theirs) in zip(twin.pools.named(), ctx.pools.named()):
        mine.copy_(torch.stack(list(layers_of(theirs))))
    twin.ring_start.copy_(ctx.ring_start), twin.ring_committed.copy_(ctx.ring_committed)
    return logical_state(twin, slot)


@FAMILIES
@pytest.mark.parametrize("conv", [True, False])
def test_warm_up_in_pages(family, conv):
    """Warm-up runs over a host's pools, with or without conv rings, and leaves every byte where it was."""
    like = context(mode="align", columns=4, family=family)
    host = over(like, paged(like, 12, conv), 4)
    before = contents(host, 12)
    assert warmup.warm_up_decode(host, [1, 3], quiet=True) == [1, 3]
    warmup.warm_up_lifecycle(host)
    assert warmup.warm_up_materializer(host) == 1 and warmup.warm_up_materializer(host) == 0
    assert equal(contents(host, 12), before)
    assert len(host.block_copy_tensors()) == (7 if conv else 6)
    if not conv:
        assert "conv" not in host.export_slot(3, 5)
