"""What the memory of state-space layers is made for: families, sizes of a layer, cache groups.

Mamba-1 layers (Jamba, FalconMamba) are no family yet. This is what one would take. Their step is that of Mamba-2 with a
head for each channel (H = D, P = 1) and an A of [D, N]: S[d, n] <- exp(dt_d A[d, n]) S[d, n] + dt_d x_d B_n. State, the
rings of x, B and dt, cursors, commit, reset, copies, export and the convolution serve as they are, and so do the norms
that these models put on dt, B and C, which come before the op. New would be `mamba1_replay`, `mamba1_update`,
`mamba1_prefill` and `mamba1_materialize` with that A ([L, D, N] in `postprocess`): between two tokens a channel's decay
is a vector over N, exp(A[d] (t_i - t_j)) with running sums t of dt, so that a row of the ring weighs no single number
and the products over rows are KDA's, not Mamba-2's. It would buy less: a channel has N = 16 numbers of state and a
ring row two (x and dt), so that a step that reads W / 2 = 8 rows reads as much as it saves. A window of 4 is about the
best: 16 numbers of state, 4 of the ring, and 4 for the flush every fourth step, in place of 16 read and 16 written.
"""

import math
from dataclasses import dataclass, fields

import torch

from ..ops.check import EIGHT_BIT

FAMILIES = ("mamba2", "gdn", "kda")
MODES = ("none", "align")
RING_NAMES = {"mamba2": ("x", "B", "dt"), "gdn": ("u", "k", "g"), "kda": ("u", "k", "g")}


@dataclass(frozen=True)
class StateLayer:
    """One state-space layer as its memory sees it. Mamba-2 sizes, those of the delta rule (GDN, KDA) in parentheses."""

    name: str
    family: str
    heads: int  # H (HV)
    groups: int  # Gr (H, the key heads)
    head_dim: int  # P (V)
    state_dim: int  # N (K)
    conv_dim: int  # channels of the short convolution
    conv_width: int = 4
    window: int = 16  # W
    ring_len: int = 32  # R
    max_tokens: int = 1  # T
    state_dtype: torch.dtype = torch.float32
    ring_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.float32
    A_dtype: torch.dtype = torch.float32
    philox_rounds: int = 0  # above 0, checkpoints round stochastically when they are rewritten

    @property
    def conv_len(self) -> int:
        """Columns of the conv ring: the inputs that a convolution still reads, and the tokens of one step."""
        return self.conv_width - 1 + self.max_tokens

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """What the ring keeps of one token's decay: a number a head, with KDA one for each key channel of a head."""
        return (self.heads, self.state_dim) if self.family == "kda" else (self.heads,)

    def state_bytes(self) -> int:
        """Bytes of one checkpoint, the float32 row scales of an 8-bit one included."""
        scale = 4 if self.state_dtype in EIGHT_BIT else 0
        return self.heads * self.head_dim * (self.state_dim * self.state_dtype.itemsize + scale)

    def ring_row_bytes(self) -> int:
        """Bytes of one token in the ring, its float32 decay included."""
        values = self.heads * self.head_dim + self.groups * self.state_dim
        return values * self.ring_dtype.itemsize + 4 * math.prod(self.decay_shape)


@dataclass(frozen=True)
class StateGroup:
    """A cache group: layers that share block tables and trackers. `block_size` spaces the snapshots of mode align."""

    name: str
    layers: tuple[StateLayer, ...]
    block_size: int = 16
    mode: str = "none"


def check_groups(groups: list[StateGroup]) -> None:
    if not groups or any(not group.layers for group in groups):
        raise ValueError("groups is empty or holds a group without layers, expected at least one layer in each")
    first = groups[0]
    reference = first.layers[0]
    for group in groups:
        if group.mode not in MODES:
            raise ValueError(f"group {group.name}: mode is {group.mode!r}, expected one of {', '.join(MODES)}")
        for name in ("block_size", "mode"):
            if getattr(group, name) != getattr(first, name):
                raise ValueError(f"group {group.name}: {name} is {getattr(group, name)}, expected "
                                 f"{getattr(first, name)} as in group {first.name}")
        for layer in group.layers:
            _check_layer(layer, reference)


def _check_layer(layer: StateLayer, reference: StateLayer) -> None:
    if layer.family not in FAMILIES:
        raise ValueError(f"layer {layer.name}: family is {layer.family!r}, expected one of {', '.join(FAMILIES)}")
    for field in fields(StateLayer):
        got, want = getattr(layer, field.name), getattr(reference, field.name)
        if field.name != "name" and got != want:
            raise ValueError(f"layer {layer.name}: {field.name} is {got}, expected {want} as in layer {reference.name}")
    if not 1 <= layer.max_tokens <= layer.window:
        raise ValueError(f"layer {layer.name}: max_tokens is {layer.max_tokens}, expected 1 to window {layer.window}")
    if layer.ring_len < layer.window + layer.max_tokens:
        raise ValueError(f"layer {layer.name}: ring_len is {layer.ring_len}, expected at least window + max_tokens = "
                         f"{layer.window + layer.max_tokens}")
