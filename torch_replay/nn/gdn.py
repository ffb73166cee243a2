"""The Gated DeltaNet layer (Yang, Kautz and Hatamizadeh, 2024), as Qwen3-Next has it, over a `ReplayCache`."""

import torch
from torch import Tensor, nn

from ..states.replay_cache import ReplayCache, Step
from .parts import GatedRMSNorm, Recurrent, decay_rate, short_conv


class GatedDeltaNet(Recurrent):
    """in_proj -> short convolution over q, k, v -> gated delta rule -> norm and gate by head -> out_proj.

    Parameters as in transformers' `Qwen3NextGatedDeltaNet`: in_proj_qkvz and in_proj_ba, whose outputs go by key head
    (q, k, then v and z of its value heads; b, then a), conv1d (q | k | v), dt_bias, A_log, norm, out_proj.
    hidden: model width. HV heads of value_dim V, key_heads H of key_dim K.
    """

    def __init__(self, hidden: int, heads: int, value_dim: int, key_dim: int, key_heads: int, conv_width: int = 4,
                 eps: float = 1e-6):
        super().__init__()
        self.sizes = dict(heads=heads, value_dim=value_dim, key_dim=key_dim, key_heads=key_heads)
        self.conv_width, ratio = conv_width, heads // key_heads
        self.by_head = [key_dim, key_dim, ratio * value_dim, ratio * value_dim]
        self.keys, self.values = key_heads * key_dim, heads * value_dim
        self.in_proj_qkvz = nn.Linear(hidden, 2 * self.keys + 2 * self.values, bias=False)
        self.in_proj_ba = nn.Linear(hidden, 2 * heads, bias=False)
        self.conv1d = short_conv(2 * self.keys + self.values, conv_width)
        self.dt_bias, self.A_log = nn.Parameter(torch.ones(heads, dtype=torch.float32)), decay_rate(heads)
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = nn.Linear(self.values, hidden, bias=False)

    def cache(self, layers: int, slots: int, window: int = 16, tokens: int = 1, **options) -> ReplayCache:
        """A cache for `layers` layers like this one; arguments as in `ReplayCache.for_gdn`."""
        options = {"dtype": self.out_proj.weight.dtype, "device": self.out_proj.weight.device} | options
        return ReplayCache.for_gdn(layers, slots, window, tokens, conv_width=self.conv_width, **self.sizes, **options)

    def forward(self, x: Tensor, step: Step, layer: int = 0) -> Tensor:
        key_heads = self.sizes["key_heads"]
        by_head = self.in_proj_qkvz(x).unflatten(-1, (key_heads, -1)).split(self.by_head, -1)
        b, a = (t.flatten(-2) for t in self.in_proj_ba(x).unflatten(-1, (key_heads, -1)).chunk(2, -1))
        *qkv, z = (t.flatten(-2) for t in by_head)
        mixed = step.conv(layer, torch.cat(qkv, -1), self.conv1d.weight[:, 0])
        q, k, v = mixed.split([self.keys, self.keys, self.values], -1)
        q, k = (t.unflatten(-1, (key_heads, -1)) for t in (q, k))
        v, z = (t.unflatten(-1, (self.sizes["heads"], -1)) for t in (v, z))
        o = step(layer, q, k, v, a, b, self.A_log, self.dt_bias)
        return self.out_proj(self.norm(o, z).flatten(-2))
