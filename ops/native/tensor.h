// Tensors as Python hands them over, and the loops that all kernels share.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// Codes of `DTYPES` in build.py.
enum Dtype : int64_t { F32 = 0, BF16 = 1, F16 = 2, I32 = 3, I64 = 4, FLAG = 5 };

static inline int64_t bytes_of(int64_t dtype) {
    return dtype == I64 ? 8 : dtype == FLAG ? 1 : dtype == BF16 || dtype == F16 ? 2 : 4;
}

static inline float from_bf16(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Rounds to nearest, ties to even, as torch does.
static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float load(const char* at, int64_t dtype) {
    if (dtype == F32) return *reinterpret_cast<const float*>(at);
    if (dtype == BF16) return from_bf16(*reinterpret_cast<const uint16_t*>(at));
    return float(*reinterpret_cast<const _Float16*>(at));
}

static inline void store(char* at, int64_t dtype, float value) {
    if (dtype == F32) *reinterpret_cast<float*>(at) = value;
    else if (dtype == BF16) *reinterpret_cast<uint16_t*>(at) = to_bf16(value);
    else *reinterpret_cast<_Float16*>(at) = _Float16(value);
}

static inline float rounded(float value, int64_t dtype) {
    if (dtype == F32) return value;
    return dtype == BF16 ? from_bf16(to_bf16(value)) : float(_Float16(value));
}

// A tensor of up to five dimensions; strides in bytes. No data: the argument was None.
struct Tensor {
    char* data;
    int64_t dtype, size[5], stride[5];

    explicit operator bool() const { return data != nullptr; }

    char* at(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0, int64_t m = 0) const {
        return data + i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3] + m * stride[4];
    }
    __attribute__((noinline)) float value(int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0, int64_t m = 0) const {
        return load(at(i, j, k, l, m), dtype);
    }
    __attribute__((noinline)) int64_t integer(int64_t i, int64_t j = 0, int64_t k = 0) const {
        const char* found = at(i, j, k);
        if (dtype == I64) return *reinterpret_cast<const int64_t*>(found);
        return dtype == FLAG ? *reinterpret_cast<const uint8_t*>(found) : *reinterpret_cast<const int32_t*>(found);
    }
    void set(int64_t value, int64_t i, int64_t j = 0) const { *reinterpret_cast<int32_t*>(at(i, j)) = int32_t(value); }
};

// The argument list of a kernel: tensors as laid out by `call` in build.py, then integers and floats.
struct Arguments {
    const int64_t* tensors;
    const int64_t* integers;
    const double* floats;
    int threads;

    Tensor tensor(int i) const {
        const int64_t* from = tensors + 12 * i;
        Tensor found;
        found.data = reinterpret_cast<char*>(from[0]);
        found.dtype = from[1];
        for (int d = 0; d < 5; ++d) {
            found.size[d] = from[2 + d];
            found.stride[d] = from[7 + d] * bytes_of(found.dtype);
        }
        return found;
    }
};

// A kernel returns 0, or 1 if it refuses its arguments, and then has written nothing.
#define KERNEL(name) \
    extern "C" int name(const int64_t* tensors, const int64_t* integers, const double* floats, int threads)

// n values `stride` bytes apart as floats.
static __attribute__((noinline)) void load_row(float* to, const char* from, int64_t stride, int64_t n, int64_t dtype) {
    if (dtype == F32 && stride == 4) std::memcpy(to, from, size_t(n) * 4);
    else if (dtype == BF16 && stride == 2) for (int64_t i = 0; i < n; ++i) to[i] = from_bf16(reinterpret_cast<const uint16_t*>(from)[i]);
    else if (dtype == F16 && stride == 2) for (int64_t i = 0; i < n; ++i) to[i] = float(reinterpret_cast<const _Float16*>(from)[i]);
    else for (int64_t i = 0; i < n; ++i) to[i] = load(from + i * stride, dtype);
}

