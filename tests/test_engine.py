"""The engine's text equals the token-by-token truth on every route, and nothing a request does reaches another."""

import random

import pytest
import torch
from harness import assert_close, failing_kernel
from tiny import engine, greedy, tiny_config, tiny_model
from truth_model import TruthModel

from torch_replay import HybridModel, SamplingParams
from torch_replay.ops.conv import naive as conv
from torch_replay.ops.gdn import naive as gdn
from torch_replay.ops.mamba2 import naive as mamba2
from torch_replay.ops.registry import override_kernel

LENGTHS = (5, 1, 37, 70, 16)
TOKENS = 40
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

ROUTES = {
    "replay": {},
    "plain": {"replay": False},
    "replay_spec": {"num_spec": 3},
    "plain_spec": {"num_spec": 3, "replay": False},
    "small_chunks": {"chunk_size": 7, "prefill_budget": 9, "prefill_rows": 2},
    "one_token_chunks": {"chunk_size": 1, "max_num_seqs": 2},
    "odd_ring": {"window": 5, "ring_len": 11, "num_spec": 4},
    "window_is_one": {"window": 1},
    "long_ring": {"window": 32, "ring_len": 64, "num_spec": 15},
    "preempted": {"num_blocks": 16, "block_size": 8, "num_spec": 2},
    "preempted_plain": {"num_blocks": 16, "block_size": 8, "num_spec": 2, "replay": False},
    "alone": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 61, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def want(model, prompts):
    return [greedy(model, prompt, TOKENS) for prompt in prompts]


def texts(engine, prompts, params=PARAMS):
    return [output.token_ids for output in engine.generate(prompts, params)]


def test_the_reference_is_the_truth(model, prompts, want):
    """The full-sequence forward picks what the float64 token-by-token model picks, with margins above rounding."""
    for prompt, tokens in zip(prompts[:3], want):
        logits = TruthModel(model).logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4


@pytest.mark.parametrize("options", ROUTES.values(), ids=ROUTES)
def test_greedy_text(model, prompts, want, options):
    """Replayed or not, speculative or not, batched or alone, chunked or whole, preempted or not: the same tokens."""
    runner = engine(model, **options)
    finished = []
    runner.scheduler.finish, finish = lambda r, reason: (finished.append(r), finish(r, reason)), runner.scheduler.finish
    runner.scheduler.drafter = RandomDrafter([p + w for p, w in zip(prompts, want)])
    assert texts(runner, prompts) == want
    if "preempted" in [name for name, value in ROUTES.items() if value is options][0]:
        assert sum(request.preemptions for request in finished) > 0
    if options.get("num_spec"):
        assert 0.2 < runner.stats.accepted_drafts / runner.stats.drafted < 0.95
    if options.get("replay", True):
        assert runner.stats.flushes == runner.stats.replay_flushes > 0


def test_state_moves_the_logits(model, prompts):
    """The tests above can fail: zeroing the recurrent state after a prompt moves the next logits."""
    for family in ("mamba2", "gdn"):
        logits = []
        for zeroed in (False, True):
            runner = engine(model)
            runner.add_request(prompts[2], PARAMS)
            runner.step()
            if zeroed:
                runner.memory.states[family].state.zero_()
            seen = []
            runner.model, head = model, model.logits
            model.logits = lambda x, seen=seen, head=head: (seen.append(head(x)), seen[-1])[1]
            try:
                runner.step()
            finally:
                del model.logits
            logits.append(seen[0][0])
        assert (logits[0] - logits[1]).abs().max() > 0.1, family


def forget_ring(kernel, position):
    def broken(*args, **kwargs):
        args = list(args)
        args[position] = torch.zeros_like(args[position])
        return kernel(*args, **kwargs)

    return broken


@pytest.mark.parametrize("op, kernel", [
    ("mamba2_replay", forget_ring(mamba2.mamba2_replay, 5)),
    ("gdn_replay", forget_ring(gdn.gdn_replay, 5)),
    ("conv_replay", forget_ring(conv.conv_replay, 4)),
    ("ring_commit", lambda *args, **kwargs: None),
])
def test_negative_control(model, prompts, want, op, kernel):
    """An op broken on purpose changes the text."""
    with override_kernel(op, "cpu", kernel):
        assert texts(engine(model), prompts) != want


class RandomDrafter:
    """Drafts of every length, mostly right; some tokens lie outside the vocabulary."""

    def __init__(self, answers):
        self.answers, self.random = answers, random.Random(3)

    def propose(self, tokens, limit):
        answer = next((a for a in self.answers if a[: len(tokens)] == tokens), None)
        length = self.random.randint(0, limit)
        if answer is None:
            return [self.random.randint(1, 60) for _ in range(length)]
        right = answer[len(tokens) : len(tokens) + length]
        return [token if self.random.random() < 0.7 else self.random.randint(-1, 65) for token in right]


@pytest.mark.parametrize("replay", [True, False])
def test_drafts_of_every_length(model, prompts, want, replay):
    """A foreign drafter with lengths that vary by row and step, zero included, leaves the text as it is."""
    runner = engine(model, num_spec=5, replay=replay, window=6)
    runner.scheduler.drafter = RandomDrafter([p + w for p, w in zip(prompts, want)])
    assert texts(runner, prompts) == want
    assert 0.2 < runner.stats.accepted_drafts / runner.stats.drafted < 0.95


def test_prompt_lookup(model):
    """Prompts that repeat themselves get drafts from their own history, and the text stays as it is."""
    prompts = [[5, 6, 7, 8, 9] * 8, [11, 12, 13] * 9]
    base = engine(model)
    want = texts(base, prompts)
    runner = engine(model, num_spec=4)
    assert texts(runner, prompts) == want
    assert runner.stats.drafted > 20


SAMPLED = SamplingParams(max_tokens=30, temperature=1.0, top_k=20, top_p=0.9, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def sampled(model, prompts, want):
    base = texts(engine(model), prompts, SAMPLED)
    assert base != [tokens[:30] for tokens in want]
    return base


@pytest.mark.parametrize("options", [{"num_spec": 3}, {"replay": False}, {"chunk_size": 7}, {"max_num_seqs": 1},
                                     {"num_blocks": 16, "block_size": 8}], ids=str)
def test_sampled_text(model, prompts, sampled, options):
    """A sampled text depends on seed and positions alone: not on drafts, batch, chunks, preemption or route."""
    assert texts(engine(model, **options), prompts, SAMPLED) == sampled


class Injected(RuntimeError):
    pass


@pytest.mark.parametrize("op", ["mamba2_replay", "gdn_replay", "write_kv", "ring_commit", "paged_attention"])
@pytest.mark.parametrize("after", [1, 3, 31])
def test_failed_step(model, prompts, want, op, after):
    """A step that raises in the middle changes no request's text: all are computed anew from their tokens."""
    runner, count = engine(model, num_spec=2), 24
    ids = [runner.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True)) for prompt in prompts]
    final, raised = {}, 0
    with override_kernel(op, "cpu", failing_kernel(op, after, Injected)):
        while runner.has_work:
            try:
                final.update((output.id, output.token_ids) for output in runner.step())
            except Injected:
                raised += 1
    assert raised == 1
    assert [final[i] for i in ids] == [tokens[:count] for tokens in want]


