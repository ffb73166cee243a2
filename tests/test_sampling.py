"""Sampling against a float64 reference and exact probabilities; speculation against direct sampling.

Critical values are the 0.999 quantiles of chi-square, by degrees of freedom, from the table in section 1.3.6.7.4 of the
NIST/SEMATECH e-Handbook of Statistical Methods. Seeds are fixed, so a test passes always or never.
"""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from torch_replay.engine.request import SamplingParams
from torch_replay.engine.sampling import count_accepted, sample_tokens
from torch_replay.ops.rounding import uniform

CRITICAL = {1: 10.828, 2: 13.816, 4: 18.467, 24: 51.179}
START = np.array([0.45, 0.25, 0.15, 0.1, 0.05])
CHAIN = np.array([  # row: what follows this token
    [0.1, 0.2, 0.3, 0.35, 0.05],
    [0.6, 0.1, 0.1, 0.1, 0.1],
    [0.05, 0.05, 0.8, 0.05, 0.05],
    [0.2, 0.2, 0.2, 0.2, 0.2],
    [0.02, 0.5, 0.08, 0.3, 0.1],
])


def sample(logits, positions, temperature=1.0, top_k=0, top_p=1.0, seeds=0, function=sample_tokens):
    """`sample_tokens` with numbers, or one number per row, for the parameters."""

    def rows(value, dtype):
        return torch.as_tensor(value).to(dtype).expand(logits.shape[0]).contiguous()

    return function(logits, positions, rows(temperature, torch.float32), rows(top_k, torch.int32),
                    rows(top_p, torch.float32), rows(seeds, torch.int64))


def reference(logits, draw, temperature, top_k, top_p):
    """One token from float64 logits [V], by the definition."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return order[0]
    order = order[: top_k or None]
    weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    probs = weights / weights.sum()
    if top_p < 1:
        size = next((n for n in range(1, len(probs)) if probs[:n].sum() >= top_p), len(probs))
        probs = probs[:size]
    return order[int(np.searchsorted(probs.cumsum(), draw * probs.sum(), side="right"))]


def draws(seeds, positions):
    return uniform(seeds.view(-1, 1), positions, torch.zeros_like(positions)).double().numpy()


def chi_square(counts, probs):
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vocab", [1, 2, 5, 63, 500])
def test_against_reference(vocab):
    """Rows that differ in every parameter: the token is the reference's, but for draws within 1e-6 of an edge."""
    generator = torch.Generator().manual_seed(vocab)
    rows, width = 60, 7
    logits = torch.randn(rows, width, vocab, generator=generator) * 3
    logits[::5] = logits[::5].round()  # ties
    logits[1::5, :, 1::2] = -torch.inf
    positions = torch.randint(0, 2**32, (rows, width), generator=generator)
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator)
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.5])[torch.arange(rows) % 4]
    top_k = torch.tensor([0, 1, 3, vocab, vocab + 9, 2**31 - 1])[torch.arange(rows) % 6]
    top_p = torch.tensor([1.0, 0.9, 0.5, 1e-9, 0.999])[torch.randint(0, 5, (rows,), generator=generator)]
    got = sample(logits, positions, temperature, top_k, top_p, seeds)
    assert got.dtype == torch.int64 and got.shape == (rows, width)
    numbers, exact = draws(seeds, positions), 0
    for row in range(rows):
        for i in range(width):
            t, k, p = temperature[row].double().item(), top_k[row].item(), top_p[row].double().item()
            near = [reference(logits[row, i].double().numpy(), min(max(numbers[row, i] + e, 0), 1 - 1e-9), t, k, p + f)
                    for e in (0, -1e-6, 1e-6) for f in ((0, -1e-6, 1e-6) if p < 1 else (0,))]
            assert got[row, i] in near
            exact += int(got[row, i] == near[0])
    assert exact >= 0.99 * rows * width


