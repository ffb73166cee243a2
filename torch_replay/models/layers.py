"""The layers of a hybrid model, each cut into the steps that training, prefill and decode share.

A mixer is `project -> conv -> core -> output`. Decode replaces the conv and the core by ops that own a state; it calls
the same `project` and `output`, and hands the op the same raw values (dt before bias and softplus, a and b before
their nonlinearities) that the chunked route works out here.
"""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from .config import HybridConfig
from .scan import delta_scan, kda_scan, ssd_scan


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, the mean square taken in float32 (float64 for float64 input)."""

    def __init__(self, size: int, eps: float, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = _wide(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, gate and up in one projection."""

    def __init__(self, config: HybridConfig, device=None, dtype=None):
        super().__init__()
        kwargs = {"bias": False, "device": device, "dtype": dtype}
        self.up_proj = nn.Linear(config.hidden_size, 2 * config.mlp_hidden, **kwargs)
        self.out_proj = nn.Linear(config.mlp_hidden, config.hidden_size, **kwargs)

    def forward(self, x: torch.Tensor, rope=None) -> torch.Tensor:
        gate, up = self.up_proj(x).chunk(2, -1)
        return self.out_proj(F.silu(gate) * up)


class Mamba2Mixer(nn.Module):
    """Mamba-2 (Dao and Gu 2024): gated state-space recurrence behind a short convolution over x, B and C."""

    def __init__(self, config: HybridConfig, device=None, dtype=None):
        super().__init__()
        self.heads, self.head_dim = config.mamba_heads, config.mamba_head_dim
        self.groups, self.state_dim = config.mamba_groups, config.mamba_state_dim
        self.inner, self.conv_dim = config.mamba_inner, config.mamba_conv_dim
        kwargs = {"device": device, "dtype": dtype}
        width = self.inner + self.conv_dim + self.heads
        self.in_proj = nn.Linear(config.hidden_size, width, bias=False, **kwargs)
        self.conv_weight = nn.Parameter(_conv_init(self.conv_dim, config.conv_width, **kwargs))
        self.conv_bias = nn.Parameter(torch.zeros(self.conv_dim, **kwargs))
        self.A_log, self.dt_bias = _decay_parameters(self.heads, device)
        self.D = nn.Parameter(torch.ones(self.heads, dtype=torch.float32, device=device))
        self.norm = RMSNorm(self.inner, config.norm_eps, **kwargs)
        self.out_proj = nn.Linear(self.inner, config.hidden_size, bias=False, **kwargs)

    def project(self, x):
        """x `[B,T,hidden]` -> z `[B,T,H,P]`, raw conv input `[B,T,conv_dim]`, raw dt `[B,T,H]`: views."""
        z, xbc, dt = self.in_proj(x).split([self.inner, self.conv_dim, self.heads], -1)
        return z.unflatten(-1, (self.heads, self.head_dim)), xbc, dt

    def conv(self, xbc, history=None):
        """Short convolution and SiLU over x|B|C; `history` as in `causal_conv`."""
        return F.silu(causal_conv(xbc, self.conv_weight, self.conv_bias, history))

    def split(self, xbc):
        """Convolved `[B,T,conv_dim]` -> x `[B,T,H,P]`, B and C `[B,T,Gr,N]`."""
        shared = self.groups * self.state_dim
        x, b, c = xbc.split([self.inner, shared, shared], -1)
        by_group = (self.groups, self.state_dim)
        return x.unflatten(-1, (self.heads, self.head_dim)), b.unflatten(-1, by_group), c.unflatten(-1, by_group)

    def decay_rates(self):
        """A `[H]`, negative, in float32."""
        return -_wide(self.A_log).exp()

    def step_sizes(self, dt):
        """Raw dt `[B,T,H]` -> `softplus(dt + dt_bias)`, which passes values above 20 through, clamped at zero."""
        return F.softplus(_wide(dt) + self.dt_bias, threshold=20.0).clamp(min=0.0)

    def core(self, x, dt, B, C, initial_state=None, scan=ssd_scan):
        """Processed dt -> `(y, final_state)`, y `[B,T,H,P]` with the D skip, not gated; state `[B,H,P,N]`.

        scan: `ssd_scan`, or what computes the same without gradients. What it returns besides follows the state.
        """
        with _full_precision(x):
            y, *states = scan(x, dt, self.decay_rates(), B, C, initial_state)
        return y + (x * self.D[:, None]).to(y.dtype), *states

    def gate(self, y, z):
        """`y * silu(z)`, both `[B,T,H,P]`; before the norm, so that the decode op can do it."""
        return y * F.silu(z)

    def output(self, y):
        """Gated y `[B,T,H,P]` -> `[B,T,hidden]`."""
        return self.out_proj(self.norm(y.flatten(-2).to(self.out_proj.weight.dtype)))

    def forward(self, x, rope=None):
        """The whole sequence from an empty state: x `[B,T,hidden]` -> `[B,T,hidden]`."""
        z, xbc, dt = self.project(x)
        inner, b, c = self.split(self.conv(xbc))
        y, _ = self.core(inner, self.step_sizes(dt), b, c)
        return self.output(self.gate(y, z))


