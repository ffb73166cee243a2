"""What the tracer makes of the ops: pinned text for each family, and one text for layers that are alike."""

import textwrap
from collections import Counter

import pytest
import torch
from expecttest import TestCase
from fx_text import text, traced
from harness import named
from tiny import engine, tiny_model

from torch_replay.models import cached
from torch_replay.models.layers import rope_rows
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

PINNED = "2.13"  # the minor version of torch whose text is below; of others the calls are counted


def op_text(op: str) -> str:
    """AOTAutograd's graph of the op's first sample. Inputs have the names of the op's arguments."""
    graph, names = traced(lambda arguments: OPS[op].overload(**arguments), named(op, *samples(op)[0].make()),
                          functional=True)
    return text(graph, {node: source.split("'")[1] for node, source in names.items()})


class TestTypicalCalls(TestCase):
    """Run with EXPECTTEST_ACCEPT=1 to take over a change. No argument is baked in but sizes, scales and flags; every
    mutated tensor is a base of its own, and is copied back once."""

    def check(self, op: str, expected: str) -> None:
        found = op_text(op)
        if torch.__version__.startswith(PINNED):
            wrapped = [textwrap.fill(line, 110, subsequent_indent="    ") for line in found.splitlines()]
            self.assertExpectedInline("\n".join(wrapped), expected, skip=1)
        lines = found.splitlines()
        calls = Counter(line.split(" = ")[1].split("(")[0] for line in lines if not line.startswith("return"))
        mutated = [name for name in OPS[op].mutates if f" = aten.copy_({name}, " in found]
        functional = f"auto_functionalized_v2(torch_replay.{op}, " in found
        assert functional if mutated else calls[f"torch_replay.{op}"] == 1
        assert calls["aten.copy_"] == len(mutated) == len(set(OPS[op].mutates) - {"state_scale"})
        assert set(calls) <= {"auto_functionalized_v2", "getitem", "aten.copy_", f"torch_replay.{op}"}

    def test_mamba2(self):
        """A step reads cursors, appends to three rings, and may fold them into the state."""
        self.check("mamba2_replay", """\
v0 = auto_functionalized_v2(torch_replay.mamba2_replay, A=A, B=B, C=C, D=D, _B_ring_base_index=2,
    _all_bases=[state, x_ring, B_ring, dt_ring], _dt_ring_base_index=3, _state_base_index=0,
    _state_scale_base_index=None, _x_ring_base_index=1, dt=dt, dt_bias=dt_bias, dt_max=None, dt_min=0.0,
    dt_softplus=True, max_query_len=None, philox_rounds=0, query_lens=None, query_start_loc=None,
    ring_committed=ring_committed, ring_start=ring_start, seed=None, slots=slots, window=16, x=x, z=z)
v1 = getitem(v0, 0)
v2 = getitem(v0, 1)
v3 = getitem(v0, 2)
v4 = getitem(v0, 3)
v5 = getitem(v0, 4)
v6 = aten.copy_(state, v2)
v7 = aten.copy_(x_ring, v3)
v8 = aten.copy_(B_ring, v4)
v9 = aten.copy_(dt_ring, v5)
return [v1]""")

    def test_gdn(self):
        """Likewise, of the gated delta rule."""
        self.check("gdn_replay", """\
v0 = auto_functionalized_v2(torch_replay.gdn_replay, A_log=A_log, _all_bases=[state, u_ring, k_ring, g_ring],
    _g_ring_base_index=3, _k_ring_base_index=2, _state_base_index=0, _state_scale_base_index=None,
    _u_ring_base_index=1, a=a, b=b, dt_bias=dt_bias, k=k, l2norm=True, max_query_len=None, philox_rounds=0,
    q=q, query_lens=None, query_start_loc=None, ring_committed=ring_committed, ring_start=ring_start,
    scale=0.08838834764831845, seed=None, slots=slots, v=v, window=16)
v1 = getitem(v0, 0)
v2 = getitem(v0, 1)
v3 = getitem(v0, 2)
v4 = getitem(v0, 3)
v5 = getitem(v0, 4)
v6 = aten.copy_(state, v2)
v7 = aten.copy_(u_ring, v3)
v8 = aten.copy_(k_ring, v4)
v9 = aten.copy_(g_ring, v5)
return [v1]""")

    def test_kda(self):
        """Likewise, of Kimi delta attention."""
        self.check("kda_replay", """\
v0 = auto_functionalized_v2(torch_replay.kda_replay, A_log=A_log, _all_bases=[state, u_ring, k_ring, g_ring],
    _g_ring_base_index=3, _k_ring_base_index=2, _state_base_index=0, _state_scale_base_index=None,
    _u_ring_base_index=1, a=a, b=b, dt_bias=dt_bias, k=k, l2norm=True, lower_bound=None, max_query_len=None,
    philox_rounds=0, q=q, query_lens=None, query_start_loc=None, ring_committed=ring_committed,
    ring_start=ring_start, scale=0.08838834764831845, seed=None, slots=slots, v=v, window=16)
v1 = getitem(v0, 0)
v2 = getitem(v0, 1)
v3 = getitem(v0, 2)
v4 = getitem(v0, 3)
v5 = getitem(v0, 4)
v6 = aten.copy_(state, v2)
v7 = aten.copy_(u_ring, v3)
v8 = aten.copy_(k_ring, v4)
v9 = aten.copy_(g_ring, v5)
return [v1]""")

    def test_conv(self):
        """A convolution writes the ring that it continues from."""
        self.check("conv_replay", """\
v0 = auto_functionalized_v2(torch_replay.conv_replay, _all_bases=[conv_ring], _conv_ring_base_index=0,
    bias=bias, max_query_len=None, positions=positions, query_lens=None, query_start_loc=None, silu=True,
    slots=slots, weight=weight, x=x)
v1 = getitem(v0, 0)
v2 = getitem(v0, 1)
v3 = aten.copy_(conv_ring, v2)
return [v1]""")

    def test_ring(self):
        """A commit writes cursors and the snapshot plan, and returns nothing."""
        self.check("ring_commit", """\
v0 = auto_functionalized_v2(torch_replay.ring_commit, _all_bases=[ring_start, ring_committed, src_slots,
    dst_slots, plan_start, plan_count], _dst_slots_base_index=3, _plan_count_base_index=5,
    _plan_start_base_index=4, _ring_committed_base_index=1, _ring_start_base_index=0, _src_slots_base_index=2,
    block_size=6, block_tables=block_tables, idx_mapping=idx_mapping, is_prefilling=is_prefilling,
    live_cols=live_cols, materialize=True, num_accepted=num_accepted, num_computed=num_computed,
    post_step=False, query_lens=query_lens, query_start_loc=None, ring_len=20, window=16)
v1 = getitem(v0, 1)
v2 = getitem(v0, 2)
v3 = getitem(v0, 3)
v4 = getitem(v0, 4)
v5 = getitem(v0, 5)
v6 = getitem(v0, 6)
v7 = aten.copy_(ring_start, v1)
v8 = aten.copy_(ring_committed, v2)
v9 = aten.copy_(src_slots, v3)
v10 = aten.copy_(dst_slots, v4)
v11 = aten.copy_(plan_start, v5)
v12 = aten.copy_(plan_count, v6)
return []""")

    def test_tokens(self):
        """Keys and values go to the cache."""
        self.check("write_kv", """\
v0 = auto_functionalized_v2(torch_replay.write_kv, _all_bases=[cache], _cache_base_index=0, k=k,
    slot_mapping=slot_mapping, v=v)
v1 = getitem(v0, 1)
v2 = aten.copy_(cache, v1)
return []""")

    def test_attention(self):
        """A window's slots and their number are written for all layers."""
        self.check("swa_indices", """\
v0 = auto_functionalized_v2(torch_replay.swa_indices, _all_bases=[indices, lens], _indices_base_index=0,
    _lens_base_index=1, block_size=16, block_table=block_table, query_lens=None,
    query_start_loc=query_start_loc, replay_start=None, seq_lens=seq_lens, slot_mapping=slot_mapping,
    window=16)
v1 = getitem(v0, 1)
v2 = getitem(v0, 2)
v3 = aten.copy_(indices, v1)
v4 = aten.copy_(lens, v2)
return []""")

    def test_attention_without_mutation(self):
        """Attention itself writes nothing: the op stands as it is."""
        self.check("paged_attention", """\
v0 = torch_replay.paged_attention(q, cache, block_table, seq_lens, query_start_loc, scale=0.125)
return [v0]""")

    def test_engram(self):
        """The lookback is written for the hash that follows."""
        self.check("engram_lookback", """\
v0 = auto_functionalized_v2(torch_replay.engram_lookback, _all_bases=[lookback], _lookback_base_index=0,
    idx_mapping=idx_mapping, num_reqs=num_reqs, positions=positions, query_lens=None,
    query_start_loc=query_start_loc, token_ids=token_ids)
v1 = getitem(v0, 1)
v2 = aten.copy_(lookback, v1)
return []""")


