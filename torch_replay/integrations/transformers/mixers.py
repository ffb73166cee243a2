"""The recurrent layers ("mixers") of transformers' models, computed by this library's ops over a `ReplayCache`.

A family is what the layers of several models have in common: one function that computes a layer from its own
parameters, and the sizes of the memory it needs. Norms and projections are the layer's own modules, called as they are.
"""

from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from ...states.replay_cache import ReplayCache, Step

SILU = ("silu", "swish")  # names of the one activation that the convolution ops have


@dataclass(frozen=True)
class Family:
    """name: of the ops. sizes(mixer): arguments of `ReplayCache.for_<name>`. compute(mixer, hidden [B, T, width], mask
    [B, T] or None, step, layer, match): the layer's output [B, T, width]; `step` may be over a prompt or of decode."""

    name: str
    sizes: Callable[[nn.Module], dict[str, int]]
    compute: Callable[..., Tensor]
    needs: tuple[str, ...]  # attributes without which a layer of that name is not the one known here

    def memory(self, mixer: nn.Module, layers: int, slots: int, window: int, tokens: int,
               **options: Any) -> ReplayCache:
        make = getattr(ReplayCache, f"for_{self.name}")
        return make(layers, slots, window, tokens, conv_width=mixer.conv_kernel_size, **self.sizes(mixer), **options)


def masked(values: Tensor, mask: Optional[Tensor]) -> Tensor:
    """values [B, T, ..], zero where the mask [B, T] is: tokens of padding before a prompt leave the state at zero."""
    return values if mask is None else (values * mask[:, :, None]).to(values.dtype)


# Mamba-2


def _mamba2_sizes(mixer) -> dict[str, int]:
    return dict(heads=mixer.num_heads, head_dim=mixer.head_dim, state_dim=mixer.ssm_state_size, groups=mixer.n_groups)


def _limits(mixer, step: Step, match: Optional[str]) -> dict[str, Optional[float]]:
    """Bounds of dt. transformers applies them to prompts only, and some of its layers set others than their config."""
    limit = mixer.time_step_limit
    if match == "transformers":
        limit = limit if step.prefill else None
    elif (config := getattr(mixer, "config", None)) is not None:
        limit = getattr(config, "time_step_limit", limit)
    low, high = (0.0, None) if limit is None else limit
    return dict(dt_min=float(low), dt_max=None if high is None or high == float("inf") else float(high))


def _mamba2_core(mixer, projected: Tensor, mask, step: Step, layer: int, match, gated: bool) -> tuple[Tensor, Tensor]:
    """projected [B, T, gate | conv | dt] -> y [B, T, inner] and the gate; `gated`: y is multiplied by its silu."""
    inner, shared = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    gate, mixed, dt = projected.split([inner, mixer.conv_dim, mixer.num_heads], -1)
    # the convolution's bias makes something of padding
    mixed = masked(step.conv(layer, mixed, mixer.conv1d.weight[:, 0], mixer.conv1d.bias), mask)
    x, B, C = mixed.split([inner, shared, shared], -1)
    x = x.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    B, C = (t.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)) for t in (B, C))
    z = gate.unflatten(-1, (mixer.num_heads, mixer.head_dim)) if gated else None
    y = step(layer, x, dt, -mixer.A_log.float().exp(), B, C, mixer.D, z, mixer.dt_bias, **_limits(mixer, step, match))
    return y.flatten(-2), gate


def _mamba2(mixer, hidden: Tensor, mask, step: Step, layer: int, match) -> Tensor:
    y, gate = _mamba2_core(mixer, mixer.in_proj(masked(hidden, mask)), mask, step, layer, match, gated=False)
    return mixer.out_proj(mixer.norm(y, gate).to(hidden.dtype))


def _falcon_h1(mixer, hidden: Tensor, mask, step: Step, layer: int, match) -> Tensor:
    """Factors around the projection; the norm may be absent, and then only the gate is left of it."""
    projected = mixer.in_proj(masked(hidden, mask) * mixer.ssm_in_multiplier) * mixer.mup_vector
    y, gate = _mamba2_core(mixer, projected, mask, step, layer, match, gated=not mixer.mamba_rms_norm)
    if mixer.mamba_rms_norm:
        y = mixer.norm(y, gate)
    return mixer.out_proj(y.to(hidden.dtype))


# the gated delta rule


def _gdn_sizes(mixer) -> dict[str, int]:
    return dict(heads=mixer.num_v_heads, value_dim=mixer.head_v_dim, key_dim=mixer.head_k_dim,
                key_heads=mixer.num_k_heads)


