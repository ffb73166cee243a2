"""Engines whose recurrent states are stored in fewer bits: what they keep, what they refuse, how they round."""

import pytest
import torch
from harness import raw
from tiny import engine, tiny_model

from torch_replay import EngineConfig, SamplingParams, ops
from torch_replay.models import cached
from torch_replay.states.replay_context import PlainStates, ReplayContext

PATTERN = ("mamba2", "mlp", "gdn", "full", "mamba2", "gdn")
PROMPT = [(11 * i) % 61 for i in range(37)]
EIGHT_BIT = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
# relative error of a state after PROMPT and 20 steps; int8 and float8 keep about 7 and 4 bits of a row's largest value
BOUND = {torch.int8: 0.02, torch.float8_e4m3fn: 0.08}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


def decoded(states: ReplayContext, slot: int) -> torch.Tensor:
    """The checkpoints of a slot in float32."""
    values = states.state[:, slot].float()
    return values if states.state_scale is None else values * states.state_scale[:, slot].unsqueeze(-1)


def forced(runner, tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Decodes the given tokens one a step, whatever the model would say, behind PROMPT: checkpoints, and the logits of
    every step."""
    logits, of_model = [], runner.model.logits

    def noting(hidden):
        logits.append(of_model(hidden).float())
        return logits[-1]

    runner.add_request(PROMPT, SamplingParams(max_tokens=len(tokens) + 5, ignore_eos=True), "r")
    runner.step()
    (request,) = runner.scheduler.running
    while not request.output_ids:
        runner.step()
    runner.model.logits = noting
    try:
        for token in tokens:
            request.output_ids[-1] = token
            runner.step()
    finally:
        del runner.model.logits
    slot = request.index + 1
    return [decoded(states, slot) for states in runner.memory.states.values()], [each[0, -1] for each in logits]


def rms(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item()


@EIGHT_BIT
@torch.no_grad()
def test_near_float32(dtype):
    """Of the same tokens, states stay within the bound and logits near those of float32 states."""
    model = tiny_model(pattern=PATTERN)
    options = dict(max_num_seqs=2, max_model_len=128, chunk_size=16, window=6)
    tokens = [(5 * i) % 61 for i in range(20)]
    got, want = (forced(engine(model, state_dtype=d, **options), tokens) for d in (dtype, torch.float32))
    for one, other in zip(got[0], want[0], strict=True):
        assert 0 < rms(one - other) < BOUND[dtype] * rms(other)
    for one, other in zip(got[1], want[1], strict=True):
        assert 0 < rms(one - other) < 3 * BOUND[dtype] * rms(other)


@EIGHT_BIT
@pytest.mark.parametrize("where", ["prefill", "decode"])
@torch.no_grad()
def test_lost_scales_would_show(dtype, where, monkeypatch):
    """Negative control: with scales of 1, in one route, states leave the bound."""
    model = tiny_model(pattern=PATTERN)
    options = dict(max_num_seqs=2, max_model_len=128, chunk_size=16, window=6)
    tokens = [(5 * i) % 61 for i in range(20)]
    want = forced(engine(model, **options), tokens)
    broken = engine(model, state_dtype=dtype, **options)
    if where == "prefill":
        rounded = cached.round_state
        monkeypatch.setattr(cached, "round_state", lambda *args: (
            rounded(*args)[0], torch.ones_like(rounded(*args)[1])))
    for states in broken.memory.states.values() if where == "decode" else ():
        scales = torch.ones_like(states.state_scale[0])
        rounding = states.rounding
        monkeypatch.setattr(states, "rounding", lambda layer, scales=scales, of=rounding: of(layer) | {
            "state_scale": scales})
    got = forced(broken, tokens)
    assert any(rms(one - other) > 3 * BOUND[dtype] * rms(other) for one, other in zip(got[1], want[1], strict=True))


@EIGHT_BIT
@torch.no_grad()
def test_prefix_hits_equal_solo_runs(dtype):
    """A prompt that starts from a published 8-bit snapshot reads the same as the prompt computed alone in chunks that
    end at the same edge: values and scales are copied exactly."""
    model = tiny_model(pattern=PATTERN)
    options = dict(state_dtype=dtype, prefix_cache=True, block_size=8, state_block_size=8, chunk_size=16,
                   max_model_len=128)
    second = PROMPT[:32] + [3, 1, 4, 1, 5]
    runner, solo = engine(model, **options), engine(model, **options)
    runner.generate([PROMPT], GREEDY)
    got, want = runner.generate([second], GREEDY), solo.generate([second], GREEDY)
    assert runner.scheduler.prefix.counts.hits == 1 and solo.scheduler.prefix.counts.hits == 0
    assert got[0].token_ids == want[0].token_ids


REFUSED = [
    (dict(state_dtype=torch.int32), "state_dtype is torch.int32, expected torch.float32 or torch.bfloat16 or"),
    (dict(state_dtype=torch.float64), "state_dtype is torch.float64"),
    (dict(state_dtype=torch.float8_e5m2), "state_dtype is torch.float8_e5m2"),
    (dict(state_dtype="float32"), "state_dtype is 'float32'"),
    (dict(state_dtype=torch.int8, replay=False), "state_dtype is torch.int8, .* or torch.float16 with replay=False"),
    (dict(dtype=torch.int8), "^dtype is torch.int8"),
    (dict(dtype=torch.float64), "^dtype is torch.float64"),
    (dict(dtype=None), "^dtype is None"),
    (dict(ring_dtype=torch.int8), "ring_dtype is torch.int8, expected None or torch.float32 or"),
    (dict(stochastic_rounding=1), "stochastic_rounding is 1, expected True or False"),
    (dict(stochastic_rounding=True), "expected False for states of float32, which rounds nothing"),
    (dict(stochastic_rounding=True, state_dtype=torch.float16, replay=False), "written at every step .replay=False."),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_refused_by_name(options, message):
    """What no step could run is refused when the configuration is made."""
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_plain_states_refuse():
    """Memory made without an engine refuses the same: the plain update has no scales."""
    states = engine(tiny_model(pattern=("mamba2",)), state_dtype=torch.int8).memory.states["mamba2"]
    with pytest.raises(ValueError, match="layer 0.mamba2: state_dtype is torch.int8 .* without replay"):
        PlainStates(states.layers, 2)


@EIGHT_BIT
@torch.no_grad()
def test_export_and_warm_up(dtype):
    """Scales go with a state that is exported and imported elsewhere; warm-up changes no byte of them."""
    runner = engine(tiny_model(pattern=("mamba2", "gdn")), state_dtype=dtype, max_model_len=64)
    runner.generate([PROMPT], GREEDY)
    before = [raw(pool).clone() for states in runner.memory.states.values() for pool in states.block_copy_tensors()]
    runner.warm_up(quiet=True)
    after = [raw(pool) for states in runner.memory.states.values() for pool in states.block_copy_tensors()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    for states in runner.memory.states.values():
        assert decoded(states, 2).any() and not torch.equal(decoded(states, 2), decoded(states, 4))
        states.import_slot(4, states.export_slot(2, len(PROMPT) + 19))
        assert torch.equal(decoded(states, 2), decoded(states, 4))


def steps_from_one_start(runner, count: int, reset_seeds: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The checkpoints of the live slot after the flush that follows PROMPT, `count` times from the same bytes; and what
    they round, folded in float32."""
    (states,) = runner.memory.states.values()
    runner.add_request(PROMPT[:16], SamplingParams(max_tokens=9, ignore_eos=True), "r")
    runner.step()
    (request,) = runner.scheduler.running
    slot, found = request.index + 1, []
    while int(states.ring_committed[0, slot]) < states.window:
        runner.step()
    seeds, pools = states.seeds, states.block_copy_tensors()
    kept, first = [pool.clone() for pool in pools], None if seeds is None else seeds.clone()
    exact = states.state.float()
    if states.state_scale is not None:
        exact = exact * states.state_scale.unsqueeze(-1)
    at, place = torch.tensor([[slot]]), slice(slot, slot + 1)
    plan = at, at, states.ring_start[:, place], states.ring_committed[:, place], states.layer_group, torch.tensor([0])
    if states.family == "mamba2":
        decays = torch.stack([layer.mixer.decay_rates() for layer in runner.model.layers])
        ops.mamba2_materialize(exact, *states.rings, decays, *plan)
    else:
        ops.gdn_materialize(exact, *states.rings, *plan)
    for _ in range(count):
        for pool, before in zip(pools, kept):
            pool.copy_(before)
        if reset_seeds:
            seeds.copy_(first)
        runner.state.fill(runner.decode.inputs, [(request.index, [request.output_ids[-1]])])
        runner.decode.run["greedy"]()
        runner.state.committed(runner.decode.inputs)
        found.append(decoded(states, slot))
    return torch.stack(found), exact[:, slot]


@pytest.mark.parametrize("family, dtype, compiled", [
    ("mamba2", torch.int8, False), ("gdn", torch.float8_e4m3fn, False), ("mamba2", torch.float16, False),
    ("gdn", torch.bfloat16, False), ("gdn", torch.int8, True)], ids=str)
@torch.no_grad()
def test_stochastic_rounding(family, dtype, compiled):
    """Every step draws anew, and the same from the same seeds; the mean of many draws comes near what was rounded,
    where rounding to nearest stays off."""
    model, count = tiny_model(pattern=(family, family)), 32
    options = dict(max_num_seqs=1, max_model_len=64, window=4)
    runner = engine(model, state_dtype=dtype, stochastic_rounding=True, compiled=compiled, **options)
    draws, exact = steps_from_one_start(runner, count, reset_seeds=False)
    assert all((draws[i] != draws[i - 1]).any() for i in range(1, count))
    again = engine(model, state_dtype=dtype, stochastic_rounding=True, **options)
    repeated, _ = steps_from_one_start(again, 2, reset_seeds=True)
    assert torch.equal(repeated[0], repeated[1])
    (states,) = again.memory.states.values()
    assert len(set(states.seeds.tolist())) == len(states.layers)
    single, mean = rms(draws[0] - exact), rms(draws.mean(0) - exact)
    assert 0 < mean < 0.3 * single, (mean, single)  # 1 / sqrt(count) = 0.18
    nearest, exact = steps_from_one_start(engine(model, state_dtype=dtype, **options), 4, reset_seeds=False)
    assert rms(nearest.mean(0) - exact) == rms(nearest[0] - exact) > 0  # negative control
