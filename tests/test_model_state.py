"""Model states under a host of its own making: groups by name, each with windows and blocks of its own, ragged batches,
counters on the device, and the steps that a host may not forget."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

import torch_replay
from torch_replay import ReplayContext
from torch_replay.models.memory import MemoryConfig, ModelMemory
from torch_replay.states.builders import BUILDERS, FullAttentionBuilder, register_builder
from torch_replay.states.groups import KVGroup
from torch_replay.states.model_state import DefaultModelState, ReplayModelState
from torch_replay.states.replay_context import StateGroup, StateLayer
from torch_replay.states.request_state import RequestState

GROUPS = (KVGroup("wide", 64, 10, 4), KVGroup("all", 64, None, 2), KVGroup("narrow", 64, 6, 8))
PARAMS = SimpleNamespace(temperature=0.0, top_p=1.0, top_k=0, seed=1, prompt_logprobs=None)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def memory(groups=GROUPS, requests=4, states=None, **more):
    return SimpleNamespace(device=torch.device("cpu"), max_num_seqs=requests, groups=groups, states=states or {},
                           engram=None, num_snapshots=0, **more)


def request(index, computed, groups=GROUPS, replay_start=0, **more):
    """Of `computed` tokens, whose blocks are numbered from 1 by group, with room for 32 tokens more."""
    tables = {group.name: list(range(1, 2 + (computed + 32) // group.block_size)) for group in groups}
    return SimpleNamespace(**{"index": index, "num_computed": computed, "tables": tables, "replay_start": replay_start,
                              "source": 0, "snapshots": {}, "params": PARAMS, **more})


def step(state, rows, prefilling=None, tokens=None):
    """A batch of (request, token ids), its metadata made, uncommitted."""
    for each, _ in rows:
        if each.index not in getattr(state, "known", set()):
            state.add_request(each)
    state.update_requests([each for each, _ in rows])
    longest = tokens or max(len(ids) for _, ids in rows)
    inputs = state.prefill_inputs(len(rows), longest) if prefilling else state.decode_inputs(len(rows), longest)
    state.fill(inputs, [(each.index, ids) for each, ids in rows], prefilling)
    batch = state.prepare_inputs(inputs)
    state.prepare_attn(batch, inputs)
    return batch, inputs


def seen(position, window):
    return min(position + 1, window)


@pytest.mark.parametrize("name", torch_replay.__all__)
def test_public_names(name):
    """What a host writes against is had from the package itself."""
    assert getattr(torch_replay, name) is not None


def test_a_hosts_parts_are_public():
    """Requests, groups, batches, builders and protocols are among the public names, and are the classes used here."""
    assert torch_replay.KVGroup is KVGroup and torch_replay.RequestState is RequestState
    assert torch_replay.register_builder is register_builder
    assert {"InputBatch", "FullAttentionBuilder", "SlidingWindowBuilder", "RequestLike", "Memory", "Builder"} <= {
        *torch_replay.__all__}


def test_windows_and_blocks_are_a_groups_own():
    """Windows of 10 and 6, blocks of 4, 2 and 8: position 13 is written where its own group keeps it, and is read
    back from there by windows of their own."""
    state = DefaultModelState(memory(), RequestState(memory(), 64))
    batch, _ = step(state, [(request(2, 13), [7])])
    slots = {name: int(meta.slot_mapping[0]) for name, meta in batch.attn.items()}
    assert slots == {"wide": 4 * 4 + 1, "all": 7 * 2 + 1, "narrow": 2 * 8 + 5}
    assert {name: batch.attn[name].lens.tolist() for name in ("wide", "narrow")} == {"wide": [10], "narrow": [6]}
    assert batch.attn["narrow"].indices.tolist() == [[2 * 8 + k for k in range(6)]]
    assert batch.attn["wide"].indices.tolist() == [[4 + position for position in range(4, 14)]]
    assert batch.attn["all"].indices is None


def test_other_pools():
    """Pools with other blocks, windows and more groups take the place of the first; tables come again."""
    state = DefaultModelState(memory(GROUPS[:1]), RequestState(memory(GROUPS[:1]), 64))
    step(state, [(request(0, 13, GROUPS[:1]), [7])])
    state.abandon_step()
    other = (KVGroup("wide", 64, 3, 8), KVGroup("more", 64, None, 4))
    state.initialize_kv_cache(memory(other))
    batch, _ = step(state, [(request(0, 13, other), [7])])
    assert {name: int(meta.slot_mapping[0]) for name, meta in batch.attn.items()} == {"wide": 21, "more": 17}
    assert batch.attn["wide"].indices.tolist() == [[19, 20, 21]]


def test_groups_in_another_order():
    """Slots that a replay must not write are padded in the shared group, in whatever order the host names its groups;
    names or windows that the memory does not have are refused."""
    pools = memory()
    state = ReplayModelState(pools, RequestState(pools, 64), [GROUPS[1], GROUPS[2], GROUPS[0]])
    assert state.replay_window == 10
    batch, _ = step(state, [(request(1, 20, replay_start=20), [1] * 12)], [True])
    padded = {name: (meta.slot_mapping < 0).sum().item() for name, meta in batch.attn.items()}
    assert padded == {"wide": 0, "all": 10, "narrow": 0}
    with pytest.raises(ValueError, match="groups has windows"):
        ReplayModelState(pools, RequestState(pools, 64), [GROUPS[1], GROUPS[0]])
    with pytest.raises(ValueError, match="expected a name of its own for each"):
        DefaultModelState(memory((GROUPS[0], GROUPS[0])), RequestState(memory(), 64))


def test_decoder_replay_of_several_groups():
    """The tail has metadata for every group with a window, under any name."""
    pools = memory()
    state = ReplayModelState(pools, RequestState(pools, 64), tail_windows=1)
    batch, _ = step(state, [(request(0, 0), [1] * 24), (request(1, 0), [1] * 4)], [True, True])
    tail = batch.tail.batch
    assert state.kept_tokens == 10 and set(tail.attn) == {"wide", "narrow"}
    assert tail.positions.tolist() == [*range(14, 24), *range(4)]
    for name, block in (("wide", 4), ("narrow", 8)):
        assert tail.attn[name].slot_mapping.tolist() == [block + p for p in tail.positions.tolist()]
    # kept rows look at kept rows alone
    assert tail.attn["narrow"].lens.tolist() == [min(p - 13, 6) for p in range(14, 24)] + [1, 2, 3, 4]
    with pytest.raises(ValueError, match="no group has a sliding window"):
        ReplayModelState(memory(GROUPS[1:2]), RequestState(memory(GROUPS[1:2]), 64), tail_windows=1)


def test_builders_by_kind():
    """A host's own kind has a builder of its own, which gets its group, and the step's bounds with the batch; a kind
    that nobody registered is refused."""
    class Own(FullAttentionBuilder):
        def __init__(self, group):
            self.group = group

        def build(self, batch, block_table, slot_mapping):
            return self.group.name, batch.max_seq_len, batch.max_query_len, tuple(block_table.shape)

    groups = (KVGroup("x", 64, None, 4, kind="own"),)
    with pytest.raises(ValueError, match="group x: kind is 'own', expected one of full, swa"):
        DefaultModelState(memory(groups), RequestState(memory(groups), 64))
    register_builder("own", Own)
    try:
        state = DefaultModelState(memory(groups), RequestState(memory(groups), 64))
    finally:
        del BUILDERS["own"]
    batch, inputs = step(state, [(request(0, 5, groups), [1, 2, 3])])
    assert batch.attn["x"] == ("x", 64, 3, (1, 16))
    inputs.max_seq_len = 8
    state.prepare_attn(batch := state.prepare_inputs(inputs), inputs)
    assert batch.attn["x"][1] == 8


def context(groups=2, requests=4, mode="none", slots=None, columns=1, **sizes):
    layer = dict(heads=2, groups=1, head_dim=4, state_dim=4, conv_dim=8, window=4, ring_len=8, max_tokens=2) | sizes
    made = [StateGroup(f"g{g}", (StateLayer(f"{g}", "gdn", **layer),), 4, mode) for g in range(groups)]
    states = ReplayContext.create(made, requests + 1, num_slots=slots or 1 + groups * requests, columns=columns)
    for group in range(groups):  # request r's live slot in group g
        states.request_tables[group, :-1, states.live_col] = 1 + groups * torch.arange(requests) + group
    return states


def test_slots_are_a_groups_own():
    """Three groups of states: each layer goes through its own group's slot."""
    states = {"gdn": context(3)}
    state = DefaultModelState(memory(states=states), RequestState(memory(), 64))
    batch, _ = step(state, [(request(3, 9), [1]), (request(1, 9), [2])])
    assert batch.state_slots["gdn"].tolist() == [[10, 4], [11, 5], [12, 6]] == batch.conv_slots["gdn"].tolist()


