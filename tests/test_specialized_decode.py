"""Metadata of full decode steps in recorded functions of one padded size: what an eager build gives, in tensors that
never move."""

import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from tiny import tiny_model

from torch_replay import SpecializedDecodeModelState
from torch_replay.graphs import compiled
from torch_replay.models.cached import forward_hidden
from torch_replay.models.memory import MemoryConfig, ModelMemory
from torch_replay.states import specialized_decode
from torch_replay.states.builders import FullAttentionBuilder
from torch_replay.states.groups import KVGroup
from torch_replay.states.model_state import ReplayModelState
from torch_replay.states.request_state import RequestState

PATTERN = ("mamba2", "swa", "full", "engram", "mlp")
WINDOW, BLOCK, REQUESTS, LENGTH = 6, 4, 6, 64
CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """On a CPU, whether a function is compiled and called again is Dynamo's part; Inductor's is tested elsewhere."""
    alone = compiled.compile_alone

    def compile_alone(method, cuda=False, **options):
        return alone(method, cuda=True, **options) if cuda else alone(method, backend="eager", guarded=False)

    monkeypatch.setattr("torch_replay.states.specialized_decode.compile_alone", compile_alone)


def states(device="cpu", sizes=(2, 4, 6), tokens=2, **options):
    """A specialised state and an ordinary one, each with memory of its own, alike in all bits."""
    model = tiny_model(pattern=PATTERN, window=WINDOW).to(device)
    groups = [KVGroup("full", 64), KVGroup("swa", 64, WINDOW)]
    made = []
    for kind, more in ((SpecializedDecodeModelState, {"sizes": sizes, "tokens": tokens, **options}),
                       (ReplayModelState, {})):
        memory = ModelMemory(model, MemoryConfig(REQUESTS, tokens, BLOCK, {"full": 64, "swa": 64}), device)
        state = kind(memory, RequestState(memory, LENGTH), groups, **more)
        host, draw = state.requests.host, np.random.default_rng(0)
        host.num_computed[:] = draw.integers(5, 40, REQUESTS)
        for index in range(REQUESTS):
            columns = -(-(int(host.num_computed[index]) + tokens) // BLOCK)
            host.tables[:, index, :columns] = draw.integers(1, 64, (2, columns))
            host.filled[:, index] = columns
        state.requests.history.ids.copy_(torch.arange(LENGTH) % 61)
        made.append(state)
    return model, *made


def tensors(batch) -> dict[str, torch.Tensor]:
    found = {name: getattr(batch, name) for name in ("input_ids", "positions", "seq_lens", "query_start_loc",
                                                     "query_lens", "first")}
    for kind, attn in batch.attn.items():
        found |= {f"{kind}.{name}": value for name, value in vars(attn).items() if value is not None}
    for name in ("conv_slots", "state_slots"):
        found |= {f"{name}.{family}": value for family, value in getattr(batch, name).items()}
    for layer, (entries, masked) in enumerate(batch.engram):
        found |= {f"entries.{layer}": entries, f"masked.{layer}": masked}
    return found


def fill(state, inputs, rows):
    """For steps of metadata alone, which nobody commits."""
    state.fill(inputs, rows)
    state.abandon_step()


def eager(state, size, tokens, rows):
    inputs = state.decode_inputs(size, tokens)
    fill(state, inputs, rows)
    batch = state.prepare_inputs(inputs)
    state.prepare_attn(batch, inputs)
    return batch


STEPS = [
    [(3, [5, 6]), (1, [7])],
    [(0, [9])],
    [],
    [(5, [1, 2]), (4, [3, 4]), (0, [5]), (2, [6, 7]), (1, [8])],
    [(2, [60, 1])],
]


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_equals_an_eager_build(device):
    """Every tensor of the metadata, for batches of every size and raggedness, in any order; and they never move."""
    _, state, plain = states(device)
    state.warm_up(quiet=True)
    places = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in STEPS * 2:
            key = state.key(len(rows))
            fill(state, state.inputs(key), rows)
            got, want = tensors(state.replay(key)), tensors(eager(plain, key[0], 2, rows))
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert torch.equal(got[name], value), name
            at = {name: value.data_ptr() for name, value in got.items()}
            assert places.setdefault(key, at) == at
    if device == "cpu":
        assert torch.equal(state.requests.history.lookback[1:2], torch.full((1, state.requests.history.lookback_depth),
                                                                            -1, dtype=torch.int32))


@torch.no_grad()
def test_a_forward_elsewhere():
    """A forward that knows the tensors' addresses alone gives the hidden states of an ordinary step."""
    model, state, plain = states()
    state.warm_up(quiet=True)
    key = state.key(2)
    kept = state.replay(key)
    for rows in STEPS[:2]:
        fill(state, state.inputs(key), rows)
        state.replay(key)
        want = forward_hidden(model, plain.memory, eager(plain, key[0], 2, rows), prefill=False)
        assert torch.equal(forward_hidden(model, state.memory, kept, prefill=False), want)


@torch.no_grad()
def test_a_stale_tensor_shows():
    """Negative control: without the replay the forward's inputs are those of the step before."""
    _, state, plain = states()
    state.warm_up(quiet=True)
    key = state.key(2)
    fill(state, state.inputs(key), STEPS[0])
    got = tensors(state.replay(key))
    fill(state, state.inputs(key), STEPS[4])
    want = tensors(eager(plain, key[0], 2, STEPS[4]))
    assert not torch.equal(got["positions"], want["positions"])


@torch.no_grad()
def test_warm_up_changes_nothing():
    """Recording on padded batches writes no request's memory; their sequences are the longest there can be."""
    _, state, _ = states()
    requests = state.requests
    watched = [requests.num_computed[:-1], requests.kv_tables[:, :-1], requests.history.ids[:-1], requests.last_token]
    watched += [pool for s in state.memory.states.values() for pool in s.block_copy_tensors()]
    before = [value.clone() for value in watched]
    state.warm_up(quiet=True)
    assert all(torch.equal(value, kept) for value, kept in zip(watched, before))
    assert state.capture_keys() == [(6, 12), (4, 8), (2, 4)]
    inputs = state.padded_decode_batch((4, 8))
    assert inputs.query_lens.tolist() == [0] * 4 and inputs.idx_mapping.tolist() == [-1] * 4
    assert inputs.num_reqs.tolist() == [0]
    batch = state.prepare_inputs(inputs)
    assert batch.seq_lens.tolist() == [LENGTH] * 4 and batch.max_seq_len == LENGTH and batch.max_query_len == 2
    fill(state, inputs, STEPS[0][:1])
    assert state.prepare_inputs(inputs).seq_lens.tolist()[1:] == [0] * 3, "while it serves, padding has no length"


@torch.no_grad()
def test_counts_vary_without_recompiles():
    """One function a key, whatever the number of requests and tokens."""
    _, state, _ = states()
    state.warm_up(quiet=True)
    with torch._dynamo.config.patch(error_on_recompile=True), mock.patch.object(
            compiled.torch, "compile", side_effect=AssertionError("compiled again")):
        for rows in STEPS:
            key = state.key(len(rows))
            fill(state, state.inputs(key), rows)
            state.replay(key)


@torch.no_grad()
def test_unknown_key_warns_once():
    """A key that was not recorded is built eagerly, right, and said once."""
    _, state, plain = states(sizes=(2, 6))
    state.warm_up(quiet=True)
    key, rows = (5, 10), STEPS[3]
    fill(state, state.inputs(key), rows)
    with pytest.warns(UserWarning, match=r"key \(5, 10\) was not recorded"):
        got = tensors(state.replay(key))
    want = tensors(eager(plain, 5, 2, rows))
    assert all(torch.equal(got[name], value) for name, value in want.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.replay(key)


@torch.no_grad()
def test_release():
    """Pools that are taken over release what was recorded; the next warm_up records over the new ones."""
    model, state, _ = states()
    state.warm_up(quiet=True)
    code = torch._dynamo.eval_frame.innermost_fn(state._built[2, 4].run).__code__
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert len(entries(code)) == 1
    memory = ModelMemory(model, MemoryConfig(REQUESTS, 2, BLOCK, {"full": 32, "swa": 32}))
    state.initialize_kv_cache(memory)
    assert not entries(code) and not state._built
    fill(state, state.inputs((2, 4)), [])
    with pytest.warns(UserWarning, match="recorded: \\[\\]"):
        state.replay((2, 4))
    state.warm_up(quiet=True)
    assert state._built[2, 4].run is not None and state.memory is memory


class Unrecordable(FullAttentionBuilder):
    recordable = False


@torch.no_grad()
def test_builders_declare_themselves(monkeypatch):
    """With one class that does not say it is recordable, steps are built eagerly, right, and the log says why."""
    _, state, plain = states()
    assert state.can_record()
    state.builders["full"] = Unrecordable(state.groups["full"])
    assert not state.can_record() and state.can_record([builder for builder in state.builders.values()
                                                        if type(builder) is not Unrecordable])
    lines = []
    monkeypatch.setattr(specialized_decode.logger, "warning", lambda text, *values: lines.append(text % values))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.warm_up(quiet=True)
        key = state.key(2)
        fill(state, state.inputs(key), STEPS[0])
        got, want = tensors(state.replay(key)), tensors(eager(plain, key[0], 2, STEPS[0]))
    assert len(lines) == 1 and "builder of group full, Unrecordable" in lines[0] and state._built[key].run is None
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("options, message", [
    ({"sizes": ()}, "sizes is"), ({"sizes": (0, 2)}, "sizes is"), ({"sizes": (7,)}, "expected numbers of requests"),
    ({"tokens": 0}, "tokens is 0"),
])
def test_bad_options(options, message):
    """Errors name the argument, what came and what was expected."""
    memory = ModelMemory(tiny_model(pattern=("full",)), MemoryConfig(REQUESTS, 1, BLOCK, {"full": 8}))
    with pytest.raises(ValueError, match=message):
        SpecializedDecodeModelState(memory, RequestState(memory, LENGTH), [KVGroup("full", 8)],
                                    **{"sizes": (2,), "tokens": 1, **options})


def test_bad_keys():
    """No key holds too many requests, and no tensors are made for a key that makes no sense."""
    _, state, _ = states()
    with pytest.raises(ValueError, match="num_reqs is 7, expected at most 6"):
        state.key(7)
    for key in ((0, 0), (9, 18), (4, 7)):
        with pytest.raises(ValueError, match="key is"):
            state.replay(key)


@torch.no_grad()
def test_lookback_stays_in_place():
    """-1 at first, refilled in place by each step, -1 again for a dummy batch."""
    _, state, _ = states()
    at = state.lookback.data_ptr()
    assert (state.lookback == -1).all()
    state.warm_up(quiet=True)
    assert (state.lookback == -1).all(), "padding has no tokens before it"
    key = state.key(1)
    fill(state, state.inputs(key), [(3, [5, 6])])
    state.replay(key)
    first = int(state.requests.host.num_computed[3])
    depth = state.lookback.shape[1]
    assert state.lookback[0].tolist() == [(first - 1 - j) % 61 for j in range(depth)]
    assert (state.lookback[1:2] == -1).all()
    state.prepare_dummy_inputs(2, 1)
    assert (state.lookback == -1).all() and state.lookback.data_ptr() == at
