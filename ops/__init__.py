"""Custom ops of torch_replay, registered under `torch.ops.torch_replay` when this package is imported.

The functions below are Python wrappers of the same names: they check argument types, and validation behind them names
the argument at fault. Nothing here imports Triton or FlashInfer.
"""

from .attention.op import paged_attention, swa_attention, swa_indices
from .conv.op import conv_replay, copy_slots, zero_slots
from .engram.op import engram_lookback, engram_lookup, ngram_hash
from .gdn.op import gdn_materialize, gdn_replay, gdn_update
from .kda.op import kda_materialize, kda_replay, kda_update
from .mamba2.op import mamba2_materialize, mamba2_replay, mamba2_update
from .prefill.op import conv_prefill, gdn_prefill, kda_prefill, mamba2_prefill
from .registry import OPS
from .ring.op import compact_active, gather_block_tables, ring_advance, ring_commit, ring_reset
from .ring.transfer import ring_export, ring_import
from .scan.op import delta_prefill, ssd_prefill
from .tokens.op import compute_slot_mappings, gather_replay_rows, pad_replayed_slots, prepare_positions, write_kv

__all__ = [
    "OPS",
    "compact_active",
    "compute_slot_mappings",
    "conv_prefill",
    "conv_replay",
    "copy_slots",
    "delta_prefill",
    "engram_lookback",
    "engram_lookup",
    "gather_block_tables",
    "gather_replay_rows",
    "gdn_materialize",
    "gdn_prefill",
    "gdn_replay",
    "gdn_update",
    "kda_materialize",
    "kda_prefill",
    "kda_replay",
    "kda_update",
    "mamba2_materialize",
    "mamba2_prefill",
    "mamba2_replay",
    "mamba2_update",
    "ngram_hash",
    "pad_replayed_slots",
    "paged_attention",
    "prepare_positions",
    "ring_advance",
    "ring_commit",
    "ring_export",
    "ring_import",
    "ring_reset",
    "ssd_prefill",
    "swa_attention",
    "swa_indices",
    "write_kv",
    "zero_slots",
]
