"""A model with engram layers writes the truth's text on every route, from the device's own token history."""

import pytest
import test_engine_traces as random_traces
import torch
from harness import assert_close
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file
from test_engine import RandomDrafter
from tiny import engine, greedy, tiny_model
from truth_model import TruthModel

from torch_replay import SamplingParams
from torch_replay.engram import DeviceTable, MappedTable, quantize_rows
from torch_replay.models import HybridModel
from torch_replay.ops.engram import naive
from torch_replay.ops.registry import override_kernel
from torch_replay.states.token_history import HostPrefetch

PATTERN = ("mamba2", "engram", "mlp", "swa", "engram", "gdn", "full")
LENGTHS = (5, 1, 37, 50)
TOKENS = 24
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

ROUTES = {
    "replay": {},
    "plain_spec": {"num_spec": 3, "replay": False},
    "replay_spec": {"num_spec": 3},
    "small_chunks": {"chunk_size": 7, "prefill_budget": 9, "prefill_rows": 2},
    "one_token_chunks": {"chunk_size": 1, "max_num_seqs": 2},
    "preempted": {"num_blocks": 11, "block_size": 8, "num_spec": 2, "chunk_size": 5},
    "alone": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def model():
    return with_masked_token(tiny_model(5, pattern=PATTERN))


def with_masked_token(model):
    """Token 3 is masked, as tokens of an image would be; it appears in prompts and may be written."""
    model.engram.token_map[3] = -1
    return model


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 61, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def want(model, prompts):
    return [greedy(model, prompt, TOKENS) for prompt in prompts]


def texts(runner, prompts, params=PARAMS):
    return [output.token_ids for output in runner.generate(prompts, params)]


def test_the_reference_is_the_truth(model, prompts, want):
    """The full-sequence forward picks what the float64 token-by-token model picks, with margins above rounding."""
    assert any(3 in prompt for prompt in prompts)
    for prompt, tokens in zip(prompts[:3], want):
        logits = TruthModel(model).logits(prompt + tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4


@pytest.mark.parametrize("route", ROUTES)
def test_greedy_text(model, prompts, want, route):
    """Chunked or whole, speculative or not, batched or alone, preempted or not: the same tokens."""
    runner = engine(model, **ROUTES[route])
    runner.scheduler.drafter = RandomDrafter([p + w for p, w in zip(prompts, want)])
    preempted, preempt = [], runner.scheduler._preempt
    runner.scheduler._preempt = lambda request, plan: (preempted.append(request), preempt(request, plan))
    runner.state.requests.history.ids.fill_(17)  # leftovers of earlier requests
    assert texts(runner, prompts) == want
    assert (route == "preempted") == bool(preempted)
    if ROUTES[route].get("num_spec"):
        assert 0.2 < runner.stats.accepted_drafts / runner.stats.drafted < 0.95


def test_chunks_do_not_need_the_earlier_ones(model, prompts, want):
    """Whatever computed the tokens before a chunk (another request's prefix, say), the host uploads what it hashes."""
    runner = engine(model, chunk_size=7)
    write = runner.state.requests.history.write_lookback

    def after_garbage(req, start, tokens):
        runner.state.requests.history.ids[req] = 55
        write(req, start, tokens)

    runner.state.requests.history.write_lookback = after_garbage
    assert texts(runner, prompts) == want


def test_generated_tokens_come_from_the_device(model, prompts, want):
    """Decode uploads no ids; what the steps wrote is, at the end, each request's text, and damage to it shows."""
    runner = engine(model, max_num_seqs=len(prompts))
    requests = [runner._live[runner.add_request(prompt, PARAMS)].request for prompt in prompts]
    while not all(request.is_decoding for request in requests):
        runner.step()
    runner.state.requests.history.write_lookback = None
    for _ in range(6):
        runner.step()
    for request in requests:
        written = runner.state.requests.history.ids[request.index, : request.num_computed]
        assert written.tolist() == request.tokens[: request.num_computed]
    runner.state.requests.history.ids.copy_(runner.state.requests.history.ids.roll(1, 1))
    while runner.has_work:
        runner.step()
    assert [request.output_ids for request in requests] != want


@pytest.mark.parametrize("pattern", [("engram", "full", "engram"), ("mamba2", "engram", "full")], ids="-".join)
def test_prefix_hits(pattern):
    """A request that takes a prefix over hashes tokens that it never computed, over other requests' leftovers."""
    other = tiny_model(5, pattern=pattern)
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(1, 61, (48,), generator=generator).tolist()
    prompts = [shared + torch.randint(1, 61, (n,), generator=generator).tolist() for n in (5, 1, 3, 2)]
    runner = engine(other, block_size=8, prefix_cache=True, num_spec=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    got = []
    for prompt in prompts:
        runner.state.requests.history.ids.fill_(33)
        got += texts(runner, [prompt], params)
    assert got == [greedy(other, prompt, 12) for prompt in prompts]
    counts = runner.scheduler.prefix.counts
    assert counts.hits >= 3 and counts.hit_tokens >= 3 * 40 and not counts.replayed_tokens


def test_random_traces(monkeypatch):
    """Requests that come, go, fail and are preempted at random, over a model of engram layers."""
    for name, value in (("PATTERN", ("engram", "swa", "mamba2", "engram")), ("_models", {}), ("_solo", {})):
        monkeypatch.setattr(random_traces, name, value)

    @settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(random_traces.traces())
    def every_trace(trace):
        random_traces.run_trace(trace)

    every_trace()


@pytest.mark.parametrize("change", ["gate", "values", "table"])
def test_engram_moves_the_logits(model, prompts, change):
    """The tests above can fail: without the gate, the values or the table the logits are others."""
    other = with_masked_token(tiny_model(5, pattern=PATTERN))
    for layer in other.layers:
        if layer.kind == "engram" and change == "gate":
            layer.mixer.gate = lambda hidden, keys, masked: torch.zeros(hidden.shape[:-1])
        elif layer.kind == "engram" and change == "values":
            layer.mixer.kv_proj.weight[other.config.hidden_size :] = 0.0
    if change == "table":
        other.engram.weight.copy_(other.engram.weight.roll(1, 0))
    ids = torch.tensor([prompts[3]])
    assert torch.equal(with_masked_token(tiny_model(5, pattern=PATTERN))(ids), model(ids))
    assert (other(ids) - model(ids)).abs().max() > 0.5


def test_masked_tokens_read_nothing(model, prompts):
    """The mixer gives exactly zero at a masked token, and something elsewhere."""
    ids = torch.tensor([[5, 3, 7, 3, 3, 9]])
    contexts = model.engram(ids)
    y = model.layers[1].mixer(torch.randn(1, 6, 32), contexts[0])
    assert (y[0].abs().amax(-1) == 0).tolist() == [False, True, False, True, True, False]


def broken_history(lookback, *args, **kwargs):
    lookback.fill_(-1)


def broken_order(lookback, *args, **kwargs):
    naive.engram_lookback(lookback, *args, **kwargs)
    lookback.copy_(lookback.flip(1))


@pytest.mark.parametrize("kernel", [broken_history, broken_order])
def test_negative_control(model, prompts, want, kernel):
    """A lookback broken on purpose changes the text."""
    with override_kernel("engram_lookback", "cpu", kernel):
        assert texts(engine(model), prompts) != want


def test_filler_reads_no_rows(model, prompts):
    """Padded rows and absent drafts ask for no table row, so that nothing is fetched for them."""
    asked = []

    def counting(table, scales, rows, *, out):
        asked.append(rows.clone())
        naive.engram_lookup(table, scales, rows, out=out)

    runner = engine(model, num_spec=3)
    runner.scheduler.drafter = type("NoDrafts", (), {"propose": lambda self, tokens, limit: []})()
    runner.add_request(prompts[0], PARAMS)
    with override_kernel("engram_lookup", "cpu", counting):
        runner.step()
        runner.step()
    decode = asked[-1].view(runner.decode.rows, 4, -1)
    assert (decode >= 0).all(-1).sum() == 1 and (decode[0, 0] >= 0).all() and (decode >= 0).any(-1).sum() == 1


def test_one_lookup_a_step(model, prompts):
    """All engram layers share one hash and one lookup, and the lookup comes before any layer's own ops."""
    calls = []

    def noting(name, kernel):
        return lambda *args, **kwargs: (calls.append(name), kernel(*args, **kwargs))[1]

    from torch_replay.ops.mamba2 import naive as mamba2

    runner = engine(model)
    runner.add_request(prompts[0], PARAMS)
    runner.step()
    with override_kernel("engram_lookup", "cpu", noting("lookup", naive.engram_lookup)), \
            override_kernel("ngram_hash", "cpu", noting("hash", naive.ngram_hash)), \
            override_kernel("mamba2_replay", "cpu", noting("layer", mamba2.mamba2_replay)):
        runner.step()
    assert calls == ["hash", "lookup", "layer"]


@pytest.mark.parametrize("place", ["mapped", "float8"])
def test_tables_elsewhere(model, prompts, tmp_path, place):
    """Rows read from the file, or in float8 with shared exponents: the engine equals the same model's own forward."""
    if place == "mapped":
        model.save_pretrained(tmp_path)
        other = HybridModel.from_pretrained(tmp_path, engram_table="mapped").requires_grad_(False)
        assert isinstance(other.engram.table, MappedTable) and other.engram.weight.dtype == torch.float16
        same = HybridModel.from_pretrained(tmp_path).requires_grad_(False)
        assert_close("logits", other(torch.tensor([prompts[3]])), same(torch.tensor([prompts[3]])), 1e-6)
    else:
        other = with_masked_token(tiny_model(5, pattern=PATTERN))
        rows, exponents = quantize_rows(torch.nn.functional.pad(other.engram.weight, (0, 24)))
        other = with_masked_token(wide_rows(other, rows, exponents))
        assert other.engram.weight.dtype == torch.float8_e4m3fn
    names = {name for name in other.state_dict() if name.startswith("engram.")}
    assert names == {"engram.token_map"}
    want = [greedy(other, prompt, 12) for prompt in prompts[:3]]
    assert texts(engine(other, num_spec=2), prompts[:3], SamplingParams(max_tokens=12, ignore_eos=True)) == want


@pytest.mark.parametrize("route", ["small_chunks", "replay_spec", "preempted"])
def test_host_prefetch(model, prompts, want, tmp_path, monkeypatch, route):
    """Rows that the host fetches from the file before each step give the text as well, and no step looks any up."""
    other = tiny_model(5, pattern=PATTERN)
    other.load_state_dict(model.state_dict())
    save_file({"t": other.engram.weight.contiguous()}, tmp_path / "table.safetensors")
    other.engram.place(MappedTable(tmp_path / "table.safetensors", "t"))
    monkeypatch.setattr(MappedTable, "needs_prefetch", lambda self, device: True)
    runner = engine(other, **ROUTES[route])
    runner.scheduler.drafter = RandomDrafter([p + w for p, w in zip(prompts, want)])
    assert isinstance(runner.state.requests.history, HostPrefetch)
    run, looked_up = runner.decode.run["greedy"], []

    def step():
        with override_kernel("engram_lookup", "cpu", lambda *args, **kwargs: looked_up.append(args)):
            return run()

    runner.decode.run["greedy"] = step
    assert texts(runner, prompts) == want and not looked_up
    kept = runner.state.requests.history.kept[runner.decode.rows, runner.decode.tokens]
    runner.generate(prompts[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    again = runner.state.requests.history.kept[runner.decode.rows, runner.decode.tokens]
    assert [value.data_ptr() for layer in kept for value in layer] == [v.data_ptr() for layer in again for v in layer]


def wide_rows(model, rows, exponents):
    """The model with rows of 32 values, of which its projection reads the first 8."""
    import dataclasses

    torch.manual_seed(0)
    wide = HybridModel(dataclasses.replace(model.config, engram_dim=32)).eval().requires_grad_(False)
    state = model.state_dict()
    for name, value in wide.state_dict().items():
        if name.endswith("kv_proj.weight"):
            value.view(value.shape[0], -1, 32)[..., :8] = state[name].view(value.shape[0], -1, 8)
        elif name != "engram.weight":
            value.copy_(state[name])
    wide.engram.place(DeviceTable(rows, exponents))
    return wide


def test_bad_places(model, tmp_path):
    """An unknown place and a table of another shape are refused by name."""
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="engram_table: got 'disk', expected 'device', 'pinned' or 'mapped'"):
        HybridModel.from_pretrained(tmp_path, engram_table="disk")
    with pytest.raises(ValueError, match=r"table: got shape \[3, 8\]"):
        model.engram.place(DeviceTable(torch.zeros(3, 8)))
    mapped = HybridModel.from_pretrained(tmp_path, engram_table="mapped")
    with pytest.raises(ValueError, match="engram: got a MappedTable, expected the table to be a parameter"):
        mapped.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()