def test_outputs_before_a_failure(model, prompts, want):
    """A prompt that ended in a step whose decode rows then failed is handed out; the next call raises."""
    runner = engine(model)
    first = runner.add_request(prompts[0], PARAMS)
    runner.step()
    second = runner.add_request(prompts[1], SamplingParams(max_tokens=1, ignore_eos=True))
    with override_kernel("mamba2_replay", "cpu", failing_kernel("mamba2_replay", 1, Injected)):
        outputs = runner.step()
        assert [(output.id, output.token_ids) for output in outputs] == [(second, want[1][:1])]
        assert runner.has_work
        with pytest.raises(Injected):
            runner.step()
    final = {}
    while runner.has_work:
        final.update((output.id, output.token_ids) for output in runner.step())
    assert final == {first: want[0]}


def test_failing_callback(model, prompts, want):
    """An exception in one request's callback ends that request only, and `step` raises it after the others' turn."""
    runner = engine(model)
    seen = []

    def callback(output):
        seen.append(output)
        if len(output.token_ids) == 7:
            raise Injected

    victim = runner.add_request(prompts[0], PARAMS, on_output=callback)
    others = [runner.add_request(prompt, PARAMS) for prompt in prompts[1:]]
    final, raised = {}, 0
    while runner.has_work:
        try:
            final.update((output.id, output) for output in runner.step())
        except Injected:
            raised += 1
    assert raised == 1 and seen[-1].finish_reason == "error" and len(seen[-1].token_ids) == 7
    assert [final[i].token_ids for i in others] == want[1:]
    assert victim not in runner._live and runner.scheduler.has_work is False


