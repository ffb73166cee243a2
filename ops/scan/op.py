"""The chunked scans of the recurrences as ops, for the prefill of prompts: one call runs many tokens.

The scans loop over chunks and branch on the number of tokens. Behind an op they are opaque to the compiler, so that one
graph serves every number of tokens. Training calls the differentiable functions in `naive` themselves.

Sizes: B rows, T tokens a row, H heads, P head dim, N state dim, Gr groups of B and C (head h reads group
h // (H / Gr)). Of the delta rule: H key heads, HV value heads (which read key head h // (HV / H)), K and V key and
value dims.
"""

from typing import Optional

import torch
from torch import Tensor

from .. import check
from ..check import FLOAT, INDEX, Shapes, require
from ..registry import register
from . import naive

WIDE = (*FLOAT, torch.float64)


def _states(values: Tensor, edges: Optional[Tensor], state_shape: tuple) -> tuple[Tensor, Tensor]:
    """The final state and those at the edges."""
    count = 0 if edges is None else edges.shape[1]
    shapes = state_shape, (state_shape[0], count, *state_shape[1:])
    return tuple(values.new_empty(shape, dtype=naive.work_dtype(values)) for shape in shapes)


def _edges_values(op: str, edges: Optional[Tensor], tokens: int) -> None:
    if edges is not None:
        check.require_range(op, "edges", edges, 0, tokens)


def _ssd_values(x, dt, A, B, C, initial_state=None, edges=None) -> None:
    check.require_negative_rates("ssd_prefill", A)
    check.require_none("ssd_prefill", "dt", dt, dt < 0, "processed steps, 0 or more (mamba2_prefill takes raw dt)")
    _edges_values("ssd_prefill", edges, x.shape[1])


@register(cpu=naive.ssd_prefill, check_values=_ssd_values)
def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Optional[Tensor] = None,
    edges: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The Mamba-2 recurrence over T tokens, see `naive.ssd_scan`.

    Args:
        x: [B, T, H, P]. dt: [B, T, H], processed, at least 0; a token of 0 changes no state. A: [H], negative.
        B, C: [B, T, Gr, N]. Any float dtype, any strides; finite also where dt is 0.
        initial_state: [B, H, P, N], None: zero.
        edges: [B, E], int32 or int64 in [0, T], tokens of a row after which its state is wanted as well; 0 is the
            initial state. None: none.

    Returns:
        y: [B, T, H, P] in x's dtype, without skip and gate. final_state: [B, H, P, N] and edge_states: [B, E, H, P, N]
        (E = 0 without edges) float32, or float64 if x is.

    Raises:
        ValueError: shapes and dtypes, T = 0; on a CPU also edges out of range, and raw values in place of processed
            ones: A not below 0, dt below 0.
    """
    shapes = Shapes("ssd_prefill")
    shapes("x", x, "B T H P", WIDE)
    shapes("dt", dt, "B T H", WIDE)
    shapes("A", A, "H", WIDE)
    shapes("B", B, "B T Gr N", WIDE)
    shapes("C", C, "B T Gr N", WIDE)
    shapes("initial_state", initial_state, "B H P N", WIDE)
    shapes("edges", edges, "B E", INDEX)
    require(shapes.T >= 1, shapes.op, "x", f"of {shapes.T} tokens a row", "1 or more")
    require(shapes.H % shapes.Gr == 0, shapes.op, "B", f"of {shapes.Gr} groups", f"a divisor of {shapes.H} heads")
    return x.new_empty(x.shape), *_states(x, edges, (shapes.B, shapes.H, shapes.P, shapes.N))


def _delta_values(q, k, v, g, beta, initial_state=None, edges=None) -> None:
    op, raw = "delta_prefill", "(gdn_prefill takes raw a and b, and normalises)"
    check.require_none(op, "g", g, g > 0, f"log decays, at most 0 {raw}")
    check.require_none(op, "beta", beta, (beta < 0) | (beta > 2), f"steps in [0, 2] {raw}")
    norm = k.float().norm(dim=-1)
    check.require_none(op, "k's norm", norm, norm > 1.02, f"at most 1, up to rounding to 16 bits {raw}")
    _edges_values(op, edges, v.shape[1])


@register(cpu=naive.delta_prefill, check_values=_delta_values)
def delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Optional[Tensor] = None,
    edges: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gated delta rule over T tokens, see `naive.delta_scan`, or with a decay by channel `naive.kda_scan`.

    Args:
        q, k: [B, T, H, K], q scaled, k of unit length. v: [B, T, HV, V].
        g: log decay (at most 0), [B, T, HV], or by key channel [B, T, HV, K]. beta: [B, T, HV], step; a token whose g
            and beta are 0 changes no state. Any float dtype, any strides; all finite.
        initial_state: [B, HV, V, K], None: zero.
        edges: [B, E], int32 or int64 in [0, T], tokens of a row after which its state is wanted as well; 0 is the
            initial state. None: none.

    Returns:
        o: [B, T, HV, V] in v's dtype. final_state: [B, HV, V, K] and edge_states: [B, E, HV, V, K] (E = 0 without
        edges) float32, or float64 if v is.

    Raises:
        ValueError: shapes and dtypes, T = 0; on a CPU also edges out of range, and raw values in place of processed
            ones: g above 0, beta outside [0, 2], keys longer than 1.
    """
    shapes = Shapes("delta_prefill")
    shapes("q", q, "B T H K", WIDE)
    shapes("k", k, "B T H K", WIDE)
    shapes("v", v, "B T HV V", WIDE)
    shapes.require_tensor("g", g)
    shapes("g", g, "B T HV" if g.dim() == 3 else "B T HV K", WIDE)
    shapes("beta", beta, "B T HV", WIDE)
    shapes("initial_state", initial_state, "B HV V K", WIDE)
    shapes("edges", edges, "B E", INDEX)
    require(shapes.T >= 1, shapes.op, "v", f"of {shapes.T} tokens a row", "1 or more")
    require(shapes.HV % shapes.H == 0, shapes.op, "v", f"of {shapes.HV} heads", f"a multiple of {shapes.H} key heads")
    return v.new_empty(v.shape), *_states(v, edges, (shapes.B, shapes.HV, shapes.V, shapes.K))
