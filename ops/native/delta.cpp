// The gated delta rule with a decay a head (GDN) or a key channel (KDA). See ops/gdn/op.py and ops/kda/op.py.
#include "tensor.h"

namespace {

enum Gate : int64_t { HEAD = 0, CHANNEL = 1, CHANNEL_BOUNDED = 2 };  // the last: KDA with a lower bound

// The inputs that all four ops share, in the order of their tensors; then query_start_loc and the output.
struct Inputs {
    Rows rows;
    Tensor q, k, v, a, b, A_log, dt_bias, o;
    Gate gate;
    bool l2norm;
    float scale, lower_bound;
    int64_t H, HV, K, V, gates;  // gates: decays of a value head

    Inputs(const Arguments& args, int first)
        : rows{args.tensor(first + 7), args.tensor(first + 8), args.tensor(first + 9), args.tensor(first + 2).size[1]},
          q(rows.by_row(args.tensor(first))), k(rows.by_row(args.tensor(first + 1))),
          v(rows.by_row(args.tensor(first + 2))), a(rows.by_row(args.tensor(first + 3))),
          b(rows.by_row(args.tensor(first + 4))), A_log(args.tensor(first + 5)), dt_bias(args.tensor(first + 6)),
          o(rows.by_row(args.tensor(first + 10))), gate(Gate(args.integers[0])), l2norm(args.integers[1]), scale(float(args.floats[0])),
          lower_bound(float(args.floats[1])), H(q.size[2]), HV(v.size[2]), K(q.size[3]), V(v.size[3]),
          gates(gate == HEAD ? 1 : K) {}

    float log_decay(int64_t row, int64_t t, int64_t hv, int64_t c) const {
        const float rate = std::exp(A_log.value(hv)), raw = a.value(row, t, hv, c);
        const float bias = gate == HEAD ? dt_bias.value(hv) : dt_bias ? dt_bias.value(hv, c) : 0.0f;
        if (gate == CHANNEL_BOUNDED) return lower_bound * sigmoid(rate * (raw + bias));
        return -rate * softplus(raw + bias);
    }

    void key(float* to, const Tensor& from, int64_t row, int64_t t, int64_t h, float factor) const {
        load_row(to, from.at(row, t, h), from.stride[3], K, from.dtype);
        if (l2norm) factor *= 1.0f / std::sqrt(dot(to, to, K) + 1e-6f);
        for (int64_t c = 0; c < K; ++c) to[c] *= factor;
    }

