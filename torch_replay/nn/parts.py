"""What the layers share: how they are called, their norms, their initial decays."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..states.replay_cache import ReplayCache, Step


class Recurrent(nn.Module):
    """A layer that reads its past from a cache. `forward(x [B, T, hidden], step, layer) -> [B, T, hidden]`.

    `step` is one step of a `ReplayCache` that the layer's `cache` made (of L such layers), over a prompt or of decode;
    the caller commits it once all layers have run. `prefill` and `decode` begin a step themselves, for a model of one
    layer. Inference only: parameters require a gradient, so call under `torch.no_grad()`.
    """

    def prefill(self, x: Tensor, cache: ReplayCache, slots: Tensor, query_lens=None, continues=None) -> Tensor:
        """x [B, T, hidden] of prompts; query_lens [B], None: T. See `ReplayCache.prefill`. Commit afterwards."""
        return self(x, cache.prefill(slots, x.shape[1] if query_lens is None else query_lens, continues))

    def decode(self, x: Tensor, cache: ReplayCache, slots: Tensor, query_lens=None) -> Tensor:
        """x [B, T, hidden] of a decode step. See `ReplayCache.decode`. Commit afterwards."""
        return self(x, cache.decode(slots, x.shape[1] if query_lens is None else query_lens))

    def forward(self, x: Tensor, step: Step, layer: int = 0) -> Tensor:
        raise NotImplementedError


class GatedRMSNorm(nn.Module):
    """`weight * rms_normalised(x)` over the last dimension and a gate of x's shape, in float32.

    before: the gate multiplies x (Mamba-2), instead of what comes out. activation: of the gate.
    """

    def __init__(self, size: int, eps: float, before: bool = False, activation=F.silu, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.eps, self.before, self.activation, self.groups = eps, before, activation, groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide, gate = x.float(), self.activation(gate.float())
        if self.before:
            wide = wide * gate
        grouped = wide.unflatten(-1, (self.groups, -1))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        y = grouped.flatten(-2) * self.weight.float()
        return (y if self.before else y * gate).to(x.dtype)


def short_conv(channels: int, width: int, bias: bool = False) -> nn.Conv1d:
    """Holds weight [channels, 1, width] under the public name; the cache's convolution computes with it."""
    return nn.Conv1d(channels, channels, width, groups=channels, bias=bias)


def decay_rate(*shape: int) -> nn.Parameter:
    """A_log, A uniform in 1..16."""
    return nn.Parameter(torch.empty(shape, dtype=torch.float32).uniform_(1, 16).log())


def step_bias(size: int) -> nn.Parameter:
    """dt_bias [size], steps log-uniform in 1e-3..1e-1 behind a softplus."""
    dt = torch.empty(size, dtype=torch.float32).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
