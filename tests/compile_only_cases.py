"""What tests/compile_only.py compiles, by family: (op, builder of its arguments, options, activations' dtype, usual).

Sizes of the public models that benchmarks/families.py measures, in decode steps of 1 token and of 1 + 3 drafts; and
sizes that fill no tile, which are not `usual`. One row, layer and group: a grid does not show in a compiled kernel.
Every kernel takes seconds, so a list has each dtype and each number of tokens once, not all their pairs.
"""

import torch

from torch_replay.ops.attention import samples as attention
from torch_replay.ops.conv import samples as conv
from torch_replay.ops.engram import samples as engram
from torch_replay.ops.gdn import samples as gdn
from torch_replay.ops.kda import samples as kda
from torch_replay.ops.mamba2 import samples as mamba2
from torch_replay.ops.ring import samples as ring
from torch_replay.ops.samples import layer_by_layer
from torch_replay.ops.tokens import samples as tokens

F32, BF16 = torch.float32, torch.bfloat16
STEPS = [dict(state_dtype=F32, tokens=1), dict(state_dtype=BF16, tokens=4)]
LAYERS = 24  # tensors in a list of layers
ODD_RING = dict(window=7, ring_len=13)
NEMOTRON = dict(heads=128, dim=64, state_dim=128)
QWEN = dict(key_heads=16, heads=32, key_dim=128, value_dim=128)
NEMOTRON_HEADS, QWEN_HEADS = dict(heads=32, kv_heads=8, dim=128), dict(heads=16, kv_heads=2, dim=256)


def cases(op: str, builder, *options: dict, dtype=BF16, usual=True) -> list[tuple]:
    return [(op, builder, each, dtype, usual) for each in options]


def mamba2_cases() -> list[tuple]:
    shape = dict(rows=1, groups=8, ragged=True, strided=True, **NEMOTRON)
    layer = dict(layers=1, groups=1, rows=1, state_groups=8, **NEMOTRON)
    odd = dict(rows=1, tokens=3, heads=6, dim=33, state_dim=17, groups=3, **ODD_RING)
    return [
        *cases("mamba2_replay", mamba2.replay, *(shape | step for step in STEPS)),
        *cases("mamba2_replay", mamba2.replay, dict(shape, ragged=False, packed=True, **STEPS[1])),
        *cases("mamba2_replay", mamba2.replay, odd, usual=False),
        *cases("mamba2_update", mamba2.update, *(shape | step for step in STEPS)),
        *cases("mamba2_materialize", mamba2.materialize, layer),
        *cases("mamba2_materialize", layer_by_layer(mamba2.materialize, 0, 1, 2, 3),
               dict(layer, heads=8, layers=LAYERS)),
    ]


def delta_cases(family: str, builders) -> list[tuple]:
    shape = dict(rows=1, ragged=True, strided=True, **QWEN)
    layer = dict(layers=1, groups=1, rows=1, **QWEN)
    return [
        *cases(f"{family}_replay", builders.replay, *(shape | step for step in STEPS)),
        *cases(f"{family}_replay", builders.replay, dict(shape, ragged=False, packed=True, **STEPS[1])),
        *cases(f"{family}_update", builders.update, *(shape | step for step in STEPS)),
        *cases(f"{family}_materialize", builders.materialize, layer),
        *cases(f"{family}_materialize", layer_by_layer(builders.materialize, 0, 1, 2, 3),
               dict(layer, key_heads=2, heads=4, layers=LAYERS)),
    ]


def attention_cases() -> list[tuple]:
    """Decode, drafts and a chunk of a prompt in bf16, which fills the largest tile; the largest of float32, which has
    tiles of its own. Keys are many enough to be split over programs, so that parts are merged."""
    def paged(heads, *counts):
        return [dict(rows=1, tokens=count, uniform=True, ragged=False, contexts=[600], longest=600, **heads)
                for count in counts]

    odd = dict(rows=2, tokens=3, block_size=7, heads=3, kv_heads=3, dim=33)
    return [
        *cases("swa_indices", attention.indices, dict(rows=2, tokens=4, window=512, block_size=16, uniform=True)),
        *cases("swa_attention", attention.window_attention, *(dict(window=64, **heads) for heads in
                                                              (NEMOTRON_HEADS, QWEN_HEADS))),
        *cases("paged_attention", attention.paged, *paged(NEMOTRON_HEADS, 1, 4, 70), *paged(QWEN_HEADS, 1, 4)),
        *cases("paged_attention", attention.paged, *paged(QWEN_HEADS, 70), dtype=F32),
        *cases("paged_attention", attention.paged, odd, usual=False),
    ]