static __attribute__((noinline)) void store_row(char* to, int64_t stride, const float* from, int64_t n, int64_t dtype) {
    if (dtype == F32 && stride == 4) std::memcpy(to, from, size_t(n) * 4);
    else for (int64_t i = 0; i < n; ++i) store(to + i * stride, dtype, from[i]);
}

// A state row as floats: in place where it lies so, else in `scratch`.
static inline float* state_row(char* from, int64_t stride, int64_t n, int64_t dtype, float* scratch) {
    if (dtype == F32 && stride == 4) return reinterpret_cast<float*>(from);
    load_row(scratch, from, stride, n, dtype);
    return scratch;
}

// Eight floats, at any address. Sums are kept in several of them side by side, so that additions need not wait.
typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
constexpr int64_t WIDTH = 8, BLOCK = 4 * WIDTH;

static inline const Lanes* lanes(const float* at) { return reinterpret_cast<const Lanes*>(at); }

static __attribute__((noinline)) float dot(const float* a, const float* b, int64_t n) {
    Lanes sums[4] = {};
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        const Lanes *x = lanes(a + i), *y = lanes(b + i);
        sums[0] += x[0] * y[0], sums[1] += x[1] * y[1], sums[2] += x[2] * y[2], sums[3] += x[3] * y[3];
    }
    const Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = ((all[0] + all[4]) + (all[1] + all[5])) + ((all[2] + all[6]) + (all[3] + all[7]));
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// row[i] = kept[i] row[i] + sum over j of weights[j] rows[j n + i]
static __attribute__((noinline)) void fold(float* row, const float* kept, const float* weights, const float* rows,
                                           int64_t count, int64_t n) {
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        Lanes* const to = reinterpret_cast<Lanes*>(row + i);
        const Lanes* keep = lanes(kept + i);
        Lanes s0 = keep[0] * to[0], s1 = keep[1] * to[1], s2 = keep[2] * to[2], s3 = keep[3] * to[3];
        for (int64_t j = 0; j < count; ++j) {
            const Lanes* x = lanes(rows + j * n + i);
            const float w = weights[j];
            s0 += w * x[0], s1 += w * x[1], s2 += w * x[2], s3 += w * x[3];
        }
        to[0] = s0, to[1] = s1, to[2] = s2, to[3] = s3;
    }
    for (; i < n; ++i) {
        float sum = kept[i] * row[i];
        for (int64_t j = 0; j < count; ++j) sum += weights[j] * rows[j * n + i];
        row[i] = sum;
    }
}

// y += a x
static __attribute__((noinline)) void add_scaled(float* y, float a, const float* x, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// softplus that passes values above 20 through; NaN stays NaN
static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Which tokens the rows of a call have: `tokens` each, or packed, from `starts` on.
struct Rows {
    Tensor slots, lens, starts;
    int64_t tokens;

    int64_t count() const { return slots.size[0]; }

    // A tensor [tokens, ...] of packed rows as [tokens, *, ...]: token t of a row is at (place(row), t) in either layout.
    Tensor by_row(const Tensor& t) const {
        if (!starts || !t) return t;
        Tensor seen = t;
        for (int d = 4; d > 0; --d) seen.size[d] = t.size[d - 1], seen.stride[d] = t.stride[d - 1];
        return seen;
    }

    int64_t place(int64_t row) const { return starts ? starts.integer(row) : row; }

    // The real tokens of a row: none where the slot is null.
    int64_t length(int64_t row) const {
        if (slots.integer(row) <= 0) return 0;
        if (lens) return lens.integer(row);
        return starts ? starts.integer(row + 1) - starts.integer(row) : tokens;
    }

    // Tokens of a row whose output a kernel writes; of packed rows what is not real has been zeroed before.
    int64_t written(int64_t row) const { return starts ? length(row) : tokens; }
};

static __attribute__((noinline)) void zero_row(const Tensor& t, int64_t i, int64_t j, int64_t k, int64_t n) {
    for (int64_t l = 0; l < n; ++l) store(t.at(i, j, k, l), t.dtype, 0.0f);
}
