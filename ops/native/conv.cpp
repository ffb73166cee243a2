// Short convolution over a ring of inputs, and keys and values into a paged cache.
#include "tensor.h"

// conv_ring, x, weight, bias, positions, slots, lens, starts, out; silu
KERNEL(conv_replay) {
    const Arguments args{tensors, integers, floats, threads};
    const Rows rows{args.tensor(5), args.tensor(6), args.tensor(7), args.tensor(1).size[1]};
    const Tensor ring = args.tensor(0), x = rows.by_row(args.tensor(1)), weight = args.tensor(2), bias = args.tensor(3);
    const Tensor positions = args.tensor(4), y = rows.by_row(args.tensor(8));
    const int64_t D = x.size[2], width = weight.size[1], length = ring.size[2];
    const bool silu = integers[0];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows.count(); ++row) {
        const int64_t slot = rows.slots.integer(row), q = rows.length(row), b = rows.place(row);
        std::vector<float> near(width - 1 + q), kernel(width);
        for (int64_t d = 0; d < D; ++d) {
            if (q > 0) {
                const int64_t position = positions.integer(row);
                for (int64_t i = 0; i < width - 1; ++i) {
                    const int64_t p = position - (width - 1) + i;
                    near[i] = p < 0 ? 0.0f : ring.value(slot, d, p % length);
                }
                for (int64_t t = 0; t < q; ++t) {
                    // what later steps read is what is used now: as the ring's dtype rounds it
                    near[width - 1 + t] = rounded(x.value(b, t, d), ring.dtype);
                    store(ring.at(slot, d, (position + t) % length), ring.dtype, near[width - 1 + t]);
                }
                load_row(kernel.data(), weight.at(d), weight.stride[1], width, weight.dtype);
            }
            for (int64_t t = 0; t < q; ++t) {
                float sum = 0;
                for (int64_t i = 0; i < width; ++i) sum += near[t + i] * kernel[i];
                if (bias) sum += bias.value(d);
                store(y.at(b, t, d), y.dtype, silu ? sum * sigmoid(sum) : sum);
            }
            for (int64_t t = q; t < rows.written(row); ++t) store(y.at(b, t, d), y.dtype, 0.0f);
        }
    }
    return 0;
}

// cache, k, v, slot_mapping
KERNEL(write_kv) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor cache = args.tensor(0), slots = args.tensor(3);
    const Tensor parts[2] = {args.tensor(1), args.tensor(2)};
    const int64_t block_size = cache.size[1], heads = cache.size[3], dim = cache.size[4];
    std::vector<float> row(dim);
    for (int64_t token = 0; token < slots.size[0]; ++token) {
        const int64_t slot = slots.integer(token);
        if (slot < block_size) continue;  // none, or of the null block
        for (int64_t part = 0; part < 2; ++part)
            for (int64_t h = 0; h < heads; ++h) {
                const Tensor& from = parts[part];
                load_row(row.data(), from.at(token, h), from.stride[2], dim, from.dtype);
                store_row(cache.at(slot / block_size, slot % block_size, part, h), cache.stride[4], row.data(), dim, cache.dtype);
            }
    }
    return 0;
}