def test_greedy():
    """Temperature 0 takes the largest logit, the lowest index on ties, whatever seed, k and p are."""
    logits = torch.tensor([[[1.0, 7.0, 7.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]]])
    for seed in range(20):
        assert sample(logits, torch.tensor([[3, 4]]), 0.0, 3, 0.5, seed).tolist() == [[1, 0]]


def test_edges():
    """k = 1 and a tiny p are greedy; k >= V and p = 1 change nothing; ties are cut by index; -inf is never drawn."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 8, 31, generator=generator)
    positions = torch.arange(400).view(50, 8)
    greedy = logits.argmax(-1)
    assert torch.equal(sample(logits, positions, 1.0, 1), greedy)
    assert torch.equal(sample(logits, positions, 1.0, 0, 1e-30), greedy)
    assert torch.equal(sample(logits, positions, 1e-30), greedy)
    free = sample(logits, positions)
    assert not torch.equal(free, greedy)
    for k, p in ((31, 1.0), (1000, 1.0), (2**31 - 1, 1.0)):
        assert torch.equal(sample(logits, positions, 1.0, k, p), free)
    flat = torch.zeros(50, 8, 31)
    assert sample(flat, positions, 1.0, 4).unique().tolist() == [0, 1, 2, 3]
    # 31 equal tokens: 3 of them reach 3/31 - a little, 4 are needed for a little more
    assert sample(flat, positions, 1.0, 0, 3 / 31 - 1e-4).unique().tolist() == [0, 1, 2]
    assert sample(flat, positions, 1.0, 0, 3 / 31 + 1e-4).unique().tolist() == [0, 1, 2, 3]
    assert sample(flat, positions, 1.0, 4, 0.5 - 1e-4).unique().tolist() == [0, 1], "p counts what k has kept"
    holes = logits.clone()
    holes[..., ::2] = -torch.inf
    assert (sample(holes, positions, 100.0) % 2 == 1).all()
    only = torch.full((50, 8, 31), -torch.inf)
    only[..., 17] = -5.0
    assert (sample(only, positions, 0.7) == 17).all()
    assert torch.equal(sample(logits.half(), positions, 1.0, 1), logits.half().argmax(-1))


def test_rows_of_padding_stay_in_range():
    """NaN or all -inf logits give some id of the vocabulary, and leave other rows alone."""
    logits = torch.randn(4, 2, 9, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(8).view(4, 2)
    want = sample(logits, positions)
    logits[0], logits[2] = torch.nan, -torch.inf
    for temperature in (0.0, 1.0):
        got = sample(logits, positions, temperature)
        assert ((got >= 0) & (got < 9)).all()
    assert torch.equal(got[[1, 3]], want[[1, 3]])


def test_draw_depends_on_seed_and_position_only():
    """Shuffled into another batch, cut into single tokens, beside other parameters: the same tokens."""
    generator = torch.Generator().manual_seed(3)
    logits, positions = torch.randn(6, 4, 100, generator=generator), torch.arange(24).view(6, 4)
    seeds, top_k = torch.arange(6) * 1000, torch.tensor([0, 5, 0, 9, 0, 1])
    want = sample(logits, positions, 0.8, top_k, 0.9, seeds)
    order = torch.tensor([4, 0, 5, 2, 2])
    assert torch.equal(sample(logits[order], positions[order], 0.8, top_k[order], 0.9, seeds[order]), want[order])
    for i in range(4):
        one = sample(logits[:, i : i + 1], positions[:, i : i + 1], 0.8, top_k, 0.9, seeds)
        assert torch.equal(one, want[:, i : i + 1])
    same = torch.zeros(2, 500, 100)
    places = torch.arange(500).expand(2, 500)
    assert torch.equal(*sample(same, places, seeds=7))
    first, second = sample(same, places, seeds=torch.tensor([7, 8]))
    assert (first == second).float().mean() < 0.05
    high = sample(same, places, seeds=torch.tensor([7, 7 + 2**40]))  # all 63 bits of the seed count
    assert (high[0] == high[1]).float().mean() < 0.05


@pytest.mark.parametrize("temperature, top_k, top_p, kept", [
    (1.0, 0, 1.0, 5), (2.0, 0, 1.0, 5), (1.0, 3, 1.0, 3), (1.0, 0, 0.8, 3), (1.0, 4, 0.5, 2)])
def test_frequencies(temperature, top_k, top_p, kept):
    """40,000 draws over seeds and positions follow the exact probabilities."""
    probs = START ** (1 / temperature)
    probs[kept:] = 0
    probs /= probs.sum()
    positions = torch.arange(200).expand(200, 200)
    logits = torch.tensor(np.log(START)).float().expand(200, 200, 5)
    got = sample(logits, positions, temperature, top_k, top_p, torch.arange(200))
    counts = np.bincount(got.flatten().numpy(), minlength=5)
    assert counts[kept:].sum() == 0
    assert chi_square(counts[:kept], probs[:kept]) < CRITICAL[kept - 1]


def direct(rows):
    """Two tokens of the chain for each of `rows` seeds, decoded one by one: [rows, 2]."""
    seeds = torch.arange(rows)
    first = sample(log_probs(START).expand(rows, 1, 5), torch.full((rows, 1), 10), seeds=seeds)
    second = sample(log_probs(CHAIN)[first], torch.full((rows, 1), 11), seeds=seeds)
    return torch.cat([first, second], 1)


def log_probs(probs):
    return torch.tensor(np.log(probs)).float()


def speculate(rows, guesses):
    """The same with a draft for the first token, -1 for none, verified by `count_accepted`."""
    seeds = torch.arange(rows)
    drafts = guesses.clamp(min=0)
    logits = torch.stack([log_probs(START).expand(rows, 5), log_probs(CHAIN)[drafts]], 1)
    samples = sample(logits, torch.tensor([[10, 11]]).expand(rows, 2), seeds=seeds)
    input_ids = torch.stack([torch.zeros_like(drafts), drafts], 1)
    accepted = count_accepted(samples, input_ids, 1 + (guesses >= 0).long())
    again = sample(log_probs(CHAIN)[samples[:, :1]], torch.full((rows, 1), 11), seeds=seeds)  # the next step
    second = torch.where(accepted == 2, samples[:, 1], again[:, 0])
    return torch.stack([samples[:, 0], second], 1), accepted


def joint_counts(pairs):
    return np.bincount((pairs[:, 0] * 5 + pairs[:, 1]).numpy(), minlength=25)


JOINT = (START[:, None] * CHAIN).flatten()
ROWS = 20_000


@pytest.mark.parametrize("guess", ["likeliest", "least", "varying", "none"])
def test_speculation_is_exact(guess):
    """Two successive tokens have the joint distribution of the model, and are those of direct decoding, whatever the
    drafter guesses; it is right as often as its guess is likely."""
    guesses = {"likeliest": torch.zeros(ROWS).long(), "least": torch.full((ROWS,), 4),
               "varying": torch.arange(ROWS) % 6 - 1, "none": torch.full((ROWS,), -1)}[guess]
    pairs, accepted = speculate(ROWS, guesses)
    assert chi_square(joint_counts(pairs), JOINT) < CRITICAL[24]
    assert chi_square(np.bincount(pairs[:, 0].numpy(), minlength=5), START) < CRITICAL[4]
    assert torch.equal(pairs, direct(ROWS))
    right = np.append(START, 0.0)[guesses.numpy()].mean()
    assert abs((accepted == 2).float().mean().item() - right) < 0.01


def test_chi_square_sees_a_biased_speculation():
    """Negative control: keep the draft with its probability, else draw anew from the whole distribution. The draft
    then comes too often (the second draw had to exclude it), and the test says so."""
    seeds, guess = torch.arange(ROWS), 1
    keep = draws(seeds, torch.full((ROWS, 1), 10))[:, 0] < START[guess]
    again = sample(log_probs(START).expand(ROWS, 1, 5), torch.full((ROWS, 1), 10), seeds=seeds + ROWS)
    first = torch.where(torch.from_numpy(keep), guess, again[:, 0])
    second = sample(log_probs(CHAIN)[first].unsqueeze(1), torch.full((ROWS, 1), 11), seeds=seeds)[:, 0]
    assert chi_square(np.bincount(first.numpy(), minlength=5), START) > 10 * CRITICAL[4]
    assert chi_square(joint_counts(torch.stack([first, second], 1)), JOINT) > 10 * CRITICAL[24]


def test_count_accepted():
    """Every row of a table by hand, and a loop over random rows; what lies beyond query_lens does not count."""
    samples = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    input_ids = torch.tensor([[1, 5, 6], [1, 5, 9], [1, 9, 6], [1, 5, 6], [1, 5, 6], [1, 5, 6]])
    got = count_accepted(samples, input_ids, torch.tensor([3, 3, 3, 2, 1, 0]))
    assert got.tolist() == [3, 2, 1, 2, 1, 0] and got.dtype == torch.int32
    lens = torch.tensor([1, 0, 1, 1, 0, 1])
    assert torch.equal(count_accepted(samples[:, :1], input_ids[:, :1], lens), lens.int())
    generator = torch.Generator().manual_seed(4)
    samples, input_ids = torch.randint(0, 2, (2, 300, 6), generator=generator)
    lens = torch.randint(0, 7, (300,), generator=generator)
    for row, count in enumerate(count_accepted(samples, input_ids, lens.int()).tolist()):
        want = min(lens[row].item(), 1)
        while 0 < want < lens[row] and input_ids[row, want] == samples[row, want - 1]:
            want += 1
        assert count == want


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_once(backend):
    """One full graph serves greedy and sampled rows and all values of the parameters."""

    def step(logits, positions, temperature, top_k, top_p, seeds, input_ids, query_lens):
        samples = sample_tokens(logits, positions, temperature, top_k, top_p, seeds)
        return samples, count_accepted(samples, input_ids, query_lens)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    generator = torch.Generator().manual_seed(5)
    lens = torch.tensor([3, 0, 1, 2])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for temperature, top_k, top_p, seed in ((0.0, 0, 1.0, 0), (0.7, 5, 0.9, 1), (1.5, 64, 0.1, 2**62)):
            args = (torch.randn(4, 3, 64, generator=generator), torch.randint(0, 9999, (4, 3), generator=generator),
                    torch.full((4,), temperature), torch.full((4,), top_k).int(), torch.full((4,), top_p),
                    torch.arange(4) + seed, torch.randint(0, 64, (4, 3), generator=generator), lens)
            for got, want in zip(compiled(*args), step(*args), strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("field, value, error", [
    ("max_tokens", 0, ValueError), ("max_tokens", True, TypeError), ("max_tokens", 2.0, TypeError),
    ("temperature", -0.1, ValueError), ("temperature", float("nan"), ValueError), ("temperature", "1", TypeError),
    ("temperature", float("inf"), ValueError), ("temperature", False, TypeError),
    ("top_k", -1, ValueError), ("top_k", 1.5, TypeError), ("top_k", 2**31, ValueError),
    ("top_p", 0.0, ValueError), ("top_p", 1.01, ValueError), ("top_p", float("nan"), ValueError),
    ("top_p", None, TypeError), ("seed", -1, ValueError), ("seed", 2**63, ValueError), ("seed", 0.0, TypeError),
    ("stop", [1], TypeError), ("stop", 3, TypeError), ("stop", ["a", ""], ValueError), ("stop", "", ValueError),
    ("ignore_eos", 1, TypeError),
])
def test_sampling_params_refuse(field, value, error):
    """A bad field is named."""
    with pytest.raises(error, match=f"^{field}"):
        SamplingParams(**{field: value})


def test_sampling_params():
    """Stop texts become a tuple, numbers plain numbers; the object is frozen."""
    assert SamplingParams(stop="end").stop == ("end",) and SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    params = SamplingParams(temperature=1, seed=2**63 - 1)
    assert isinstance(params.temperature, float) and params == SamplingParams(temperature=1.0, seed=2**63 - 1)
    with pytest.raises(FrozenInstanceError):
        params.seed = 1
