"""The Kimi Delta Attention layer (Kimi Team, "Kimi Linear", 2025) over a `ReplayCache`."""

import torch
from torch import Tensor, nn

from ..states.replay_cache import ReplayCache, Step
from .parts import GatedRMSNorm, Recurrent, decay_rate, short_conv, step_bias


class KimiDeltaAttention(Recurrent):
    """Projections and short convolutions of q, k, v -> delta rule with a decay by channel -> norm, gate -> o_proj.

    Parameters as in the public Kimi-Linear checkpoints: q_proj, k_proj, v_proj, q_conv1d, k_conv1d, v_conv1d, f_a_proj
    and f_b_proj (the decay, through rank head_dim), b_proj, A_log [1, 1, heads, 1], dt_bias [heads * head_dim],
    g_a_proj and g_b_proj (the gate, a sigmoid), o_norm, o_proj. hidden: model width. heads of head_dim, which keys and
    values share.
    """

    def __init__(self, hidden: int, heads: int, head_dim: int, conv_width: int = 4, eps: float = 1e-5):
        super().__init__()
        self.heads, self.head_dim, self.conv_width = heads, head_dim, conv_width
        inner = heads * head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, inner, bias=False) for _ in "qkv")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (short_conv(inner, conv_width) for _ in "qkv")
        self.f_a_proj, self.g_a_proj = (nn.Linear(hidden, head_dim, bias=False) for _ in "fg")
        self.f_b_proj, self.g_b_proj = (nn.Linear(head_dim, inner, bias=False) for _ in "fg")
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.A_log, self.dt_bias = decay_rate(1, 1, heads, 1), step_bias(inner)
        self.o_norm = GatedRMSNorm(head_dim, eps, activation=torch.sigmoid)
        self.o_proj = nn.Linear(inner, hidden, bias=False)

    def cache(self, layers: int, slots: int, window: int = 16, tokens: int = 1, **options) -> ReplayCache:
        """A cache for `layers` layers like this one; arguments as in `ReplayCache.for_kda`."""
        options = {"dtype": self.o_proj.weight.dtype, "device": self.o_proj.weight.device} | options
        return ReplayCache.for_kda(layers, slots, window, tokens, heads=self.heads, value_dim=self.head_dim,
                                   key_dim=self.head_dim, conv_width=self.conv_width, **options)

    def forward(self, x: Tensor, step: Step, layer: int = 0) -> Tensor:
        by_head = (self.heads, self.head_dim)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        weight = torch.cat([conv.weight[:, 0] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        q, k, v = (t.unflatten(-1, by_head) for t in step.conv(layer, qkv, weight).chunk(3, -1))
        a = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, by_head)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, by_head)
        o = step(layer, q, k, v, a, self.b_proj(x), self.A_log.flatten(), self.dt_bias.unflatten(0, by_head))
        return self.o_proj(self.o_norm(o, gate).flatten(-2))
