"""A model with Kimi Delta Attention layers: its text equals token-by-token truth on every route of the engine."""

from contextlib import nullcontext

import pytest
import torch
from harness import assert_close
from prefix_harness import Watch
from test_engine import RandomDrafter
from test_snapshots import check_snapshots
from test_state_dtypes import forced, rms
from tiny import engine, greedy, tiny_model
from truth_model import TruthModel

from torch_replay import HybridModel, SamplingParams
from torch_replay.nn import KimiDeltaAttention
from torch_replay.ops.kda import naive as kda
from torch_replay.ops.registry import override_kernel

PATTERN = ("kda", "mlp", "gdn", "full", "kda")
TOKENS = 20
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
ROUTES = {
    "replay": {},
    "plain": {"replay": False},
    "replay_spec": {"num_spec": 3, "window": 5, "ring_len": 11},
    "plain_spec": {"num_spec": 3, "replay": False},
    "small_chunks": {"chunk_size": 7, "prefill_budget": 9, "prefill_rows": 2},
    "preempted": {"num_blocks": 9, "block_size": 8, "num_spec": 2},
    "prefix_cache": {"prefix_cache": True, "block_size": 4, "state_block_size": 4, "num_spec": 2},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(7, pattern=PATTERN)


@pytest.fixture(scope="module")
def prompts():
    """The last begins as the second does."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(1, 61, (n,), generator=generator).tolist() for n in (5, 30, 1)]
    return [*made, made[1][:21] + made[0]]


@pytest.fixture(scope="module")
def want(model, prompts):
    """Greedy text by the truth, with margins above rounding."""
    texts, truth = [], TruthModel(model)
    for prompt in prompts:
        logits = truth.logits(prompt)[-1]
        texts.append([])
        for _ in range(TOKENS):
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > 1e-4
            texts[-1].append(int(best.indices[0]))
            logits = truth.step(texts[-1][-1])
    return texts


def texts(runner, prompts):
    return [output.token_ids for output in runner.generate(prompts, PARAMS)]


def test_the_whole_sequence(model, prompts, want):
    """The differentiable forward is the truth too, and the state matters to it: zeroed, it says something else."""
    ids = prompts[1] + want[1]
    truth = TruthModel(model)
    expected = truth.logits(ids)
    assert_close("logits", model(torch.tensor([ids]))[0], expected, 1e-5)
    assert greedy(model, prompts[0], TOKENS) == want[0]
    truth.logits(ids[:-1])
    truth.states[0] = truth.states[4] = None
    assert (truth.step(ids[-1]) - expected[-1]).abs().max() > 0.1


@pytest.mark.parametrize("options", ROUTES.values(), ids=ROUTES)
def test_greedy_text(model, prompts, want, options):
    """Replayed or not, speculative or not, chunked, preempted or from a snapshot: the same tokens."""
    runner = engine(model, **options)
    preempted = []
    runner.scheduler.drafter = RandomDrafter([p + w for p, w in zip(prompts, want)])
    runner.scheduler.finish, finish = (
        lambda r, reason: (preempted.append(r.preemptions), finish(r, reason)), runner.scheduler.finish)
    assert texts(runner, prompts) == want
    if options.get("prefix_cache"):
        assert texts(runner, prompts) == want and runner.scheduler.prefix.counts.hit_tokens > 40
    assert (sum(preempted) > 0) == (options is ROUTES["preempted"])
    if options.get("replay", True):
        assert runner.stats.flushes == runner.stats.replay_flushes > 0


def forget_ring(*args, **kwargs):
    return kda.kda_replay(*args[:5], torch.zeros_like(args[5]), *args[6:], **kwargs)


@pytest.mark.parametrize("op, kernel, options", [
    ("kda_replay", forget_ring, {}), ("kda_update", lambda *args, out, **kwargs: out.zero_(), {"replay": False})])
def test_negative_control(model, prompts, want, op, kernel, options):
    """An op broken on purpose changes the text."""
    with override_kernel(op, "cpu", kernel):
        assert texts(engine(model, **options), prompts) != want


@pytest.mark.parametrize("broken", [False, True])
def test_snapshots_of_decode_steps(model, prompts, want, broken):
    """Every state published at a block's edge is the truth's, and the next request starts from it; one that was never
    written is seen in that request's text."""
    prompt, text = prompts[0], want[0]
    watch = Watch(model, num_snapshots=40, state_block_size=4, block_size=4, num_blocks=99, num_spec=2,
                  window=6, ring_len=10)
    watch.runner.scheduler.drafter = RandomDrafter([prompt + text])
    truth, states = TruthModel(model), {}
    for count, token in enumerate(prompt + text, 1):
        truth.step(token)
        states[count] = {"kda": truth.states[0].clone(), "gdn": truth.states[2].clone()}
    with override_kernel("kda_materialize", "cpu", lambda *args, **kwargs: None) if broken else nullcontext():
        assert watch.run([prompt], PARAMS) == [text]
    if not broken:
        assert check_snapshots(watch, prompt + text, states)[-1] == 24
    more = watch.run([prompt + text], PARAMS)
    assert watch.counts.hit_tokens == 24
    assert (more == [greedy(model, prompt + text, TOKENS)]) == (not broken)


def test_zeroing_the_state_moves_the_text(model, prompts, want):
    """A state that is lost after the prompt changes what follows."""
    runner = engine(model)
    runner.add_request(prompts[1], PARAMS)
    runner.step()
    runner.memory.states["kda"].state.zero_()
    while runner.has_work:
        outputs = runner.step()
    assert outputs[0].token_ids != want[1]


def test_names_of_the_public_checkpoints(model, tmp_path):
    """Parameters are called and shaped as in the library's stand-alone layer, and survive a model folder."""
    public = KimiDeltaAttention(32, heads=2, head_dim=8)
    shapes = {name: value.shape for name, value in public.named_parameters()}
    assert {name: value.shape for name, value in model.layers[0].mixer.named_parameters()} == shapes
    model.save_pretrained(tmp_path)
    loaded = HybridModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.layers[0].mixer.q_conv1d.weight, model.layers[0].mixer.q_conv1d.weight.half().float())


@pytest.mark.slow
def test_compiled_text(model, prompts, want):
    """Compiled prefill and decode steps, snapshots included, say the same."""
    runner = engine(model, 2, compiled=True, **ROUTES["prefix_cache"])
    runner.warm_up()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert texts(runner, prompts) == want


# a row's channels forget at rates of their own, so that its largest value, which scales it, is larger beside the others
@pytest.mark.parametrize("dtype, bound", [(torch.int8, 0.03), (torch.float8_e4m3fn, 0.08)], ids=str)
def test_eight_bit_states(model, dtype, bound):
    """Of the same tokens, 8-bit checkpoints stay within the rounding of a few flushes of the float32 ones."""
    options, tokens = dict(max_num_seqs=2, max_model_len=128, chunk_size=16, window=6), [7 * i % 61 for i in range(20)]
    (_, want), _ = forced(engine(model, **options), tokens)
    (_, got), _ = forced(engine(model, state_dtype=dtype, **options), tokens)
    assert 0.001 < rms(got - want) / rms(want) < bound
