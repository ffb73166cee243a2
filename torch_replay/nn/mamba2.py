"""The Mamba-2 layer (Dao and Gu, "Transformers are SSMs", 2024) over a `ReplayCache`."""

from typing import Optional

import torch
from torch import Tensor, nn

from ..states.replay_cache import ReplayCache, Step
from .parts import GatedRMSNorm, Recurrent, decay_rate, short_conv, step_bias


class Mamba2Mixer(Recurrent):
    """in_proj -> short convolution over x, B, C -> recurrence -> gated norm -> out_proj.

    Parameters as in transformers' `Mamba2Mixer`: in_proj (z | x, B, C | dt), conv1d, A_log, dt_bias, D, norm, out_proj.
    hidden: model width. H heads of head_dim P, state_dim N, groups of B and C. time_step_limit: bounds of dt.
    norm_groups: parts that the norm takes by themselves, by default as many as groups.
    """

    def __init__(self, hidden: int, heads: int, head_dim: int, state_dim: int, groups: int = 1, conv_width: int = 4,
                 eps: float = 1e-5, use_bias: bool = False, use_conv_bias: bool = True,
                 time_step_limit: tuple[float, float] = (0.0, float("inf")), norm_groups: Optional[int] = None):
        super().__init__()
        self.sizes = dict(heads=heads, head_dim=head_dim, state_dim=state_dim, groups=groups)
        self.inner, self.shared, self.conv_width = heads * head_dim, groups * state_dim, conv_width
        self.limits = dict(dt_min=time_step_limit[0],
                           dt_max=None if time_step_limit[1] == float("inf") else time_step_limit[1])
        channels = self.inner + 2 * self.shared
        self.in_proj = nn.Linear(hidden, self.inner + channels + heads, bias=use_bias)
        self.conv1d = short_conv(channels, conv_width, use_conv_bias)
        self.A_log, self.dt_bias = decay_rate(heads), step_bias(heads)
        self.D = nn.Parameter(torch.ones(heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(self.inner, eps, before=True, groups=groups if norm_groups is None else norm_groups)
        self.out_proj = nn.Linear(self.inner, hidden, bias=use_bias)

    def cache(self, layers: int, slots: int, window: int = 16, tokens: int = 1, **options) -> ReplayCache:
        """A cache for `layers` layers like this one; arguments as in `ReplayCache.for_mamba2`."""
        options = {"dtype": self.in_proj.weight.dtype, "device": self.in_proj.weight.device} | options
        options |= self.sizes
        return ReplayCache.for_mamba2(layers, slots, window, tokens, conv_width=self.conv_width, **options)

    def forward(self, x: Tensor, step: Step, layer: int = 0) -> Tensor:
        z, mixed, dt = self.in_proj(x).split([self.inner, self.inner + 2 * self.shared, len(self.A_log)], -1)
        mixed = step.conv(layer, mixed, self.conv1d.weight[:, 0], self.conv1d.bias)
        x, B, C = mixed.split([self.inner, self.shared, self.shared], -1)
        x = x.unflatten(-1, (len(self.A_log), -1))
        B, C = (t.unflatten(-1, (self.sizes["groups"], -1)) for t in (B, C))
        y = step(layer, x, dt, -self.A_log.float().exp(), B, C, self.D, None, self.dt_bias, **self.limits)
        return self.out_proj(self.norm(y.flatten(-2), z))