    void zero_tail(int64_t row, int64_t hv, int64_t from) const {
        for (int64_t t = from; t < rows.written(row); ++t) zero_row(o, rows.place(row), t, hv, V);
    }
};

struct Ring {
    Tensor u, k, g, start, committed;
    int64_t window;
};

// to[c] = from[c] exp(later[c] - earlier[c]), decays of a head broadcast over its channels
void decayed(float* to, const float* from, const double* later, const double* earlier, int64_t K, int64_t gates) {
    if (gates == 1) {
        const float factor = std::exp(float(*later - *earlier));
        for (int64_t c = 0; c < K; ++c) to[c] = factor * from[c];
    } else {
        for (int64_t c = 0; c < K; ++c) to[c] = std::exp(float(later[c] - earlier[c])) * from[c];
    }
}

// b: where the row's tokens are.
void replay_head(const Tensor& state, const Ring& ring, const Inputs& in, int64_t slot, int64_t b, int64_t hv, int64_t q) {
    const int64_t first = ring.start.integer(slot), live = ring.committed.integer(slot);
    const int64_t rows = live + q, K = in.K, V = in.V, gates = in.gates, h = hv / (in.HV / in.H);
    const int64_t length = ring.u.size[2];
    const bool owner = hv % (in.HV / in.H) == 0;  // of the value heads of one key head, the one that stores the keys
    auto place = [&](int64_t row) { return (first + row) % length; };
    std::vector<float> keys(rows * K), queries(q * K), us(rows * V), beta(q), from_k(q * rows), from_q(q * rows);
    std::vector<float> carried_k(q * K), carried_q(q * K), read_k(q * V), read_q(q * V), scratch(K), moved(K);
    std::vector<double> passed((rows + 1) * gates);  // row j + 1: decays up to and with ring row j

    for (int64_t j = 0; j < rows; ++j) {
        float* const row = &keys[j * K];
        if (j < live) {
            load_row(row, ring.k.at(slot, h, place(j)), ring.k.stride[3], K, ring.k.dtype);
            load_row(&us[j * V], ring.u.at(slot, hv, place(j)), ring.u.stride[3], V, ring.u.dtype);
        } else {
            const int64_t t = j - live;
            in.key(row, in.k, b, t, h, 1.0f);
            // what is replayed later is what is used now: as the ring's dtype rounds it
            for (int64_t c = 0; c < K; ++c) row[c] = rounded(row[c], ring.k.dtype);
            if (owner) store_row(ring.k.at(slot, h, place(j)), ring.k.stride[3], row, K, ring.k.dtype);
            in.key(&queries[t * K], in.q, b, t, h, in.scale);
            beta[t] = sigmoid(in.b.value(b, t, hv));
        }
        for (int64_t c = 0; c < gates; ++c) {
            float g;
            char* const lies = ring.g.at(slot, hv, place(j), c);
            if (j < live) g = load(lies, F32);
            else store(lies, F32, g = in.log_decay(b, j - live, hv, c));
            passed[(j + 1) * gates + c] = passed[j * gates + c] + g;
        }
    }
    const double* const begin = passed.data();
    for (int64_t t = 0; t < q; ++t) {
        const int64_t here = live + t;
        const double* const now = &passed[(here + 1) * gates];
        const float *key = &keys[here * K], *query = &queries[t * K];
        decayed(&carried_k[t * K], key, now, begin, K, gates);
        decayed(&carried_q[t * K], query, now, begin, K, gates);
        for (int64_t j = 0; j <= here; ++j) {
            decayed(moved.data(), &keys[j * K], now, &passed[(j + 1) * gates], K, gates);
            from_k[t * rows + j] = dot(moved.data(), key, K);
            from_q[t * rows + j] = dot(moved.data(), query, K);
        }
    }
    const bool flush = live > 0 && rows > ring.window;
    for (int64_t i = 0; i < V; ++i) {
        const float* const row = state_row(state.at(slot, hv, i), state.stride[3], K, state.dtype, scratch.data());
        for (int64_t t = 0; t < q; ++t) {
            read_k[t * V + i] = dot(row, &carried_k[t * K], K);
            read_q[t * V + i] = dot(row, &carried_q[t * K], K);
        }
    }
    for (int64_t t = 0; t < q; ++t) {
        const int64_t here = live + t;
        for (int64_t j = 0; j < here; ++j) add_scaled(&read_k[t * V], from_k[t * rows + j], &us[j * V], V);
        float* const u = &us[here * V];
        for (int64_t i = 0; i < V; ++i)
            u[i] = rounded(beta[t] * (in.v.value(b, t, hv, i) - read_k[t * V + i]), ring.u.dtype);
        store_row(ring.u.at(slot, hv, place(here)), ring.u.stride[3], u, V, ring.u.dtype);
        for (int64_t j = 0; j <= here; ++j) add_scaled(&read_q[t * V], from_q[t * rows + j], &us[j * V], V);
        store_row(in.o.at(b, t, hv), in.o.stride[3], &read_q[t * V], V, in.o.dtype);
    }
    if (flush) {
        const double* const end = &passed[live * gates];
        std::vector<float> whole(K, 1.0f), kept(K), weights(live);
        decayed(kept.data(), whole.data(), end, begin, K, gates);
        for (int64_t j = 0; j < live; ++j) {
            decayed(moved.data(), &keys[j * K], end, &passed[(j + 1) * gates], K, gates);
            std::memcpy(&keys[j * K], moved.data(), size_t(K) * 4);
        }
        for (int64_t i = 0; i < V; ++i) {
            char* const lies = state.at(slot, hv, i);
            float* const row = state_row(lies, state.stride[3], K, state.dtype, scratch.data());
            for (int64_t j = 0; j < live; ++j) weights[j] = us[j * V + i];
            fold(row, kept.data(), weights.data(), keys.data(), live, K);
            if (row == scratch.data()) store_row(lies, state.stride[3], row, K, state.dtype);
        }
    }
}

void update_head(const Tensor& state, const Tensor& token_slots, const Inputs& in, int64_t slot, int64_t b, int64_t hv,
                 int64_t q) {
    const int64_t K = in.K, V = in.V, h = hv / (in.HV / in.H);
    std::vector<float> keys(q * K), queries(q * K), kept(q * K), beta(q), scratch(K);
    for (int64_t t = 0; t < q; ++t) {
        in.key(&keys[t * K], in.k, b, t, h, 1.0f);
        in.key(&queries[t * K], in.q, b, t, h, in.scale);
        beta[t] = sigmoid(in.b.value(b, t, hv));
        const float first = std::exp(in.log_decay(b, t, hv, 0));
        for (int64_t c = 0; c < K; ++c) kept[t * K + c] = in.gates == 1 || !c ? first : std::exp(in.log_decay(b, t, hv, c));
    }
    for (int64_t i = 0; q > 0 && i < V; ++i) {
        char* const lies = state.at(slot, hv, i);
        // with slots by token the state itself stays as it is
        float* row = scratch.data();
        if (token_slots) load_row(row, lies, state.stride[3], K, state.dtype);
        else row = state_row(lies, state.stride[3], K, state.dtype, row);
        for (int64_t t = 0; t < q; ++t) {
            const float *key = &keys[t * K], *keep = &kept[t * K];
            float stored = 0;
#pragma omp simd reduction(+ : stored)
            for (int64_t c = 0; c < K; ++c) {
                row[c] *= keep[c];
                stored += row[c] * key[c];
            }
            add_scaled(row, beta[t] * (in.v.value(b, t, hv, i) - stored), key, K);
            store(in.o.at(b, t, hv, i), in.o.dtype, dot(row, &queries[t * K], K));
            if (token_slots && token_slots.integer(b, t) > 0)
                store_row(state.at(token_slots.integer(b, t), hv, i), state.stride[3], row, K, state.dtype);
        }
        if (!token_slots && row == scratch.data()) store_row(lies, state.stride[3], row, K, state.dtype);
    }
}

}  // namespace

