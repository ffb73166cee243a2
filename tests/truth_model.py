"""The truth that every route of a `HybridModel` is held to: one token at a time, in float64, in plain loops.

It shares the model's parameters and nothing of its code, so that a mistake in a layer cannot hide here as well.
"""

import math

import numpy as np
import torch
from truth_engram import compress, token_hash


class TruthModel:
    """`step(token)` feeds one id and returns its logits `[V]`; `logits(ids)` starts anew and returns `[T,V]`.

    Everything is float64 on the CPU. `zero_states()` sets the recurrent states to zero and leaves the rest alone.
    """

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: value.detach().cpu().double() for name, value in model.state_dict().items()}
        self.engram = _hash_constants(model.config) if "engram" in model.config.pattern else None
        self.reset()

    def reset(self):
        """Forgets every token."""
        self.position = 0
        self.ids = []
        self.past_inputs = [[] for _ in self.config.pattern]  # of the short convolutions
        self.past_kv = [[] for _ in self.config.pattern]
        self.states = [None for _ in self.config.pattern]

    def zero_states(self):
        """Sets the state of every Mamba-2 and gated-delta-rule layer to zero."""
        self.states = [None for _ in self.config.pattern]

    def logits(self, token_ids):
        """Logits `[T,V]` of a sequence from its first token."""
        self.reset()
        return torch.stack([self.step(token) for token in token_ids])

    def step(self, token):
        """Logits `[V]` after one more token."""
        self.ids.append(int(token))
        x = self.weights["embedding.weight"][int(token)]
        for index, kind in enumerate(self.config.pattern):
            layer = self._layer(index)
            if kind == "engram":
                x = x + self._engram(index, layer, x)
                continue
            normed = self._rms_norm(x, layer["norm.weight"])
            own = {"mamba2": self._mamba2, "gdn": self._gdn, "kda": self._kda, "mlp": self._mlp}
            run = own.get(kind, self._attention)
            x = x + run(index, kind, layer, normed)
        self.position += 1
        return self.weights["embedding.weight"] @ self._rms_norm(x, self.weights["norm.weight"])

    def _layer(self, index):
        prefix = f"layers.{index}."
        names = [name for name in self.weights if name.startswith(prefix)]
        return {name.removeprefix(prefix).removeprefix("mixer."): self.weights[name] for name in names} | {
            "norm.weight": self.weights.get(f"{prefix}norm.weight"),
            "inner_norm": self.weights.get(f"{prefix}mixer.norm.weight"),
        }

    def _rms_norm(self, x, weight):
        return x / (x.square().mean() + self.config.norm_eps).sqrt() * weight

    def _mlp(self, index, kind, layer, x):
        gate, up = (layer["up_proj.weight"] @ x).split(self.config.mlp_hidden)
        return layer["out_proj.weight"] @ (_silu(gate) * up)

    def _short_conv(self, index, layer, value, bias):
        weight = layer["conv_weight"]
        width = weight.shape[1]
        past = self.past_inputs[index] = (self.past_inputs[index] + [value])[-width:]
        out = torch.zeros_like(value) if bias is None else bias.clone()
        for age, old in enumerate(reversed(past)):
            out = out + weight[:, width - 1 - age] * old
        return _silu(out)

    def _mamba2(self, index, kind, layer, x):
        c = self.config
        heads, dim, states, groups = c.mamba_heads, c.mamba_head_dim, c.mamba_state_dim, c.mamba_groups
        inner, shared = heads * dim, groups * states
        z, raw, dt = (layer["in_proj.weight"] @ x).split([inner, inner + 2 * shared, heads])
        values, b, read = self._short_conv(index, layer, raw, layer["conv_bias"]).split([inner, shared, shared])
        if self.states[index] is None:
            self.states[index] = torch.zeros(heads, dim, states, dtype=torch.float64)
        state, y = self.states[index], torch.zeros(inner, dtype=torch.float64)
        for h in range(heads):
            group = h // (heads // groups)
            rows, columns = slice(h * dim, (h + 1) * dim), slice(group * states, (group + 1) * states)
            step = max(_softplus(dt[h] + layer["dt_bias"][h]), 0.0)
            decay = math.exp(-math.exp(layer["A_log"][h]) * step)
            state[h] = decay * state[h] + step * torch.outer(values[rows], b[columns])
            y[rows] = state[h] @ read[columns] + layer["D"][h] * values[rows]
        return layer["out_proj.weight"] @ self._rms_norm(y * _silu(z), layer["inner_norm"])

    def _gdn(self, index, kind, layer, x):
        c = self.config
        key_heads, heads, key_dim, dim = c.gdn_key_heads, c.gdn_value_heads, c.gdn_key_dim, c.gdn_value_dim
        keys, values = key_heads * key_dim, heads * dim
        raw, z, a, b = (layer["in_proj.weight"] @ x).split([2 * keys + values, values, heads, heads])
        q, k, v = self._short_conv(index, layer, raw, None).split([keys, keys, values])
        if self.states[index] is None:
            self.states[index] = torch.zeros(heads, dim, key_dim, dtype=torch.float64)
        state, out = self.states[index], torch.zeros(values, dtype=torch.float64)
        for h in range(heads):
            key_head = h // (heads // key_heads)
            columns, rows = slice(key_head * key_dim, (key_head + 1) * key_dim), slice(h * dim, (h + 1) * dim)
            query = q[columns] / (q[columns].square().sum() + 1e-6).sqrt() / key_dim**0.5
            key = k[columns] / (k[columns].square().sum() + 1e-6).sqrt()
            decay = math.exp(-math.exp(layer["A_log"][h]) * _softplus(a[h] + layer["dt_bias"][h]))
            beta = 1 / (1 + math.exp(-b[h]))
            update = beta * (v[rows] - decay * (state[h] @ key))
            state[h] = decay * state[h] + torch.outer(update, key)
            out[rows] = self._rms_norm(state[h] @ query, layer["inner_norm"]) * _silu(z[rows])
        return layer["out_proj.weight"] @ out

    def _kda(self, index, kind, layer, x):
        heads, dim = self.config.kda_heads, self.config.kda_head_dim
        raw = torch.cat([layer[f"{name}_proj.weight"] @ x for name in "qkv"])
        weight = torch.cat([layer[f"{name}_conv1d.weight"][:, 0] for name in "qkv"])
        q, k, v = self._short_conv(index, {"conv_weight": weight}, raw, None).split(heads * dim)
        a = layer["f_b_proj.weight"] @ (layer["f_a_proj.weight"] @ x)
        z = layer["g_b_proj.weight"] @ (layer["g_a_proj.weight"] @ x)
        b = layer["b_proj.weight"] @ x
        if self.states[index] is None:
            self.states[index] = torch.zeros(heads, dim, dim, dtype=torch.float64)
        state, out = self.states[index], torch.zeros(heads * dim, dtype=torch.float64)
        for h in range(heads):
            own = slice(h * dim, (h + 1) * dim)
            query = q[own] / (q[own].square().sum() + 1e-6).sqrt() / dim**0.5
            key = k[own] / (k[own].square().sum() + 1e-6).sqrt()
            rate = math.exp(layer["A_log"].flatten()[h])
            for channel in range(dim):
                step = _softplus(a[own][channel] + layer["dt_bias"][own][channel])
                state[h, :, channel] *= math.exp(-rate * step)
            beta = 1 / (1 + math.exp(-b[h]))
            state[h] += torch.outer(beta * (v[own] - state[h] @ key), key)
            out[own] = self._rms_norm(state[h] @ query, layer["o_norm.weight"]) / (1 + torch.exp(-z[own]))
        return layer["o_proj.weight"] @ out

    def _attention(self, index, kind, layer, x):
        c = self.config
        rows = (layer["in_proj.weight"] @ x).view(-1, c.head_dim)
        q, k, v = rows.split([c.num_heads, c.num_kv_heads, c.num_kv_heads])
        past = self.past_kv[index]
        past.append((torch.stack([self._rotate(row) for row in k]), v))
        if kind == "swa":
            del past[: -c.sliding_window]
        out = []
        for h in range(c.num_heads):
            kv_head = h // (c.num_heads // c.num_kv_heads)
            query = self._rotate(q[h])
            scores = torch.stack([query @ old_k[kv_head] for old_k, _ in past]) / c.head_dim**0.5
            out.append(sum(weight * old_v[kv_head] for weight, (_, old_v) in zip(scores.softmax(0), past)))
        return layer["out_proj.weight"] @ torch.cat(out)

    def _engram(self, index, layer, x):
        c, token_map = self.config, self.weights["engram.token_map"].long()
        recent = self.ids[::-1][: c.engram_order]
        sources = [compress(token, token_map) for token in recent] + [None] * (c.engram_order - len(recent))
        if sources[0] is None:
            return torch.zeros_like(x)  # a masked token reads nothing
        pad = max(int(token_map[c.eos_token_id]), 0)
        rows = token_hash(sources, *self.engram[index], pad)
        projected = layer["kv_proj.weight"] @ torch.cat([self.weights["engram.weight"][row] for row in rows])
        key, value = projected.split(c.hidden_size)
        query = self._rms_norm(x, layer["q_weight"][0])
        dot = float(query @ self._rms_norm(key, layer["k_weight"][0])) / c.hidden_size**0.5
        root = max(abs(dot), 1e-6) ** 0.5
        return value / (1 + math.exp(-root if dot >= 0 else root))

    def _rotate(self, row):
        half = self.config.head_dim // 2
        turned = row.clone()
        for i in range(half):
            angle = self.position * self.config.rope_theta ** (-2 * i / self.config.head_dim)
            cos, sin = math.cos(angle), math.sin(angle)
            turned[i] = row[i] * cos - row[i + half] * sin
            turned[i + half] = row[i + half] * cos + row[i] * sin
        return turned


def _hash_constants(config):
    """By index of an engram layer: multipliers, primes by order, and first rows in the table that all layers share."""
    constants, candidate, first = {}, config.engram_table_size, 0
    for index in (i for i, kind in enumerate(config.pattern) if kind == "engram"):
        bound = max(1, (2**63 - 1) // (config.engram_vocab_size or config.vocab_size) // 2)
        odd = np.random.default_rng(10007 * index).integers(0, bound, size=config.engram_order, dtype=np.int64) * 2 + 1
        primes, offsets = [], []
        for _ in range(2, config.engram_order + 1):
            primes.append([])
            offsets.append([])
            while len(primes[-1]) < config.engram_heads:
                if candidate > 1 and all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
                    primes[-1].append(candidate)
                    offsets[-1].append(first)
                    first += candidate
                candidate += 1
        constants[index] = odd.tolist(), primes, offsets
    return constants


def _silu(x):
    return x / (1 + torch.exp(-x))


def _softplus(value):
    value = float(value)
    return value if value > 20 else math.log1p(math.exp(value))