def test_prefill_hands_over_a_checkpoint(model, prompts):
    """After a prefill the ring is empty and the checkpoint is the state after the whole prompt, in chunks or not."""
    states = []
    for chunk in (256, 7):
        runner = engine(model, chunk_size=chunk)
        runner.add_request(prompts[3], PARAMS)
        while not (request := next(iter(runner._live.values())).request).output_ids:
            runner.step()
        truth = TruthModel(model)
        for token in prompts[3]:
            truth.step(token)
        for family, context in runner.memory.states.items():
            assert not context.ring_committed.any()
            states.append((family, context.state[:, request.index + 1]))
    for (family, whole), (_, chunked) in zip(states[:2], states[2:]):
        assert_close(family, chunked, whole, 1e-5)
    for (family, got), kind in zip(states, ("mamba2", "gdn")):
        assert family == kind
        want = [state for layer, state in zip(model.layers, truth.states) if layer.kind == family]
        assert_close(family, got, torch.stack(want), 1e-5)


def test_abort_in_a_callback(model, prompts, want):
    """A callback may abort its own request or any other, also one whose turn is later in the same step."""
    runner = engine(model, max_num_seqs=5)
    final = {}

    def killer(output):
        if len(output.token_ids) == 9:
            assert runner.abort("victim") and runner.abort("killer")

    for name, prompt, callback in (("early", prompts[0], None), ("killer", prompts[1], killer),
                                   ("victim", prompts[2], None), ("late", prompts[3], None)):
        runner.add_request(prompt, PARAMS, name, callback)
    while runner.has_work:
        final.update((output.id, output) for output in runner.step())
    assert final["killer"].finish_reason == "abort" and final["killer"].token_ids == want[1][:9]
    assert len(final["victim"].token_ids) < 10
    assert [final[name].token_ids for name in ("early", "late")] == [want[0], want[3]]
    assert not runner._live
    assert not runner.stats._ring_rows  # nothing is kept of a request that has ended


def test_abort_and_late_arrival(model, prompts, want):
    """Requests join and leave between steps; a recycled slot starts clean."""
    runner = engine(model, max_num_seqs=2, num_spec=2)
    first = runner.add_request(prompts[2], PARAMS)
    for _ in range(5):
        runner.step()
    assert runner.abort(first) and not runner.abort(first) and not runner.abort("nobody")
    for states in runner.memory.states.values():
        states.state.fill_(1e4)
        for ring in states.rings:
            ring.fill_(float("nan"))
    assert texts(runner, prompts) == want


def test_streaming_adds_up(model, prompts):
    """The callback sees every token once and in order."""
    runner = engine(model, num_spec=3)
    seen: dict[str, list] = {}
    ids = [runner.add_request(p, PARAMS, on_output=lambda o: seen.setdefault(o.id, []).append(o)) for p in prompts]
    while runner.has_work:
        runner.step()
    for request in ids:
        lengths = [len(output.token_ids) for output in seen[request]]
        assert lengths == sorted(set(lengths)) and lengths[-1] == TOKENS
        assert [output.finish_reason for output in seen[request]] == [None] * (len(lengths) - 1) + ["length"]


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text):
        return type("Encoding", (), {"ids": [ord(c) - 64 for c in text]})

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(64 + i) for i in ids)