def decay_rates(mixers):
    """`Mamba2Mixer.decay_rates` of each of `mixers`. Taken at once, which Inductor makes one kernel for all layers."""
    return torch._foreach_neg([_wide(mixer.A_log).exp() for mixer in mixers])


class DeltaMixer(nn.Module):
    """What layers of the delta rule share. They differ in their projections, the decay and the output.

    A layer has key_heads H, value_heads HV, key_dim K, value_dim V, conv_weight `[conv_dim,width]`, `scan`, and
    project: x `[B,T,hidden]` -> raw conv input `[B,T,conv_dim]`, gate z `[B,T,HV,V]`, raw decay a and raw beta b.
    gate_parameters: A_log and dt_bias as the decode ops take them. decays: a, b -> log decay g and beta `[B,T,HV]`.
    """

    @property
    def scale(self):
        return self.key_dim**-0.5

    def conv(self, qkv, history=None):
        """Short convolution and SiLU over q|k|v; `history` as in `causal_conv`."""
        return F.silu(causal_conv(qkv, self.conv_weight, None, history))

    def split(self, qkv):
        """Convolved `[B,T,conv_dim]` -> q and k `[B,T,H,K]`, v `[B,T,HV,V]`; q and k not yet normalised."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        q, k, v = qkv.split([keys, keys, values], -1)
        by_key = (self.key_heads, self.key_dim)
        return q.unflatten(-1, by_key), k.unflatten(-1, by_key), v.unflatten(-1, (self.value_heads, self.value_dim))

    def core(self, q, k, v, g, beta, initial_state=None, scan=None):
        """q and k as `split` gives them, g and beta processed -> `(o [B,T,HV,V], final_state [B,HV,V,K])`.

        scan: the layer's, or what computes the same without gradients; its results are returned as they are.
        """
        with _full_precision(v):
            return (scan or self.scan)(l2_normalise(q) * self.scale, l2_normalise(k), v, g, beta, initial_state)

    def forward(self, x, rope=None):
        """The whole sequence from an empty state: x `[B,T,hidden]` -> `[B,T,hidden]`."""
        qkv, z, a, b = self.project(x)
        q, k, v = self.split(self.conv(qkv))
        o, _ = self.core(q, k, v, *self.decays(a, b))
        return self.output(o, z)


class GDNMixer(DeltaMixer):
    """Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): gated delta rule behind a short convolution over q, k, v."""

    scan = staticmethod(delta_scan)

    def __init__(self, config: HybridConfig, device=None, dtype=None):
        super().__init__()
        self.key_heads, self.value_heads = config.gdn_key_heads, config.gdn_value_heads
        self.key_dim, self.value_dim = config.gdn_key_dim, config.gdn_value_dim
        self.keys, self.values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.conv_dim = config.gdn_conv_dim
        kwargs = {"device": device, "dtype": dtype}
        width = self.conv_dim + self.values + 2 * self.value_heads
        self.in_proj = nn.Linear(config.hidden_size, width, bias=False, **kwargs)
        self.conv_weight = nn.Parameter(_conv_init(self.conv_dim, config.conv_width, **kwargs))
        self.A_log, self.dt_bias = _decay_parameters(self.value_heads, device)
        self.norm = RMSNorm(self.value_dim, config.norm_eps, **kwargs)
        self.out_proj = nn.Linear(self.values, config.hidden_size, bias=False, **kwargs)

    def project(self, x):
        """x `[B,T,hidden]` -> raw conv input `[B,T,conv_dim]`, z `[B,T,HV,V]`, raw a and b `[B,T,HV]`: views."""
        sizes = [self.conv_dim, self.values, self.value_heads, self.value_heads]
        qkv, z, a, b = self.in_proj(x).split(sizes, -1)
        return qkv, z.unflatten(-1, (self.value_heads, self.value_dim)), a, b

    @property
    def gate_parameters(self):
        return self.A_log, self.dt_bias

    def decays(self, a, b):
        """Raw a, b `[B,T,HV]` -> log decay `g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`."""
        step = F.softplus(_wide(a) + self.dt_bias, threshold=20.0)
        return -_wide(self.A_log).exp() * step, _wide(b).sigmoid()

    def output(self, o, z):
        """o and z `[B,T,HV,V]` -> `[B,T,hidden]`: norm per head, gate, projection."""
        gated = self.norm(o.to(z.dtype)) * F.silu(z)
        return self.out_proj(gated.flatten(-2).to(self.out_proj.weight.dtype))


class KDAMixer(DeltaMixer):
    """Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025): the delta rule with a decay for each key channel.

    Parameters have the names and shapes of the public Kimi-Linear checkpoints: three projections with a convolution
    each, the decay and the output's gate through rank head_dim (f_a_proj, f_b_proj; g_a_proj, g_b_proj).
    """

    scan = staticmethod(kda_scan)

    def __init__(self, config: HybridConfig, device=None, dtype=None):
        super().__init__()
        self.key_heads = self.value_heads = heads = config.kda_heads
        self.key_dim = self.value_dim = dim = config.kda_head_dim
        kwargs = {"bias": False, "device": device, "dtype": dtype}
        hidden, inner = config.hidden_size, heads * dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, inner, **kwargs) for _ in "qkv")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.Conv1d(inner, inner, config.conv_width, groups=inner, **kwargs) for _ in "qkv")
        self.f_a_proj, self.g_a_proj = (nn.Linear(hidden, dim, **kwargs) for _ in "fg")
        self.f_b_proj, self.g_b_proj = (nn.Linear(dim, inner, **kwargs) for _ in "fg")
        self.b_proj = nn.Linear(hidden, heads, **kwargs)
        a_log, _ = _decay_parameters(heads, device)
        self.A_log = nn.Parameter(a_log.detach().view(1, 1, heads, 1))
        _, self.dt_bias = _decay_parameters(inner, device)
        self.o_norm = RMSNorm(dim, config.norm_eps, device, dtype)
        self.o_proj = nn.Linear(inner, hidden, **kwargs)

    @property
    def conv_weight(self):
        return torch.cat([conv.weight[:, 0] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    @property
    def gate_parameters(self):
        return self.A_log.flatten(), self.dt_bias.view(self.value_heads, self.key_dim)

    def project(self, x):
        """x `[B,T,hidden]` -> raw conv input `[B,T,3 H K]`, z `[B,T,H,V]`, raw a `[B,T,H,K]`, raw b `[B,T,H]`."""
        by_head = (self.value_heads, self.value_dim)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        a, z = self.f_b_proj(self.f_a_proj(x)), self.g_b_proj(self.g_a_proj(x))
        return qkv, z.unflatten(-1, by_head), a.unflatten(-1, by_head), self.b_proj(x)

    def decays(self, a, b):
        """Raw a `[B,T,H,K]`, b `[B,T,H]` -> log decay `g = -exp(A_log) softplus(a + dt_bias)` and `sigmoid(b)`."""
        a_log, bias = self.gate_parameters
        step = F.softplus(_wide(a) + bias, threshold=20.0)
        return -_wide(a_log).exp()[:, None] * step, _wide(b).sigmoid()

    def output(self, o, z):
        """o and z `[B,T,H,V]` -> `[B,T,hidden]`: norm per head, sigmoid gate, projection."""
        gated = self.o_norm(o.to(z.dtype)) * z.sigmoid()
        return self.o_proj(gated.flatten(-2).to(self.o_proj.weight.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention with RoPE; with `window`, a token sees the last `window` ones, itself included."""

    def __init__(self, config: HybridConfig, window: int | None, device=None, dtype=None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.window, self.scale = window, config.head_dim**-0.5
        kwargs = {"bias": False, "device": device, "dtype": dtype}
        self.in_proj = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, **kwargs)
        self.out_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, **kwargs)

    def project(self, x, rope):
        """x `[B,T,hidden]`, rope from `rope_rows` -> rotated q `[B,T,heads,D]`, rotated k and v `[B,T,kv_heads,D]`."""
        rows = self.in_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], -2)
        return rotate(q, rope), rotate(k, rope), v

    def core(self, q, k, v):
        """q `[B,T,heads,D]` over k, v `[B,T,kv_heads,D]` of the same T tokens -> `[B,T,heads,D]`."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        # written out, for the fast kernels take a mask only without enable_gqa
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        if self.window is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
            seen = seen.triu(1 - self.window)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        return out.transpose(1, 2)

    def output(self, out):
        """out `[B,T,heads,D]` -> `[B,T,hidden]`."""
        return self.out_proj(out.flatten(-2))

    def forward(self, x, rope):
        """The whole sequence from its first token: x `[B,T,hidden]` -> `[B,T,hidden]`."""
        return self.output(self.core(*self.project(x, rope)))


def causal_conv(x, weight, bias=None, history=None):
    """Depthwise causal convolution: `y_t = bias + sum_j weight[:, j] x_{t - width + 1 + j}`, inputs before 0 are zero.

    x `[B,T,D]`, weight `[D,width]`, bias `[D]` or None, history `[B,width-1,D]` or None: the inputs before x, oldest
    first. Returns `[B,T,D]` in the dtype of x. A sum of shifted products, which Inductor fuses into one pass.
    """
    width = weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0)) if history is None else torch.cat([history.to(x.dtype), x], 1)
    total = sum(padded[:, j : j + x.shape[1]] * weight[:, j] for j in range(width))
    return (total if bias is None else total + bias).to(x.dtype)


def l2_normalise(x):
    """`x * rsqrt(sum x^2 + 1e-6)` over the last dimension, in float32 (float64 for float64 input)."""
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def rope_table(config: HybridConfig, device=None):
    """float32 `[max_position, head_dim]`: cosines of the `head_dim / 2` angles of each position, then their sines.

    Angle i of position p is `p * rope_theta ** (-2 i / head_dim)` (RoFormer, Su et al. 2021), worked out in float64
    because a float32 product would be off by its last bits times p.
    """
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float64)
    angles = torch.arange(config.max_position, dtype=torch.float64)[:, None] * config.rope_theta ** (
        -2 * pairs / config.head_dim
    )
    return torch.cat([angles.cos(), angles.sin()], -1).to(device=device, dtype=torch.float32)


def rope_rows(table, positions):
    """The `(cos, sin)` pair that `rotate` takes, each `positions.shape + [1, head_dim/2]`, broadcast over heads."""
    return table[positions].unsqueeze(-2).chunk(2, -1)


def rotate(x, rope):
    """RoPE on x `[..., heads, D]`: element i pairs with element i + D/2. Computed in float32, returned as x's dtype."""
    cos, sin = rope
    first, second = _wide(x).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _full_precision(tensor):
    """Keeps an enclosing autocast away from the products of a scan, whose sums run over the whole sequence."""
    if torch.is_autocast_enabled(tensor.device.type):
        return torch.autocast(tensor.device.type, enabled=False)
    return contextlib.nullcontext()


def _conv_init(channels, width, device=None, dtype=None):
    return torch.empty(channels, width, device=device, dtype=dtype).uniform_(-(width**-0.5), width**-0.5)


def _decay_parameters(heads, device):
    """A_log and dt_bias `[heads]`, float32 whatever the model's dtype: rounding a decay compounds over tokens.

    The ranges of Mamba-2: A uniform in 1..16, dt log-uniform in 1e-3..1e-1, its bias the inverse of softplus.
    """
    a_log = torch.empty(heads, dtype=torch.float32, device=device).uniform_(1, 16).log()
    dt = torch.empty(heads, dtype=torch.float32, device=device).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(a_log), nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
