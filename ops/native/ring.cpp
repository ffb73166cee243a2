// Cursors of the rings, and where a step's tokens lie. See ops/ring/op.py, ops/tokens/op.py and ops/attention/op.py.
#include <algorithm>

#include "tensor.h"

namespace {

int64_t lookup(const Tensor& table, int64_t group, int64_t row, int64_t column) {
    if (column < 0 || column >= table.size[2]) return 0;
    return std::max<int64_t>(table.integer(group, row, column), 0);
}

// Slot of a position of a row in a table [B, C]; -1 outside the table and in a null block.
int64_t slot_at(const Tensor& table, int64_t row, int64_t position, int64_t block_size) {
    if (position < 0 || position / block_size >= table.size[1]) return -1;
    const int64_t block = table.integer(row, position / block_size);
    return block > 0 ? block * block_size + position % block_size : -1;
}

// The rows of a step over its tokens: calls each(row, token, index in the row) for every real token.
template <class Each>
void real_tokens(const Tensor& begin, const Tensor& lens, int64_t tokens, Each each) {
    for (int64_t row = 0; row + 1 < begin.size[0]; ++row) {
        const int64_t first = begin.integer(row), end = begin.integer(row + 1);
        const int64_t q = lens ? std::min(lens.integer(row), end - first) : end - first;
        for (int64_t i = 0; i < q && first + i < tokens; ++i) each(row, first + i, i);
    }
}

void put(const Tensor& t, int64_t value, int64_t i, int64_t j = 0) {
    if (t.dtype == I64) *reinterpret_cast<int64_t*>(t.at(i, j)) = value;
    else *reinterpret_cast<int32_t*>(t.at(i, j)) = int32_t(value);
}

}  // namespace

// start, committed, src_slots, dst_slots, plan_start, plan_count, block_tables, query_start_loc, query_lens,
// num_computed, num_accepted, is_prefilling, live_cols, idx_mapping; block_size, window, ring_len, post_step, materialize
KERNEL(ring_commit) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor start = args.tensor(0), committed = args.tensor(1), src = args.tensor(2), dst = args.tensor(3);
    const Tensor plan_start = args.tensor(4), plan_count = args.tensor(5), table = args.tensor(6);
    const Tensor begin = args.tensor(7), lens = args.tensor(8), computed = args.tensor(9), kept = args.tensor(10);
    const Tensor prefill = args.tensor(11), live_cols = args.tensor(12), mapping = args.tensor(13);
    const int64_t block_size = integers[0], window = integers[1], ring_len = integers[2];
    const bool post_step = integers[3], materialize = integers[4];
    const int64_t groups = table.size[0], rows = table.size[1], columns = table.size[2];
    const int64_t slots = start.size[1];
    struct Cursor { int64_t row, group, slot, start, committed; };
    struct Plan { int64_t group, row, src, dst, start, count; };
    std::vector<Cursor> moved, cleared;  // every read and every check comes before every write
    std::vector<Plan> plans;
    std::vector<int64_t> owner(groups * slots, -1), publisher(groups * slots, -1);  // rows, by group and slot
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t req = mapping ? mapping.integer(row) : row;
        const int64_t q = lens ? lens.integer(row) : begin.integer(row + 1) - begin.integer(row);
        if (req >= computed.size[0] || (req >= 0 && q < 0)) return 1;
        if (req < 0 || q <= 0) continue;
        const bool prefilling = prefill.integer(row);
        const int64_t accepted = std::clamp<int64_t>(kept.integer(req), 0, q);
        const int64_t after = computed.integer(req) + (post_step ? 0 : prefilling ? q : accepted);
        if (after < (prefilling ? q : accepted) || (!prefilling && window > 0 && q > window)) return 1;
        const int64_t edge = after / block_size * block_size, running = prefilling ? after : after - accepted + 1;
        const int64_t live_col = live_cols ? live_cols.integer(req) : 0, dst_col = edge / block_size - 1;
        for (int64_t group = 0; group < groups; ++group) {
            for (int64_t c = 0; c < columns; ++c)
                if (table.integer(group, row, c) < 0 || table.integer(group, row, c) >= slots) return 1;
            const int64_t live = lookup(table, group, row, live_col), target = lookup(table, group, row, dst_col);
            const int64_t old_start = start.integer(group, live), old = committed.integer(group, live);
            const bool flushed = old + q > window;
            const int64_t new_start = flushed ? (old_start + old) % ring_len : old_start;
            if (live > 0 && owner[group * slots + live] >= 0) return 1;
            if (live > 0) owner[group * slots + live] = row;
            if (!prefilling && live > 0) {
                if (old_start < 0 || old_start >= ring_len || old < 0 || old > (window ? window : ring_len) ||
                    old + q > ring_len) return 1;
                moved.push_back({row, group, live, new_start, (flushed ? 0 : old) + accepted});
            }
            if (prefilling) {
                if (live > 0) cleared.push_back({row, group, live, 0, 0});
                for (int64_t c = (after - q) / block_size; materialize && c <= (after - 1) / block_size && c < columns; ++c)
                    if (const int64_t slot = lookup(table, group, row, c)) cleared.push_back({row, group, slot, 0, 0});
            }
            // in place is right only at the edge itself: past it, the rows beyond the edge would be lost
            const bool in_place = prefilling ? live_col == dst_col : live == target && edge < after;
            if (!materialize || edge <= 0 || edge < running || live <= 0 || target <= 0 || in_place) continue;
            if (publisher[group * slots + target] >= 0) return 1;
            publisher[group * slots + target] = row;
            cleared.push_back({row, group, target, 0, 0});
            plans.push_back({group, row, live, target, prefilling ? 0 : new_start,
                             prefilling ? 0 : edge - running + 1 + (flushed ? 0 : old)});
        }
    }
    // nobody may write a slot that another row lives in
    for (const Cursor& c : cleared)
        if (const int64_t row = owner[c.group * slots + c.slot]; row >= 0 && row != c.row) return 1;
    for (int64_t group = 0; group < groups; ++group)
        for (int64_t row = 0; row < rows; ++row)
            src.set(0, group, row), dst.set(0, group, row), plan_start.set(0, group, row), plan_count.set(-1, group, row);
    for (const Plan& p : plans) {
        src.set(p.src, p.group, p.row), dst.set(p.dst, p.group, p.row);
        plan_start.set(p.start, p.group, p.row), plan_count.set(p.count, p.group, p.row);
    }
    // published slots end at 0, 0 even where the live update wrote the same slot
    for (const auto* list : {&moved, &cleared})
        for (const Cursor& c : *list) start.set(c.start, c.group, c.slot), committed.set(c.committed, c.group, c.slot);
    return 0;
}