def conv_cases() -> list[tuple]:
    row = dict(rows=1, dim=10240, ragged=True)
    return [
        *cases("conv_replay", conv.conv, row, dict(row, tokens=4)),
        *cases("conv_replay", conv.conv, dict(rows=1, tokens=3, dim=33, width=5, ring_len=13), usual=False),
        *cases("copy_slots", conv.slots, dict(rows=8, shape=(10240, 4))),
        *cases("copy_slots", conv.slots, dict(rows=65, shape=(3, 5, 7), strided=True), usual=False),
        *cases("zero_slots", conv.zeroed, dict(rows=8, shape=(10240, 4))),
        *cases("copy_slots", layer_by_layer(conv.slots, 0), dict(rows=8, shape=(512, 4), layers=LAYERS)),
        *cases("zero_slots", layer_by_layer(conv.zeroed, 0), dict(rows=8, shape=(512, 4), layers=LAYERS)),
        *cases("zero_slots", conv.zeroed, dict(rows=65, shape=(3, 5, 7), strided=True), usual=False),
    ]


def ring_cases() -> list[tuple]:
    return [
        *cases("gather_block_tables", ring.gather, {}),
        *cases("ring_reset", ring.reset, {}),
        *cases("ring_advance", ring.advance, {}, dict(num_reqs=3, prefilling=0.0)),
        *cases("ring_commit", ring.commit, dict(materialize=False, live=False), dict(uniform=False, post_step=True)),
        *cases("compact_active", ring.compact, {}),
    ]


def token_cases() -> list[tuple]:
    odd = dict(kv_heads=3, dim=33, block_size=5, strided=True)
    return [
        *cases("prepare_positions", tokens.positions_of, dict(uniform=True)),
        *cases("compute_slot_mappings", tokens.mappings, dict(uniform=True)),
        *cases("pad_replayed_slots", tokens.padding, dict(rows=2, tokens=4), dict(rows=2, tokens=4, uniform=True)),
        *cases("gather_replay_rows", tokens.gathering, dict(rows=2, tokens=4), dict(rows=2, tokens=4, uniform=True)),
        *cases("write_kv", tokens.write, dict(kv_heads=8, dim=128), dict(kv_heads=2, dim=256)),
        *cases("write_kv", tokens.write, odd, usual=False),
    ]


def engram_cases() -> list[tuple]:
    """The published geometry: 8 heads of orders 2 to 4, float8 rows of 256 values, and 16-bit rows of a small table."""
    published = dict(orders=4, heads=8, vocab=300)
    coarse = [dict(dim=256, coarse=True, packed=packed) for packed in (False, True)]
    return [
        *cases("engram_lookback", engram.histories, {}, dict(uniform=True)),
        *cases("ngram_hash", engram.hashes, published, dict(published, uniform=True)),
        *cases("engram_lookup", engram.lookups, *coarse, dict(dim=16)),
        *cases("ngram_hash", engram.hashes, dict(orders=5, heads=3), usual=False),
        *cases("engram_lookup", engram.lookups, dict(dim=33), dict(dim=1, strided=True), usual=False),
    ]


ODD_DELTA = dict(rows=1, tokens=3, key_heads=3, heads=6, key_dim=33, value_dim=17, **ODD_RING)
CASES = {
    "mamba2": mamba2_cases(),
    "gdn": delta_cases("gdn", gdn) + cases("gdn_replay", gdn.replay, ODD_DELTA, usual=False),
    "kda": delta_cases("kda", kda),
    "attention": attention_cases(), "conv": conv_cases(), "ring": ring_cases(), "tokens": token_cases(),
    "engram": engram_cases(),
}