def test_stop_strings(model, prompts, want):
    """Text ends before the stop string, tokens with the one that completed it; no part of it is ever streamed."""
    text = Letters().decode(want[0])
    stop = text[10:13]
    end = text.index(stop)
    runner = engine(model, num_spec=3)
    runner.tokenizer = Letters()
    pieces = []
    runner.add_request(prompts[0], SamplingParams(max_tokens=TOKENS, stop=(stop, "never"), ignore_eos=True), "a",
                       on_output=lambda output: pieces.append(output.new_text))
    last = None
    while runner.has_work:
        last = runner.step()[-1]
    assert (last.text, last.finish_reason) == (text[:end], "stop")
    assert last.token_ids == want[0][: end + 3]
    assert "".join(pieces) == text[:end]


def test_end_of_text_and_context(model, prompts, want):
    """The end-of-text token ends a request unless told otherwise, and so does the end of the context."""
    runner = engine(model)
    eos = want[1][6]
    runner.model.config.__dict__["eos_token_id"], saved = eos, runner.model.config.eos_token_id
    try:
        output = runner.generate([prompts[1]], SamplingParams(max_tokens=TOKENS))[0]
    finally:
        runner.model.config.__dict__["eos_token_id"] = saved
    assert output.finish_reason == "stop" and output.token_ids == want[1][: want[1].index(eos) + 1]
    output = engine(model, max_model_len=80, num_spec=3).generate([prompts[3]], PARAMS)[0]
    assert (output.finish_reason, output.token_ids) == ("length", want[3][:10])


@pytest.mark.parametrize("prompt, message", [
    ([], "prompt"), ([61], r"token 61, expected ids in \[0, 61\)"), ([-1], "token -1"), ([1] * 300, "prompt"),
])
def test_bad_prompts(model, prompt, message):
    """A prompt that cannot run is refused by name and leaves the engine as it was."""
    runner = engine(model)
    with pytest.raises(ValueError, match=message):
        runner.add_request(prompt)
    with pytest.raises(TypeError, match="no tokenizer"):
        runner.add_request("text")
    assert not runner.has_work and not runner._live


@pytest.mark.parametrize("options, message", [
    ({"num_spec": 16}, "num_spec is 16"), ({"window": 0}, "window is 0"), ({"ring_len": 16}, "ring_len is 16"),
    ({"max_model_len": 300}, "max_model_len is 300"), ({"block_size": 0}, "block_size is 0"),
    ({"chunk_size": True}, "chunk_size is True"), ({"decode_sizes": (1, 2)}, r"decode_sizes is \(1, 2\)"),
])
def test_bad_options(model, options, message):
    """Limits that contradict each other are refused by name."""
    with pytest.raises(ValueError, match=message):
        engine(model, **options)


@pytest.mark.parametrize("pattern", [("mamba2",), ("gdn", "mlp"), ("swa", "swa"), ("full",), ("mlp",)], ids=str)
def test_any_pattern(pattern):
    """Models of one layer kind run, with and without drafts."""
    model = tiny_model(3, pattern=pattern)
    prompts = [[3, 4, 5, 3, 4], [7] * 20]
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    want = [greedy(model, prompt, 25) for prompt in prompts]
    for options in ({}, {"num_spec": 3}, {"replay": False, "num_spec": 3}):
        assert texts(engine(model, **options), prompts, params) == want


@pytest.mark.parametrize("dtype, chosen, expected", [
    (torch.float32, None, {"mamba2": torch.float32, "gdn": torch.float32}),
    (torch.bfloat16, None, {"mamba2": torch.bfloat16, "gdn": torch.float16}),
    (torch.float16, None, {"mamba2": torch.float16, "gdn": torch.float16}),
    (torch.bfloat16, torch.float32, {"mamba2": torch.float32, "gdn": torch.float32}),
], ids=str)
def test_ring_dtypes(dtype, chosen, expected):
    """Rings have the dtypes that the drift study chose, or the caller's, and the engine decodes with them."""
    model = HybridModel(tiny_config(("mamba2", "gdn", "mlp")), dtype=dtype).eval()
    runner = engine(model, dtype=dtype, ring_dtype=chosen)
    assert {family: states.rings[0].dtype for family, states in runner.memory.states.items()} == expected
    output, = runner.generate([[3, 1, 4, 1, 5]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert len(output.token_ids) == 20
