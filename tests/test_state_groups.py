"""A context of several cache groups: each group has slots, cursors and snapshots of its own."""

import pytest
import torch
from test_engine import RandomDrafter
from tiny import engine, greedy, tiny_model

from torch_replay import ReplayContext, SamplingParams
from torch_replay.models import memory
from torch_replay.states.replay_context import StateGroup

PATTERN = ("mamba2", "gdn", "mamba2", "full", "mamba2", "gdn", "mamba2")
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


def several_groups(family, layers, config, device):
    """As the engine's own context, with a group for each layer but the last two, which share one. Request i of group g
    lives in slot i + 1 + g of the live ones, in turn."""
    align, rows = config.num_snapshots > 0, config.max_num_seqs
    split = [[layer] for layer in layers[:-2]] + [layers[-2:]]
    groups = [StateGroup(f"{family} {g}", tuple(group), config.state_block_size, "align" if align else "none")
              for g, group in enumerate(split)]
    states = ReplayContext.create(
        groups, rows + 1, num_slots=1 + rows + config.num_snapshots,
        columns=config.max_model_len // config.state_block_size + 1 if align else 1, device=device)
    for g in range(len(groups)):
        states.request_tables[g, :-1, states.live_col] = (torch.arange(rows, device=device) + g) % rows + 1
    return states


@pytest.mark.parametrize("options", [{}, {"num_spec": 3, "window": 5, "ring_len": 11},
                                     {"prefix_cache": True, "state_block_size": 4, "block_size": 4, "num_spec": 2}],
                         ids=["replay", "drafts", "snapshots"])
def test_text(monkeypatch, options):
    """The text is that of one group, however the layers are shared out."""
    monkeypatch.setattr(memory, "replay_context", several_groups)
    model = tiny_model(3, pattern=PATTERN)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 61, (n,), generator=generator).tolist() for n in (5, 19, 1)]
    want = [greedy(model, prompt, 20) for prompt in prompts]
    runner = engine(model, **options)
    assert [len(states.groups) for states in runner.memory.states.values()] == [3, 1]
    runner.scheduler.drafter = RandomDrafter([p + w for p, w in zip(prompts, want)])
    turns = [prompts, [prompt + text[:9] for prompt, text in zip(prompts, want)]] if "prefix_cache" in options else [
        prompts]
    for turn in turns:
        texts = [output.token_ids for output in runner.generate(turn, PARAMS)]
        for prompt, begun, text, right in zip(prompts, turn, texts, want):
            shown = len(begun) - len(prompt)
            assert text[: 20 - shown] == right[shown:]
    if "prefix_cache" in options:
        assert runner.scheduler.prefix.counts.hits > 0
