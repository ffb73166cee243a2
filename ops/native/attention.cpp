// Attention of single tokens over slots of a paged cache. Slots that a token must not see are never read.
#include <limits>

#include "tensor.h"

namespace {

// out[token] = softmax(scale q K^T) V of one token over `slots`, all query heads; slots below 0 are skipped.
void attend(const Tensor& out, const Tensor& q, const Tensor& cache, int64_t token, const std::vector<int64_t>& slots,
            float scale, std::vector<float>& scores) {
    const int64_t heads = q.size[1], dim = q.size[2], kv_heads = cache.size[3], each = heads / kv_heads;
    const int64_t block_size = cache.size[1], seen = int64_t(slots.size());
    std::vector<float> query(each * dim), sums(each * dim), row(dim), most(each), total(each);
    scores.resize(each * seen);
    for (int64_t kv = 0; kv < kv_heads; ++kv) {
        for (int64_t e = 0; e < each; ++e) {
            load_row(&query[e * dim], q.at(token, kv * each + e), q.stride[2], dim, q.dtype);
            for (int64_t d = 0; d < dim; ++d) query[e * dim + d] *= scale;
            most[e] = -std::numeric_limits<float>::infinity();
        }
        auto read = [&](int64_t slot, int64_t part) -> const float* {
            char* const lies = cache.at(slot / block_size, slot % block_size, part, kv);
            return state_row(lies, cache.stride[4], dim, cache.dtype, row.data());
        };
        for (int64_t s = 0; s < seen; ++s) {
            const float* const key = read(slots[s], 0);
            for (int64_t e = 0; e < each; ++e) {
                const float score = scores[e * seen + s] = dot(&query[e * dim], key, dim);
                if (!(score <= most[e])) most[e] = score;  // NaN stays
            }
        }
        std::memset(sums.data(), 0, sums.size() * 4);
        for (int64_t e = 0; e < each; ++e) {
            total[e] = 0;
            for (int64_t s = 0; s < seen; ++s) {
                float& score = scores[e * seen + s];
                total[e] += score = std::exp(score - most[e]);
            }
        }
        for (int64_t s = 0; s < seen; ++s) {
            const float* const value = read(slots[s], 1);
            for (int64_t e = 0; e < each; ++e) add_scaled(&sums[e * dim], scores[e * seen + s], value, dim);
        }
        for (int64_t e = 0; e < each; ++e) {
            for (int64_t d = 0; d < dim; ++d) sums[e * dim + d] = seen ? sums[e * dim + d] / total[e] : 0.0f;
            store_row(out.at(token, kv * each + e), out.stride[2], &sums[e * dim], dim, out.dtype);
        }
    }
}

}  // namespace

// q, cache, indices, lens, out; -; scale
KERNEL(swa_attention) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor q = args.tensor(0), cache = args.tensor(1), indices = args.tensor(2), lens = args.tensor(3);
    const Tensor out = args.tensor(4);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < q.size[0]; ++token) {
        std::vector<int64_t> slots;
        std::vector<float> scores;
        for (int64_t k = 0; k < lens.integer(token); ++k)
            if (indices.integer(token, k) >= 0) slots.push_back(indices.integer(token, k));
        attend(out, q, cache, token, slots, float(floats[0]), scores);
    }
    return 0;
}

// q, cache, block_table, seq_lens, query_start_loc, query_lens, out; -; scale
KERNEL(paged_attention) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor q = args.tensor(0), cache = args.tensor(1), table = args.tensor(2), seq_lens = args.tensor(3);
    const Tensor begin = args.tensor(4), lens = args.tensor(5), out = args.tensor(6);
    const int64_t tokens = q.size[0], rows = seq_lens.size[0], block_size = cache.size[1], columns = table.size[1];
    // the row of each token and its place among the row's; -1: it belongs to none
    std::vector<int64_t> row_of(tokens, -1), place(tokens);
    for (int64_t b = 0; b < rows; ++b) {
        const int64_t first = begin.integer(b), q_row = lens ? lens.integer(b) : begin.integer(b + 1) - first;
        for (int64_t i = 0; i < q_row && first + i < tokens; ++i) {
            row_of[first + i] = b;
            place[first + i] = seq_lens.integer(b) - q_row + i;
        }
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t token = 0; token < tokens; ++token) {
        std::vector<int64_t> slots;
        std::vector<float> scores;
        for (int64_t p = 0; row_of[token] >= 0 && p <= place[token]; ++p) {
            const int64_t column = p / block_size, block = column < columns ? table.integer(row_of[token], column) : 0;
            if (block > 0) slots.push_back(block * block_size + p % block_size);
        }
        attend(out, q, cache, token, slots, float(floats[0]), scores);
    }
    return 0;
}