def _gdn_qkv(mixer, qkv: Tensor, step: Step, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, T, q | k | v] through the short convolution, by heads."""
    mixed = step.conv(layer, qkv, mixer.conv1d.weight[:, 0], mixer.conv1d.bias)
    q, k, v = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    q, k = (t.unflatten(-1, (mixer.num_k_heads, mixer.head_k_dim)) for t in (q, k))
    return q, k, v.unflatten(-1, (mixer.num_v_heads, mixer.head_v_dim))


def _by_value_head(norm: nn.Module, o: Tensor, z: Tensor) -> Tensor:
    """norm of o [B, T, HV, V] with the gate z, whose rows are heads; [B, T, HV V]."""
    rows = norm(o.reshape(-1, o.shape[-1]), z.reshape(-1, o.shape[-1]))
    return rows.view(o.shape).flatten(-2)


def _qwen3_next(mixer, hidden: Tensor, mask, step: Step, layer: int, match) -> Tensor:
    hidden = masked(hidden, mask)
    *qkv, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden))
    qkv = _gdn_qkv(mixer, torch.cat([t.flatten(2) for t in qkv], -1), step, layer)
    o = step(layer, *qkv, a, b, mixer.A_log, mixer.dt_bias)
    return mixer.out_proj(_by_value_head(mixer.norm, o, z))


def _qwen3_5(mixer, hidden: Tensor, mask, step: Step, layer: int, match) -> Tensor:
    hidden = masked(hidden, mask)
    qkv = _gdn_qkv(mixer, mixer.in_proj_qkv(hidden), step, layer)
    o = step(layer, *qkv, mixer.in_proj_a(hidden), mixer.in_proj_b(hidden), mixer.A_log, mixer.dt_bias)
    return mixer.out_proj(_by_value_head(mixer.norm, o, mixer.in_proj_z(hidden)))


def _olmo_hybrid(mixer, hidden: Tensor, mask, step: Step, layer: int, match) -> Tensor:
    """The delta rule, whose beta may run to 2.

    With keys and values times sqrt(2), S <- e^g S (1 - beta k k^T) + beta v k^T is the same rule with twice the beta,
    and with the same state S. Keys must then come normalised, in float32, that the factor is not rounded.
    """
    hidden = masked(hidden, mask)
    qkv = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], -1)
    q, k, v = _gdn_qkv(mixer, qkv, step, layer)
    l2norm = not mixer.allow_neg_eigval
    if not l2norm:
        q, k, v = (t.float() for t in (q, k, v))
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        k, v = k * 2**0.5, v * 2**0.5
    o = step(layer, q, k, v, mixer.a_proj(hidden), mixer.b_proj(hidden), mixer.A_log, mixer.dt_bias, l2norm=l2norm)
    return mixer.o_proj(_by_value_head(mixer.o_norm, o.to(hidden.dtype), mixer.g_proj(hidden)))


# Kimi delta attention


def _kda_sizes(mixer) -> dict[str, int]:
    return dict(heads=mixer.num_heads, value_dim=mixer.head_dim, key_dim=mixer.head_dim)


def _kimi(mixer, hidden: Tensor, mask, step: Step, layer: int, match) -> Tensor:
    hidden, by_head, decay = masked(hidden, mask), (mixer.num_heads, mixer.head_dim), mixer.forget_gate
    qkv = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], -1)
    mixed = step.conv(layer, qkv, mixer.conv1d.weight[:, 0], mixer.conv1d.bias)
    q, k, v = (t.unflatten(-1, by_head) for t in mixed.chunk(3, -1))
    a = decay.f_b_proj(decay.f_a_proj(hidden)).unflatten(-1, by_head)
    o = step(layer, q, k, v, a, mixer.b_proj(hidden), decay.A_log.flatten(), decay.dt_bias.unflatten(0, by_head))
    gate = mixer.g_b_proj(mixer.g_a_proj(hidden)).unflatten(-1, by_head)
    return mixer.o_proj(mixer.o_norm(o, gate).flatten(-2))


_MAMBA2 = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj", "num_heads", "head_dim", "n_groups",
           "ssm_state_size", "intermediate_size", "conv_dim", "time_step_limit")
_GDN = ("conv1d", "dt_bias", "A_log", "num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim", "key_dim", "value_dim")
_PLAIN = Family("mamba2", _mamba2_sizes, _mamba2, _MAMBA2)
_QWEN3_5 = Family("gdn", _gdn_sizes, _qwen3_5, (*_GDN, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "norm"))

FAMILIES = {  # by the name of the layer's class
    "Mamba2Mixer": _PLAIN,
    "BambaMixer": _PLAIN,
    "NemotronHMamba2Mixer": _PLAIN,
    "GraniteMoeHybridMambaLayer": _PLAIN,
    "Zamba2MambaMixer": _PLAIN,
    "FalconH1Mixer": Family("mamba2", _mamba2_sizes, _falcon_h1, (*_MAMBA2, "mup_vector", "ssm_in_multiplier",
                                                                 "mamba_rms_norm")),
    "Qwen3NextGatedDeltaNet": Family("gdn", _gdn_sizes, _qwen3_next, (*_GDN, "in_proj_qkvz", "in_proj_ba", "norm",
                                                                     "fix_query_key_value_ordering")),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "OlmoHybridGatedDeltaNet": Family("gdn", _gdn_sizes, _olmo_hybrid, (*_GDN, "q_proj", "a_proj", "g_proj", "o_norm",
                                                                       "allow_neg_eigval")),
    "KimiLinearDeltaAttention": Family("kda", _kda_sizes, _kimi, ("conv1d", "forget_gate", "q_proj", "b_proj",
                                                                 "g_a_proj", "g_b_proj", "o_norm", "head_dim")),
}