def test_one_of_two_rows_is_committed():
    """num_reqs bounds a commit and a reset, as a number or as a tensor: the second row keeps its cursor."""
    for num_reqs in (1, i32(1)):
        states = context(1)
        states.block_tables[0, :2, 0] = i32(1, 2)
        states.postprocess(i32(5, 5), i32(1, 1), torch.zeros(2, dtype=torch.bool), num_reqs, query_lens=i32(1, 1))
        assert states.ring_committed[0].tolist() == [0, 1, 0, 0, 0]
        states.ring_committed.fill_(3)
        states.reset_new_slots(i32(-1, -1), i32(0, 0), num_reqs=num_reqs)
        assert states.ring_committed[0].tolist() == [3, 0, 3, 3, 3]


def test_forgotten_commit():
    """A step after one that was not committed is refused before anything is written; one that failed is given up."""
    state = DefaultModelState(memory(states={"gdn": context()}), RequestState(memory(), 64))
    batch, inputs = step(state, [(request(0, 9), [1])])
    before = inputs.upload.buffer.clone()
    with pytest.raises(ValueError, match=r"fill: the step of requests \[0\] was not committed"):
        state.fill(inputs, [(0, [5])])
    assert torch.equal(inputs.upload.buffer, before)
    state.commit(batch, inputs, i32(1))
    state.fill(inputs, [(0, [5])])
    state.abandon_step()
    state.fill(inputs, [(0, [6])])