@torch.no_grad()
def layer_texts(model) -> list[str]:
    """Dynamo's text of the decode route of each layer."""
    step = engine(model, num_spec=2).decode
    batch, memory = step.state.prepare_inputs(step.inputs), step.state.memory
    step.state.prepare_attn(batch, step.inputs)
    batch.decay_rates = [layer.mixer.decay_rates() for layer in model.layers if layer.kind == "mamba2"]
    x, rope = model.embedding(batch.input_ids), rope_rows(model.rope, batch.positions.view(batch.input_ids.shape))

    def run(layer, place, x, rope):
        return cached._run_layers([(layer, place)], memory, x, rope, batch, prefill=False)

    layers = list(zip(model.layers, memory.place, strict=True))
    return [text(traced(run, *layer, x, rope)[0], {}) for layer in layers]


KINDS = {"mamba2": "mamba2_replay", "gdn": "gdn_replay", "swa": "swa_attention", "full": "paged_attention", "mlp": "",
         "engram": ""}


@pytest.mark.parametrize("kind, op", KINDS.items(), ids=KINDS)
def test_layers_are_alike(kind, op):
    """Two layers of a kind have one text, but for which parameters and which slice of a pool they take."""
    first, second = layer_texts(tiny_model(pattern=(kind, kind)))
    assert first == second and f"torch_replay.{op}" * bool(op) in first and "linear" in first


def test_layers_that_differ(monkeypatch):
    """Negative control: a constant that differs from layer to layer is seen."""
    attention = cached._attention

    def numbered(mixer, *args):
        return attention(mixer, *args) * mixer.number

    model = tiny_model(pattern=("swa", "swa"))
    for number, layer in enumerate(model.layers):
        layer.mixer.number = 1.5 + number
    monkeypatch.setattr(cached, "_attention", numbered)
    first, second = layer_texts(model)
    assert first != second and first.replace("1.5", "2.5") == second
