// Mamba-2: decode from a checkpoint and a ring of inputs, and the plain update. See ops/mamba2/op.py for the formulas.
#include <algorithm>

#include "tensor.h"

namespace {

// The inputs that both ops share, in the order of their tensors; then query_start_loc and the output.
struct Inputs {
    Rows rows;
    Tensor x, dt, A, B, C, D, z, dt_bias, y;
    bool softplus_dt;
    float dt_min, dt_max;

    Inputs(const Arguments& args, int first)
        : rows{args.tensor(first + 8), args.tensor(first + 9), args.tensor(first + 10), args.tensor(first).size[1]},
          x(rows.by_row(args.tensor(first))), dt(rows.by_row(args.tensor(first + 1))), A(args.tensor(first + 2)),
          B(rows.by_row(args.tensor(first + 3))), C(rows.by_row(args.tensor(first + 4))), D(args.tensor(first + 5)),
          z(rows.by_row(args.tensor(first + 6))), dt_bias(args.tensor(first + 7)),
          y(rows.by_row(args.tensor(first + 11))), softplus_dt(args.integers[0]), dt_min(float(args.floats[0])),
          dt_max(float(args.floats[1])) {}

    float step_size(int64_t b, int64_t t, int64_t h) const {
        float step = dt.value(b, t, h) + (dt_bias ? dt_bias.value(h) : 0.0f);
        if (softplus_dt) step = softplus(step);
        if (step < dt_min) step = dt_min;
        if (step > dt_max) step = dt_max;
        return step;
    }

    // y[b, t, h, p] from the state's and the ring's share of it
    void finish(int64_t b, int64_t t, int64_t h, int64_t p, float value) const {
        if (D) value += D.value(h) * x.value(b, t, h, p);
        if (z) {
            const float gate = z.value(b, t, h, p);
            value *= gate * sigmoid(gate);
        }
        store(y.at(b, t, h, p), y.dtype, value);
    }

    void zero_tail(int64_t row, int64_t h, int64_t from) const {
        for (int64_t t = from; t < rows.written(row); ++t) zero_row(y, rows.place(row), t, h, x.size[3]);
    }
};

struct Ring {
    Tensor x, B, dt, start, committed;
    int64_t window;
};

// Heads of one group of one batch row: they share B, C and the products C_t B_j. b: where the row's tokens are.
struct GroupReplay {
    const Tensor& state;
    const Ring& ring;
    const Inputs& in;
    int64_t slot, q, first, live, rows, P, N, length;
    std::vector<float> Bs, Cs, overlap, xs, steps, carry, coefficient, weights, kept, scratch, recent;
    std::vector<double> passed;

    GroupReplay(const Tensor& state, const Ring& ring, const Inputs& in, int64_t slot, int64_t b, int64_t group, int64_t q)
        : state(state), ring(ring), in(in), slot(slot), q(q), first(ring.start.integer(slot)),
          live(ring.committed.integer(slot)), rows(live + q), P(in.x.size[3]), N(in.B.size[3]), length(ring.x.size[2]),
          Bs(rows * N), Cs(q * N), overlap(q * rows), xs(rows * P), steps(rows), carry(q), coefficient(live),
          weights(live), kept(N), scratch(N), recent(q * P), passed(rows) {
        for (int64_t j = 0; j < live; ++j)
            load_row(&Bs[j * N], ring.B.at(slot, group, place(j)), ring.B.stride[3], N, ring.B.dtype);
        for (int64_t t = 0; t < q; ++t) {
            float* row = &Bs[(live + t) * N];
            load_row(row, in.B.at(b, t, group), in.B.stride[3], N, in.B.dtype);
            // what is replayed later is what is used now: as the ring's dtype rounds it
            for (int64_t n = 0; n < N; ++n) row[n] = rounded(row[n], ring.B.dtype);
            store_row(ring.B.at(slot, group, place(live + t)), ring.B.stride[3], row, N, ring.B.dtype);
            load_row(&Cs[t * N], in.C.at(b, t, group), in.C.stride[3], N, in.C.dtype);
            for (int64_t j = 0; j <= live + t; ++j) overlap[t * rows + j] = dot(&Cs[t * N], &Bs[j * N], N);
        }
    }

    int64_t place(int64_t row) const { return (first + row) % length; }