def test_states_begin():
    """A request that begins with a decode step finds nothing of its slot's last owner; one begun elsewhere its own."""
    states = context(1)
    state = DefaultModelState(memory(states={"gdn": states}), RequestState(memory(), 64))
    for begun in (False, True):
        states.state.fill_(1.0)
        states.ring_committed.fill_(2)
        each = request(2, 0)
        state.add_request(each, begun)
        state.update_requests([each])
        inputs = state.decode_inputs(1, 1)
        state.fill(inputs, [(2, [1])])
        assert states.state[0, 3].any().item() == begun and states.ring_committed[0, 3].item() == 2 * begun
        assert states.state[0, 2].all() and not state.requests.host.fresh
        state.abandon_step()


def test_history_of_a_request_computed_elsewhere():
    """The n-gram memory of its first decode step holds its own last tokens, not those of its index's last owner, and
    rows behind the step's hold none."""
    model = tiny_model(pattern=("full", "engram"))
    pools = ModelMemory(model, MemoryConfig(3, 1, 4, {"full": 32}))
    state = DefaultModelState(pools, RequestState(pools, 64))
    history, groups = state.requests.history, pools.groups
    history.ids[1] = torch.arange(64)
    step(state, [(request(index, 4, groups, token_ids=[7] * 4), [5]) for index in range(3)])  # fills three rows
    assert (history.lookback[:3, 0] == 7).all()
    state.abandon_step()
    tokens = list(range(40, 60))
    batch, _ = step(state, [(request(1, 20, groups, token_ids=tokens), [5])])
    depth = history.lookback_depth
    assert history.lookback[0].tolist() == tokens[: -depth - 1 : -1]
    assert (history.lookback[1:] == -1).all()


def test_prompt_log_probabilities_of_no_alternatives():
    """0 alternatives are wanted as well: such a row keeps all its rows in the tail, one of None does not."""
    pools = memory()
    state = ReplayModelState(pools, RequestState(pools, 64), tail_windows=1)
    for wanted, kept in ((0, 20), (3, 20), (True, 20), (None, 10), (False, 10)):
        state.add_request(request(0, 0, params=SimpleNamespace(**{**vars(PARAMS), "prompt_logprobs": wanted})))
        assert state.kept_counts([(0, 20, True)]) == [kept]