// state, u_ring, k_ring, g_ring, ring_start, ring_committed, inputs, starts, out; gate, l2norm, window; scale, lower_bound
KERNEL(delta_replay) {
    const Arguments args{tensors, integers, floats, threads};
    const Tensor state = args.tensor(0);
    const Ring ring{args.tensor(1), args.tensor(2), args.tensor(3), args.tensor(4), args.tensor(5), integers[2]};
    const Inputs in(args, 6);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t work = 0; work < in.rows.count() * in.HV; ++work) {
        const int64_t row = work / in.HV, hv = work % in.HV, q = in.rows.length(row);
        in.zero_tail(row, hv, q);
        if (q > 0) replay_head(state, ring, in, in.rows.slots.integer(row), in.rows.place(row), hv, q);
    }
    return 0;
}

// state, token_slots, inputs, starts, out; gate, l2norm; scale, lower_bound
KERNEL(delta_update) {
    const Arguments args{tensors, integers, floats, threads};
    const Inputs in(args, 2);
    const Tensor state = args.tensor(0), token_slots = in.rows.by_row(args.tensor(1));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t work = 0; work < in.rows.count() * in.HV; ++work) {
        const int64_t row = work / in.HV, hv = work % in.HV, q = in.rows.length(row);
        in.zero_tail(row, hv, q);
        update_head(state, token_slots, in, in.rows.slots.integer(row), in.rows.place(row), hv, q);
    }
    return 0;
}
