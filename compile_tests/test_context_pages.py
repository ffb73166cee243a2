"""A host's compiled step over a context whose pools are lists of layer tensors."""

import pytest
import torch
from test_context_pools import contents, equal, over, paged
from test_replay_context import DECAY, context, run, step_inputs

from torch_replay import ContextPools
from torch_replay.states.pools import layers_of

COLUMNS = 6


def separate(pools: ContextPools) -> ContextPools:
    """A storage for each layer tensor, as a compiled step wants them."""
    def split(pool):
        return [layer.clone() for layer in layers_of(pool)]

    return ContextPools(split(pools.state), tuple(split(ring) for ring in pools.rings), split(pools.conv_ring))


@pytest.mark.parametrize("layout", ["separate", "pages"])
@pytest.mark.parametrize("family", ["mamba2", "kda"])
def test_step(family, layout):
    """Resets, two layers, commit and snapshots in one graph: what the same calls leave in stacked pools."""
    stacked = context(mode="align", columns=COLUMNS, family=family, slots=19)
    for pool in stacked.block_copy_tensors():
        pool.zero_()
    pools = paged(stacked, 19) if layout == "pages" else separate(stacked.pools)
    for pool in (pools.state, *pools.rings, pools.conv_ring):
        for layer in layers_of(pool):
            layer.zero_()
    host = over(stacked, pools, COLUMNS)
    for ctx in (stacked, host):
        ctx.block_tables.copy_(torch.arange(1, 19, dtype=torch.int32).view(1, 3, COLUMNS))
    live = torch.full((3,), COLUMNS - 1, dtype=torch.int32)
    decay, decode = DECAY if family == "mamba2" else None, torch.zeros(3, dtype=torch.bool)

    def step(ctx, inputs, fresh, computed, q, accepted):
        ctx.reset_new_slots(torch.full_like(fresh, -1), fresh)
        slots = ctx.block_tables[0, :, -1]
        for place in range(2):
            run(ctx, place, inputs, slots, q)
        ctx.postprocess(computed, accepted, decode, torch.tensor(3), query_lens=q, live_cols=live, A=decay)

    compiled = torch.compile(lambda *args: step(host, *args), fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    computed = torch.zeros(3, dtype=torch.int32)
    for index in range(8):
        q = torch.randint(0, 4, (3,))
        accepted = torch.minimum(q, torch.randint(1, 4, (3,))).int()
        fresh = torch.where(torch.tensor([False, index == 4, False]), live, -1)
        inputs = step_inputs(family, 3, 3)
        step(stacked, inputs, fresh, computed.clone(), q, accepted)
        compiled(inputs, fresh, computed.clone(), q, accepted)
        computed += accepted
    assert computed.max() > 8 and stacked.state[:, 1:COLUMNS].any(), "edges were published"
    assert equal(contents(stacked, 19), contents(host, 19))