    void head(int64_t b, int64_t h) {
        const float A = in.A.value(h);
        double sum = 0, folded = 0;
        for (int64_t j = 0; j < rows; ++j) {
            float step;
            if (j < live) {
                step = ring.dt.value(slot, h, place(j));
                load_row(&xs[j * P], ring.x.at(slot, h, place(j)), ring.x.stride[3], P, ring.x.dtype);
            } else {
                step = in.step_size(b, j - live, h);
                float* row = &xs[j * P];
                load_row(row, in.x.at(b, j - live, h), in.x.stride[3], P, in.x.dtype);
                for (int64_t p = 0; p < P; ++p) row[p] = rounded(row[p], ring.x.dtype);
                store_row(ring.x.at(slot, h, place(j)), ring.x.stride[3], row, P, ring.x.dtype);
                store(ring.dt.at(slot, h, place(j)), F32, step);
            }
            steps[j] = step;
            passed[j] = sum += step;
            if (j + 1 == live) folded = sum;
        }
        for (int64_t t = 0; t < q; ++t) {
            const double now = passed[live + t];
            carry[t] = std::exp(A * float(now));
            float* const sum = &recent[t * P];  // the ring's share of y
            std::memset(sum, 0, size_t(P) * 4);
            for (int64_t j = 0; j <= live + t; ++j)
                add_scaled(sum, std::exp(A * float(now - passed[j])) * steps[j] * overlap[t * rows + j], &xs[j * P], P);
        }
        const bool flush = live > 0 && rows > ring.window;
        for (int64_t j = 0; flush && j < live; ++j)
            coefficient[j] = std::exp(A * float(folded - passed[j])) * steps[j];
        std::fill(kept.begin(), kept.end(), std::exp(A * float(folded)));
        for (int64_t p = 0; p < P; ++p) {
            char* const lies = state.at(slot, h, p);
            float* const row = state_row(lies, state.stride[3], N, state.dtype, scratch.data());
            for (int64_t t = 0; t < q; ++t)
                in.finish(b, t, h, p, carry[t] * dot(row, &Cs[t * N], N) + recent[t * P + p]);
            if (!flush) continue;
            for (int64_t j = 0; j < live; ++j) weights[j] = coefficient[j] * xs[j * P + p];
            fold(row, kept.data(), weights.data(), Bs.data(), live, N);
            if (row == scratch.data()) store_row(lies, state.stride[3], row, N, state.dtype);
        }
    }
};

}  // namespace

// state, x_ring, B_ring, dt_ring, ring_start, ring_committed, inputs, starts, out; dt_softplus, window; dt_min, dt_max
KERNEL(mamba2_replay) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor state = args.tensor(0);
    const Ring ring{args.tensor(1), args.tensor(2), args.tensor(3), args.tensor(4), args.tensor(5), integers[1]};
    const Inputs in(args, 6);
    const int64_t groups = in.B.size[2], each = in.x.size[2] / groups;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t work = 0; work < in.rows.count() * groups; ++work) {
        const int64_t row = work / groups, group = work % groups, q = in.rows.length(row), b = in.rows.place(row);
        for (int64_t h = group * each; h < (group + 1) * each; ++h) in.zero_tail(row, h, q);
        if (q <= 0) continue;
        GroupReplay replay(state, ring, in, in.rows.slots.integer(row), b, group, q);
        for (int64_t h = group * each; h < (group + 1) * each; ++h) replay.head(b, h);
    }
    return 0;
}

// state, token_slots, inputs, starts, out; dt_softplus; dt_min, dt_max
KERNEL(mamba2_update) {
    const Arguments args{tensors, integers, floats, threads};
    const Inputs in(args, 2);
    const Tensor state = args.tensor(0), token_slots = in.rows.by_row(args.tensor(1));
    const int64_t heads = in.x.size[2], P = in.x.size[3], N = in.B.size[3], each = heads / in.B.size[2];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t work = 0; work < in.rows.count() * heads; ++work) {
        const int64_t row_index = work / heads, h = work % heads, slot = in.rows.slots.integer(row_index);
        const int64_t q = in.rows.length(row_index), b = in.rows.place(row_index);
        in.zero_tail(row_index, h, q);
        std::vector<float> Bs(q * N), Cs(q * N), step(q), decay(q), scratch(N);
        for (int64_t t = 0; t < q; ++t) {
            load_row(&Bs[t * N], in.B.at(b, t, h / each), in.B.stride[3], N, in.B.dtype);
            load_row(&Cs[t * N], in.C.at(b, t, h / each), in.C.stride[3], N, in.C.dtype);
            step[t] = in.step_size(b, t, h);
            decay[t] = std::exp(in.A.value(h) * step[t]);
        }
        for (int64_t p = 0; q > 0 && p < P; ++p) {
            char* const lies = state.at(slot, h, p);
            // with slots by token the state itself stays as it is
            float* row = scratch.data();
            if (token_slots) load_row(row, lies, state.stride[3], N, state.dtype);
            else row = state_row(lies, state.stride[3], N, state.dtype, row);
            for (int64_t t = 0; t < q; ++t) {
                const float input = step[t] * in.x.value(b, t, h, p), a = decay[t];
                const float *B = &Bs[t * N], *C = &Cs[t * N];
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t n = 0; n < N; ++n) {
                    row[n] = a * row[n] + input * B[n];
                    sum += row[n] * C[n];
                }
                in.finish(b, t, h, p, sum);
                if (token_slots && token_slots.integer(b, t) > 0)
                    store_row(state.at(token_slots.integer(b, t), h, p), state.stride[3], row, N, state.dtype);
            }
            if (!token_slots && row == scratch.data()) store_row(lies, state.stride[3], row, N, state.dtype);
        }
    }
    return 0;
}
