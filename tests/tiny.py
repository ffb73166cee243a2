"""Tiny random hybrid models whose logits feel the recurrent state, and engines over them."""

import torch

from torch_replay import Engine, EngineConfig, HybridConfig, HybridModel

PATTERN = ("mamba2", "mlp", "gdn", "swa", "mamba2", "full", "gdn", "mlp", "swa", "mamba2")


def tiny_config(pattern=PATTERN, vocab=61, window=9, context=256) -> HybridConfig:
    return HybridConfig(
        vocab_size=vocab, hidden_size=32, pattern=pattern, mamba_heads=4, mamba_head_dim=8, mamba_state_dim=16,
        mamba_groups=2, gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=8, gdn_value_dim=16, num_heads=4,
        num_kv_heads=2, head_dim=8, sliding_window=window, mlp_hidden=48, max_position=context, eos_token_id=0,
        engram_order=4, engram_heads=2, engram_dim=8, engram_table_size=211, kda_heads=2,
        kda_head_dim=8)


@torch.no_grad()
def tiny_model(seed: int = 0, **sizes) -> HybridModel:
    """Random weights at the scale of a trained model: a default initialisation barely uses its state."""
    torch.manual_seed(seed)
    model = HybridModel(tiny_config(**sizes)).eval().requires_grad_(False)
    model.embedding.weight.normal_()
    if model.engram is not None:
        model.engram.weight.normal_()
    for layer in model.layers:
        for name, value in layer.mixer.named_parameters():
            if name.endswith("proj.weight"):
                # a large output lets the mixers decide the next token, not the last token's own embedding
                wide = name in ("out_proj.weight", "kv_proj.weight", "o_proj.weight")
                value.normal_(std=(4 if wide else 1) * value.shape[1] ** -0.5)
            elif name == "conv_weight" or "conv1d" in name:
                value.normal_(std=0.5)
            elif name == "A_log":
                value.copy_(torch.empty_like(value).uniform_(0.05, 1.0).log())
            elif name == "dt_bias":
                value.uniform_(-3.0, -0.5)
    return model


def engine(model, max_num_seqs: int = 4, **options) -> Engine:
    """An engine of `max_num_seqs` requests in which a batch row never equals its request's index.

    Index 0 is withheld and rows go by index, so that the index of row r is at least r + 1.
    """
    runner = Engine(model, None, EngineConfig(**{"max_num_seqs": max_num_seqs + 1, "compiled": False, **options}))
    indices = runner.scheduler.indices
    assert indices.allocate(1) == [1]  # index i is this pool's block i + 1
    restore = indices.restore
    indices.restore = lambda held: restore([1, *held])
    schedule = runner.scheduler.schedule

    def by_index():
        plan = schedule()
        order = sorted(range(len(plan.decodes)), key=lambda row: plan.decodes[row].index)
        plan.decodes, plan.drafts = [plan.decodes[row] for row in order], [plan.drafts[row] for row in order]
        plan.prefills.sort(key=lambda chunk: chunk.request.index)
        for rows in (plan.decodes, [chunk.request for chunk in plan.prefills]):
            assert all(request.index > row for row, request in enumerate(rows))
        return plan

    runner.scheduler.schedule = by_index
    return runner


@torch.no_grad()
def greedy(model, prompt: list[int], count: int) -> list[int]:
    """The training forward over the whole sequence, once a token: no cache, no op of this project."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt):]