// positions, seq_lens, idx_mapping, query_start_loc, num_computed, query_lens
KERNEL(prepare_positions) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor positions = args.tensor(0), seq_lens = args.tensor(1), mapping = args.tensor(2), begin = args.tensor(3);
    const Tensor computed = args.tensor(4), lens = args.tensor(5);
    for (int64_t token = 0; token < positions.size[0]; ++token) put(positions, 0, token);
    for (int64_t row = 0; row < mapping.size[0]; ++row) {
        const int64_t req = mapping.integer(row);
        const int64_t q = lens ? lens.integer(row) : begin.integer(row + 1) - begin.integer(row);
        put(seq_lens, req >= 0 ? computed.integer(req) + q : 0, row);
    }
    real_tokens(begin, lens, positions.size[0], [&](int64_t row, int64_t token, int64_t i) {
        if (mapping.integer(row) >= 0) put(positions, computed.integer(mapping.integer(row)) + i, token);
    });
    return 0;
}

// slot_mappings, block_tables, query_start_loc, positions, block_sizes, query_lens
KERNEL(compute_slot_mappings) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor slots = args.tensor(0), tables = args.tensor(1), begin = args.tensor(2), positions = args.tensor(3);
    const Tensor sizes = args.tensor(4), lens = args.tensor(5);
    for (int64_t group = 0; group < tables.size[0]; ++group) {
        Tensor table = tables;
        table.data = tables.at(group);
        table.size[0] = tables.size[1], table.size[1] = tables.size[2];
        table.stride[0] = tables.stride[1], table.stride[1] = tables.stride[2];
        for (int64_t token = 0; token < slots.size[1]; ++token) put(slots, -1, group, token);
        real_tokens(begin, lens, slots.size[1], [&](int64_t row, int64_t token, int64_t) {
            put(slots, slot_at(table, row, positions.integer(token), sizes.integer(group)), group, token);
        });
    }
    return 0;
}

// indices, lens, seq_lens, query_start_loc, block_table, slot_mapping, replay_start, query_lens; window, block_size
KERNEL(swa_indices) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor indices = args.tensor(0), counts = args.tensor(1), seq_lens = args.tensor(2), begin = args.tensor(3);
    const Tensor table = args.tensor(4), mapping = args.tensor(5), replay = args.tensor(6), lens = args.tensor(7);
    const int64_t window = integers[0], block_size = integers[1];
    for (int64_t token = 0; token < counts.size[0]; ++token) {
        put(counts, 0, token);
        for (int64_t k = 0; k < window; ++k) put(indices, -1, token, k);
    }
    real_tokens(begin, lens, counts.size[0], [&](int64_t row, int64_t token, int64_t i) {
        if (mapping.integer(token) < 0) return;
        const int64_t q = lens ? lens.integer(row) : begin.integer(row + 1) - begin.integer(row);
        const int64_t position = seq_lens.integer(row) - q + i;
        const int64_t first = std::max({position - window + 1, int64_t(0), replay ? replay.integer(row) : 0});
        const int64_t count = std::max<int64_t>(position - first + 1, 0);
        put(counts, count, token);
        for (int64_t k = 0; k < count; ++k) put(indices, slot_at(table, row, first + k, block_size), token, k);
    });
    return 0;
}
