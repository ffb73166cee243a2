"""Drawing tokens from logits, and checking drafts against the draws. Plain torch, no host sync, any device."""

import torch
from torch import Tensor

from ..ops.rounding import uniform


def sample_tokens(
    logits: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor
) -> Tensor:
    """One token per logit row: greedy, or by inverse CDF with one uniform number per (seed, position).

    logits [B, T, V] float; positions [B, T] int64, the absolute position of the token to be *drawn*, which is the
    position of the input token that gave the logits plus 1, in [0, 2**32); temperature [B] float, 0 = argmax (lowest
    index on ties); top_k [B] int32, 0 = all; top_p [B] float in (0, 1]; seeds [B] int64, not negative. Returns [B, T]
    int64 in [0, V), also for rows of NaN (padding), whose value means nothing.

    logits / temperature are ranked (ties: lower index first); the top_k first ranks are kept, of these the smallest
    set of first ranks whose probability (after top_k) reaches top_p, at least one. A token of probability 0 is never
    drawn.

    The uniform number is Philox of (seed, position) and of nothing else: a request draws the same text whatever
    its batch, its row, its prompt chunks, its preemptions and its drafts are.
    """
    greedy = logits.argmax(-1)
    logits = logits.float()
    scale = torch.where(temperature > 0, temperature, 1.0).float().view(-1, 1, 1)
    # Relative to the maximum, so that a tiny temperature drives the others to -inf and not the maximum to +inf.
    scaled = (logits - logits.amax(-1, keepdim=True)) / scale
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = rank < torch.where(top_k > 0, top_k, logits.shape[-1]).view(-1, 1, 1)
    probs = torch.where(kept, ranked, -torch.inf).softmax(-1)

    # float64: the sum over a large vocabulary must not lose its tail. Before p = 1 rounding could drop the last ranks.
    limit = top_p.double().view(-1, 1, 1)
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    probs = torch.where((before < limit) | (limit >= 1) | (rank == 0), probs, 0.0)
    cdf = probs.cumsum(-1, dtype=torch.float64)

    draw = uniform(seeds.view(-1, 1), positions, torch.zeros_like(positions)).double()
    chosen = (cdf <= (draw * cdf[..., -1]).unsqueeze(-1)).sum(-1)
    # A parallel scan may be off by a rounding at its end: never go beyond the last rank that has any probability.
    last = (probs > 0).sum(-1) - 1
    drawn = order.gather(-1, chosen.minimum(last).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(temperature.view(-1, 1) > 0, drawn, greedy)


def count_accepted(samples: Tensor, input_ids: Tensor, query_lens: Tensor) -> Tensor:
    """How many input tokens of each decode row stand: the certain first one and the drafts that were guessed right.

    samples [B, T] from `sample_tokens`; input_ids [B, T], token 0 the last token of the request, the others its
    drafts; query_lens [B] in [0, T], how many inputs are real. Returns [B] int32 in [0, T], 0 where query_lens is 0.
    Token 0 is always accepted; draft i iff every draft before it is and it equals samples[:, i - 1]. The request
    then goes on with samples[:, :accepted].

    Why this is exact for any drafter: samples[:, i] is what the model draws after inputs 0..i, with a number that
    depends on seed and position only. It is emitted only if inputs 1..i equal the draws before it, and then it is
    the very token that decoding one by one would have drawn there. Drafts decide how many such tokens one step gives,
    never which. (All that is asked of a drafter is that it does not know the uniform numbers to come.)
    """
    columns = torch.arange(1, input_ids.shape[1], device=input_ids.device)
    wrong = (input_ids[:, 1:] != samples[:, :-1]) | (columns >= query_lens.view(-1, 1))
    drafts = (wrong.cumsum(1) == 0).sum(1)
    return torch.where(query_lens > 0, drafts + 1, 0).to(torch.int32)