@pytest.mark.parametrize("rows, message", [
    ([(0, [1])] * 2, r"requests \[0, 0\], expected each once"), ([(0, [1] * 3)], r"\[3\] tokens, expected at most 2"),
    ([(index, [1]) for index in range(3)], "rows has 3 rows, expected at most 2"),
    ([(7, [1])], "request index is 7, expected at most 3"),
])
def test_bad_rows(rows, message):
    """Named errors for rows that do not fit; nothing is written."""
    state = DefaultModelState(memory(), RequestState(memory(), 64))
    inputs = state.decode_inputs(2, 2)
    state.fill(inputs, [(1, [4])])
    before = inputs.upload.buffer.clone()
    with pytest.raises(ValueError, match=message):
        state.fill(inputs, rows)
    assert torch.equal(inputs.upload.buffer, before)


@pytest.mark.parametrize("change, message", [
    ({"index": 4}, "index is 4, expected 0 to 3"), ({"tables": {"wide": []}}, "expected 'all' among them"),
    ({"tables": {"wide": [64], "all": [], "narrow": []}}, r"gained \[64\], expected blocks in \[0, 64\)"),
    ({"tables": {"wide": [1] * 17, "all": [], "narrow": []}}, "has 17 blocks, expected at most 16"),
])
def test_bad_requests(change, message):
    """Indices, groups and blocks that there are not."""
    state = DefaultModelState(memory(), RequestState(memory(), 64))
    with pytest.raises(ValueError, match=message):
        state.update_requests([request(index=0, computed=5) if not change else
                               SimpleNamespace(**{**vars(request(0, 5)), **change})])
    assert not state.requests.host.filled.any()


def test_a_ragged_batch_equals_its_rows():
    """A chunk, a decode and drafts in one step: every token's positions and slots, every row's lengths and windows are
    those of a step of that row alone."""
    rows = [(request(2, 0), [5] * 7), (request(0, 13), [6]), (request(3, 21), [7, 8, 9])]
    pools = memory(states={"gdn": context()})
    state = DefaultModelState(pools, RequestState(pools, 64))
    for each, _ in rows:
        state.add_request(each)
    state.update_requests([each for each, _ in rows])
    inputs = state.ragged_inputs(4, 16)
    state.fill(inputs, [(each.index, ids) for each, ids in rows], [True, False, False])
    batch = state.prepare_inputs(inputs)
    state.prepare_attn(batch, inputs)
    assert batch.input_ids.tolist() == [5] * 7 + [6, 7, 8, 9] + [0] * 5
    assert batch.query_start_loc.tolist() == [0, 7, 8, 11, 11] and batch.query_lens.tolist() == [7, 1, 3, 0]
    assert batch.first.tolist() == [0, 13, 21, 0] and batch.seq_lens.tolist() == [7, 14, 24, 0]
    assert batch.is_prefilling.tolist() == [True, False, False, False]
    at = 0
    for each, ids in rows:
        alone = DefaultModelState(memory(states={"gdn": context()}), RequestState(memory(), 64))
        want, _ = step(alone, [(each, ids)])
        part = slice(at, at := at + len(ids))
        assert batch.positions[part].tolist() == want.positions.tolist()
        for name, meta in want.attn.items():
            assert torch.equal(batch.attn[name].slot_mapping[part], meta.slot_mapping)
            if meta.indices is not None:
                assert torch.equal(batch.attn[name].indices[part], meta.indices)
    assert all((meta.slot_mapping[at:] == -1).all() for meta in batch.attn.values())
    assert batch.state_slots["gdn"].tolist() == [[5, 1, 7, 0], [6, 2, 8, 0]]


def test_counters_on_the_device():
    """The device's own lengths stand: a step brings none, a commit adds what was accepted, or a prompt's tokens."""
    pools = memory(states={"gdn": context()})
    state = DefaultModelState(pools, RequestState(pools, 64, device_counters=True))
    each, prompt = request(1, 9), request(3, 0)
    state.add_request(each)
    state.requests.num_computed[1] = 11  # verified on the device, unknown to the host
    state.known = {1}
    batch, inputs = step(state, [(each, [1, 2]), (prompt, [3, 4])])
    assert batch.first.tolist() == [11, 0]
    state.commit(batch, inputs, i32(1, 2))
    assert state.requests.num_computed[:-1].tolist() == [0, 12, 0, 2]
    state.known = {1, 3}
    inputs = state.ragged_inputs(2, 8)
    state.fill(inputs, [(1, [5]), (3, [6, 7, 8])], [False, True])
    batch = state.prepare_inputs(inputs)
    state.commit(batch, inputs, i32(0, 0))
    assert batch.first.tolist() == [12, 2] and state.requests.num_computed[:-1].tolist() == [0, 12, 0, 5]
