"""The schemas are the public contract, and no compile cache notices when one changes: their text is pinned here."""

import textwrap

from expecttest import TestCase

from torch_replay.ops.registry import OPS


class TestSchemas(TestCase):
    def test_schemas(self):
        """Run with EXPECTTEST_ACCEPT=1 to take over a change, then clear torch's compile caches."""
        schemas = [schema for _, op in sorted(OPS.items()) for schema in (op.schema, op.layers_schema) if schema]
        text = "\n".join(textwrap.fill(schema, 110, subsequent_indent="    ", break_long_words=False)
                         for schema in schemas)
        self.assertExpectedInline(text, """\
compact_active(Tensor plan_count, Tensor num_reqs) -> (Tensor, Tensor)
compute_slot_mappings(Tensor(a0!) slot_mappings, Tensor block_tables, Tensor query_start_loc, Tensor
    positions, Tensor block_sizes, Tensor? query_lens=None) -> ()
conv_prefill(Tensor(a0!) conv_ring, Tensor x, Tensor weight, Tensor? bias, Tensor positions, Tensor slots,
    Tensor? query_lens=None, Tensor? query_start_loc=None, *, SymInt? max_query_len=None, bool silu) -> Tensor
conv_replay(Tensor(a0!) conv_ring, Tensor x, Tensor weight, Tensor? bias, Tensor positions, Tensor slots,
    Tensor? query_lens=None, Tensor? query_start_loc=None, *, bool silu, SymInt? max_query_len=None) -> Tensor
copy_slots(Tensor(a0!) pool, Tensor src_slots, Tensor dst_slots, Tensor layer_group, Tensor active_rows) -> ()
copy_slots.layers(Tensor(a0!)[] pool, Tensor src_slots, Tensor dst_slots, Tensor layer_group, Tensor
    active_rows) -> ()
delta_prefill(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, Tensor?
    edges=None) -> (Tensor, Tensor, Tensor)
engram_lookback(Tensor(a0!) lookback, Tensor token_ids, Tensor positions, Tensor query_start_loc, Tensor
    idx_mapping, Tensor num_reqs, Tensor? query_lens=None) -> ()
engram_lookup(Tensor table, Tensor? scales, Tensor rows) -> Tensor
gather_block_tables(Tensor(a0!) block_tables, Tensor request_tables, Tensor idx_mapping, Tensor num_reqs) ->
    ()
gather_replay_rows(Tensor(a0!) rows, Tensor(a1!) kept_query_start_loc, Tensor(a2!) kept_positions, Tensor(a3!)
    kept_slot_mappings, Tensor(a4!) kept_kv_start, Tensor query_start_loc, Tensor dropped_before, Tensor
    seq_lens, Tensor replay_start, Tensor positions, Tensor slot_mappings, Tensor? query_lens=None, *, SymInt
    window) -> ()
gdn_materialize(Tensor(a0!) state, Tensor u_ring, Tensor k_ring, Tensor g_ring, Tensor src_slots, Tensor
    dst_slots, Tensor ring_start, Tensor count, Tensor layer_group, Tensor active_rows, Tensor(a10!)?
    state_scale=None, Tensor? seed=None, *, SymInt philox_rounds=0) -> ()
gdn_materialize.layers(Tensor(a0!)[] state, Tensor[] u_ring, Tensor[] k_ring, Tensor[] g_ring, Tensor
    src_slots, Tensor dst_slots, Tensor ring_start, Tensor count, Tensor layer_group, Tensor active_rows,
    Tensor(a10!)[]? state_scale=None, Tensor? seed=None, *, SymInt philox_rounds=0) -> ()
gdn_prefill(Tensor(a0!) state, Tensor(a1!) ring_start, Tensor(a2!) ring_committed, Tensor q, Tensor k, Tensor
    v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor slots, Tensor? query_lens=None, Tensor?
    has_state=None, Tensor? query_start_loc=None, Tensor(a14!)? state_scale=None, Tensor? seed=None, *,
    SymInt? max_query_len=None, float scale, bool l2norm, SymInt philox_rounds=0) -> Tensor
gdn_replay(Tensor(a0!) state, Tensor(a1!) u_ring, Tensor(a2!) k_ring, Tensor(a3!) g_ring, Tensor ring_start,
    Tensor ring_committed, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,
    Tensor slots, Tensor? query_lens=None, Tensor(a15!)? state_scale=None, Tensor? seed=None, Tensor?
    query_start_loc=None, *, SymInt window, SymInt? max_query_len=None, float scale, bool l2norm, SymInt
    philox_rounds=0) -> Tensor
gdn_update(Tensor(a0!) state, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,
    Tensor slots, Tensor? query_lens=None, Tensor? token_slots=None, Tensor? query_start_loc=None, *, SymInt?
    max_query_len=None, float scale, bool l2norm) -> Tensor
kda_materialize(Tensor(a0!) state, Tensor u_ring, Tensor k_ring, Tensor g_ring, Tensor src_slots, Tensor
    dst_slots, Tensor ring_start, Tensor count, Tensor layer_group, Tensor active_rows, Tensor(a10!)?
    state_scale=None, Tensor? seed=None, *, SymInt philox_rounds=0) -> ()
kda_materialize.layers(Tensor(a0!)[] state, Tensor[] u_ring, Tensor[] k_ring, Tensor[] g_ring, Tensor
    src_slots, Tensor dst_slots, Tensor ring_start, Tensor count, Tensor layer_group, Tensor active_rows,
    Tensor(a10!)[]? state_scale=None, Tensor? seed=None, *, SymInt philox_rounds=0) -> ()
kda_prefill(Tensor(a0!) state, Tensor(a1!) ring_start, Tensor(a2!) ring_committed, Tensor q, Tensor k, Tensor
    v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor slots, Tensor? query_lens=None, Tensor?
    has_state=None, Tensor? query_start_loc=None, Tensor(a14!)? state_scale=None, Tensor? seed=None, *,
    SymInt? max_query_len=None, float scale, bool l2norm, float? lower_bound=None, SymInt philox_rounds=0) ->
    Tensor
kda_replay(Tensor(a0!) state, Tensor(a1!) u_ring, Tensor(a2!) k_ring, Tensor(a3!) g_ring, Tensor ring_start,
    Tensor ring_committed, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,
    Tensor slots, Tensor? query_lens=None, Tensor(a15!)? state_scale=None, Tensor? seed=None, Tensor?
    query_start_loc=None, *, SymInt window, SymInt? max_query_len=None, float scale, bool l2norm, float?
    lower_bound=None, SymInt philox_rounds=0) -> Tensor
kda_update(Tensor(a0!) state, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias,
    Tensor slots, Tensor? query_lens=None, Tensor? token_slots=None, Tensor? query_start_loc=None, *, SymInt?
    max_query_len=None, float scale, bool l2norm, float? lower_bound=None) -> Tensor
mamba2_materialize(Tensor(a0!) state, Tensor x_ring, Tensor B_ring, Tensor dt_ring, Tensor A, Tensor
    src_slots, Tensor dst_slots, Tensor ring_start, Tensor count, Tensor layer_group, Tensor active_rows,
    Tensor(a11!)? state_scale=None, Tensor? seed=None, *, SymInt philox_rounds=0) -> ()
mamba2_materialize.layers(Tensor(a0!)[] state, Tensor[] x_ring, Tensor[] B_ring, Tensor[] dt_ring, Tensor A,
    Tensor src_slots, Tensor dst_slots, Tensor ring_start, Tensor count, Tensor layer_group, Tensor
    active_rows, Tensor(a11!)[]? state_scale=None, Tensor? seed=None, *, SymInt philox_rounds=0) -> ()
mamba2_prefill(Tensor(a0!) state, Tensor(a1!) ring_start, Tensor(a2!) ring_committed, Tensor x, Tensor dt,
    Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor slots, Tensor?
    query_lens=None, Tensor? has_state=None, Tensor? query_start_loc=None, Tensor(a15!)? state_scale=None,
    Tensor? seed=None, *, SymInt? max_query_len=None, bool dt_softplus=True, float dt_min=0.0, float?
    dt_max=None, SymInt philox_rounds=0) -> Tensor
mamba2_replay(Tensor(a0!) state, Tensor(a1!) x_ring, Tensor(a2!) B_ring, Tensor(a3!) dt_ring, Tensor
    ring_start, Tensor ring_committed, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor?
    z, Tensor? dt_bias, Tensor slots, Tensor? query_lens=None, Tensor(a16!)? state_scale=None, Tensor?
    seed=None, Tensor? query_start_loc=None, *, SymInt window, SymInt? max_query_len=None, bool
    dt_softplus=True, float dt_min=0.0, float? dt_max=None, SymInt philox_rounds=0) -> Tensor
mamba2_update(Tensor(a0!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z,
    Tensor? dt_bias, Tensor slots, Tensor? query_lens=None, Tensor? token_slots=None, Tensor?
    query_start_loc=None, *, SymInt? max_query_len=None, bool dt_softplus=True, float dt_min=0.0, float?
    dt_max=None) -> Tensor
ngram_hash(Tensor ids, Tensor positions, Tensor query_start_loc, Tensor lookback, Tensor token_map, Tensor
    multipliers, Tensor primes, Tensor offsets, Tensor pad_id, Tensor? query_lens=None) -> Tensor
pad_replayed_slots(Tensor(a0!) slot_mappings, Tensor cacheable_groups, Tensor query_start_loc, Tensor
    positions, Tensor replay_start, Tensor? query_lens=None, *, SymInt window) -> ()
paged_attention(Tensor q, Tensor cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor?
    query_lens=None, *, float scale) -> Tensor
prepare_positions(Tensor(a0!) positions, Tensor(a1!) seq_lens, Tensor idx_mapping, Tensor query_start_loc,
    Tensor num_computed, Tensor? query_lens=None) -> ()
ring_advance(Tensor(a0!) ring_start, Tensor(a1!) ring_committed, Tensor slots, Tensor query_lens, Tensor
    num_accepted, Tensor? is_prefilling=None, Tensor? num_reqs=None, *, SymInt window, SymInt ring_len) -> ()
ring_commit(Tensor(a0!) ring_start, Tensor(a1!) ring_committed, Tensor(a2!) src_slots, Tensor(a3!) dst_slots,
    Tensor(a4!) plan_start, Tensor(a5!) plan_count, Tensor block_tables, Tensor? query_start_loc, Tensor?
    query_lens, Tensor num_computed, Tensor num_accepted, Tensor is_prefilling, Tensor? live_cols, Tensor?
    idx_mapping, *, SymInt block_size, SymInt window, SymInt ring_len, bool post_step, bool materialize) -> ()
ring_reset(Tensor(a0!) ring_start, Tensor(a1!) ring_committed, Tensor block_tables, Tensor src_cols, Tensor
    dst_cols, Tensor? idx_mapping=None) -> ()
ssd_prefill(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? initial_state=None, Tensor? edges=None)
    -> (Tensor, Tensor, Tensor)
swa_attention(Tensor q, Tensor cache, Tensor indices, Tensor lens, *, float scale) -> Tensor
swa_indices(Tensor(a0!) indices, Tensor(a1!) lens, Tensor seq_lens, Tensor query_start_loc, Tensor
    block_table, Tensor slot_mapping, Tensor? replay_start=None, Tensor? query_lens=None, *, SymInt window,
    SymInt block_size) -> ()
write_kv(Tensor(a0!) cache, Tensor k, Tensor v, Tensor slot_mapping) -> ()
zero_slots(Tensor(a0!) pool, Tensor slots, Tensor layer_group) -> ()
zero_slots.layers(Tensor(a0!)[] pool, Tensor slots, Tensor layer_group) -> ()""")
