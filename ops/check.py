"""Argument checks that every op body uses. Each failure names the op, the argument, what came and what was expected."""

from typing import Iterable, NoReturn, Optional

import torch
from torch import Tensor

from .layers import Layers, dtype_of, shape_of

INDEX = (torch.int32, torch.int64)
FLOAT = (torch.float32, torch.bfloat16, torch.float16)
I32 = (torch.int32,)
F32 = (torch.float32,)
EIGHT_BIT = (torch.float8_e4m3fn, torch.int8)
FEW = 4096  # values that Python looks through sooner than torch starts

OPTIONAL: dict[str, set[str]] = {}  # by op: the tensor arguments that may be None. Schemas let None pass for any tensor


def fail(op: str, argument: str, got, expected) -> NoReturn:
    raise ValueError(f"{op}: {argument} is {got}, expected {expected}")


def require(condition: bool, op: str, argument: str, got, expected) -> None:
    if not condition:
        fail(op, argument, got, expected)


class Shapes:
    """Binds letters to sizes while shapes are checked against each other.

    `shapes("x", x, "B T H P")` records or compares B, T, H and P; a digit stands for itself. None passes for an
    optional argument. All tensors must share the first one's device. Sizes are then attributes: `shapes.B`. A list of
    layers is checked as if it were stacked.
    """

    def __init__(self, op: str):
        self.op = op
        self.sizes: dict[str, int] = {}
        self.device: Optional[torch.device] = None

    def __call__(self, argument: str, tensor: Optional[Layers], letters: str, dtypes: Iterable[torch.dtype]) -> None:
        if tensor is None and argument in OPTIONAL[self.op]:
            return
        if isinstance(tensor, (list, tuple)):
            self.equal_layers(argument, tensor)
            layer, inner = letters.split(maxsplit=1)
            count = self.sizes.setdefault(layer, len(tensor))
            require(len(tensor) == count, self.op, argument, f"a list of {len(tensor)}", f"{count} layers")
            argument, tensor, letters = f"{argument}[0]", tensor[0], inner
        self.require_tensor(argument, tensor)
        names = letters.split()
        if tensor.dim() != len(names):
            fail(self.op, argument, f"of shape {tuple(tensor.shape)}", f"[{', '.join(names)}]")
        for name, size in zip(names, tensor.shape):
            want = int(name) if name.isdigit() else self.sizes.setdefault(name, size)
            if size != want:
                fail(self.op, argument, f"of shape {tuple(tensor.shape)}", f"[{', '.join(names)}] with {name} = {want}")
        dtypes = tuple(dtypes)
        if tensor.dtype not in dtypes:
            fail(self.op, argument, f"of dtype {tensor.dtype}", " or ".join(str(d) for d in dtypes))
        self.same_device(argument, tensor)

    def equal_layers(self, argument: str, layers: list[Tensor]) -> None:
        """One layer or more, which differ in nothing but their addresses."""
        require(len(layers) > 0, self.op, argument, "an empty list", "a tensor for each layer")
        first = layers[0]
        for i, layer in enumerate(layers):
            for what in ("shape", "dtype", "device"):
                got, want = getattr(layer, what), getattr(first, what)
                require(got == want, self.op, f"{argument}[{i}]", f"of {what} {got}", f"{want} like {argument}[0]")
            require(layer.stride() == first.stride(), self.op, f"{argument}[{i}]", f"of strides {layer.stride()}",
                    f"{first.stride()} like {argument}[0]")

    def require_tensor(self, argument: str, tensor: Optional[Tensor]) -> None:
        if tensor is None:
            fail(self.op, argument, "None", "a tensor")

    def same_device(self, argument: str, tensor: Tensor) -> None:
        """For tensors of free shape; `shapes(..)` checks the others itself."""
        self.require_tensor(argument, tensor)
        if self.device is None:
            self.device = tensor.device
        if tensor.device != self.device:
            fail(self.op, argument, f"on {tensor.device}", f"on {self.device} like the other arguments")

    def count(self, argument: str, tensor: Tensor) -> None:
        """A one-element int32 or int64 tensor, 0-dim or [1]."""
        self.require_tensor(argument, tensor)
        self(argument, tensor, "" if tensor.dim() == 0 else "1", INDEX)

    def __getattr__(self, letter: str) -> int:
        try:
            return self.__dict__["sizes"][letter]
        except KeyError:
            raise AttributeError(letter) from None


class TokenShapes(Shapes):
    """Shapes of an op whose tokens come as padded rows, [B, T, ...], or packed, [tokens, ...].

    Packed, row b owns tokens query_start_loc[b] .. query_start_loc[b + 1] - 1, and T is `max_query_len`.
    """

    def __init__(self, op: str, query_start_loc: Optional[Tensor], max_query_len: Optional[int]):
        super().__init__(op)
        self.packed = query_start_loc is not None
        if self.packed != (max_query_len is not None):
            fail(op, "max_query_len", max_query_len, "a bound for packed rows (query_start_loc), None for others")
        if self.packed:
            if max_query_len < 1:
                fail(op, "max_query_len", max_query_len, "1 or more")
            self.sizes["T"] = max_query_len

    def tokens(self, argument: str, tensor: Optional[Tensor], letters: str, dtypes: Iterable[torch.dtype] = FLOAT):
        """tensor: [B, T, letters], or packed [tokens, letters]."""
        self(argument, tensor, f"{'tokens' if self.packed else 'B T'} {letters}", dtypes)

    def rows(self, argument: str, slots: Tensor, query_lens: Optional[Tensor], query_start_loc: Optional[Tensor]):
        """argument: what names the tokens."""
        self("slots", slots, "B", INDEX)
        self("query_lens", query_lens, "B", INDEX)
        self("query_start_loc", query_start_loc, "B+1", INDEX)
        if self.packed and query_start_loc.shape[0] != slots.shape[0] + 1:
            fail(self.op, "query_start_loc", f"of shape {tuple(query_start_loc.shape)}", f"[B+1] with B = {self.B}")
        count = self.sizes["tokens" if self.packed else "T"]
        if count < 1:
            fail(self.op, argument, f"of {count} tokens" + ("" if self.packed else " a row"), "1 or more")


def require_range(op: str, argument: str, values: Tensor, low: int, high: int) -> None:
    """Every element of `values` lies in [low, high]. Reads values: for CPU tensors only."""
    if values.numel() == 0:
        return
    if values.numel() <= FEW:
        few = values.reshape(-1).tolist()
        smallest, largest = min(few), max(few)
    else:
        smallest, largest = (int(v) for v in torch.aminmax(values))
    if smallest < low or largest > high:
        bad = smallest if smallest < low else largest
        fail(op, argument, f"{bad} in {values.flatten()[:16].tolist()}", f"values in [{low}, {high}]")


def require_none(op: str, argument: str, values: Tensor, wrong: Tensor, expected: str) -> None:
    """No element of `values` is flagged in `wrong`. NaN, which no comparison flags, passes. For CPU tensors only."""
    if wrong.any():
        fail(op, argument, f"{values[wrong].flatten()[0].item():.4g} in places", expected)


def require_negative_rates(op: str, A: Tensor) -> None:
    """A of Mamba-2, on a CPU: given A_log by mistake, states would grow without an error."""
    require_none(op, "A", A, A >= 0, "negative rates (-exp(A_log), not A_log)")


def require_distinct_slots(op: str, argument: str, slots: Tensor) -> None:
    """No slot other than the null slot 0 appears twice: two rows would write one slot. For CPU tensors only."""
    used = [slot for slot in slots.reshape(-1).tolist() if slot > 0]
    if len(set(used)) < len(used):
        fail(op, argument, slots.tolist(), "every non-null slot at most once")


def require_own_memory(op: str, argument: str, pool: Layers, layer_group: Tensor) -> None:
    """No two layers of one group are one memory: each would be treated twice. On a CPU."""
    if not isinstance(pool, Tensor) and pool[0].numel():
        held = [(group, layer.data_ptr()) for group, layer in zip(layer_group.tolist(), pool)]
        require(len(set(held)) == len(held), op, argument, "one memory for two layers of a group", "one for each")


# What the replay, update and materialise ops of every state-space family have in common.


def check_scale_and_seed(shapes: Shapes, state, state_scale, scale_letters: str, seed, philox_rounds: int) -> None:
    """Row scales go with 8-bit states and no others; stochastic rounding needs a seed."""
    op = shapes.op
    shapes("state_scale", state_scale, scale_letters, F32)
    require((state_scale is not None) == (dtype_of(state) in EIGHT_BIT), op, "state_scale",
            "None" if state_scale is None else "given",
            f"row scales exactly for 8-bit states, not for {dtype_of(state)}")
    require(philox_rounds >= 0, op, "philox_rounds", philox_rounds, "0 (nearest) or more")
    if seed is not None:
        require(seed.dtype == torch.int64 and seed.numel() == 1, op, "seed",
                f"{seed.dtype} of {tuple(seed.shape)}", "one int64")
        shapes.same_device("seed", seed)
    require(philox_rounds == 0 or seed is not None, op, "seed", "None", "an int64 tensor when philox_rounds > 0")


def check_ring(shapes: Shapes, window: int, tokens: str) -> None:
    """T <= W and R >= W + T; window 0 (the small-batch route) leaves the configured W to the ring's size.

    `tokens` names the argument that has T.
    """
    require(window >= 0, shapes.op, "window", window, "0 or more")
    require(shapes.T >= 1, shapes.op, tokens, f"of {shapes.T} tokens a row", "1 or more")
    if window:
        require(window >= shapes.T, shapes.op, "window", window, f"at least T = {shapes.T}")
    require(window + shapes.T <= shapes.R, shapes.op, "window", window,
            f"at most R - T = {shapes.R} - {shapes.T} of the ring")


def check_tokens(op: str, x, query_lens, query_start_loc=None, max_query_len=None) -> int:
    """Values of what says which tokens a row has, on a CPU; returns T. x: a tensor of tokens."""
    most = x.shape[1] if query_start_loc is None else max_query_len
    if query_lens is not None:
        require_range(op, "query_lens", query_lens, 0, most)
    if query_start_loc is not None:
        require_range(op, "query_start_loc", query_start_loc, 0, x.shape[0])
        owned = query_start_loc.diff()
        require_range(op, "query_start_loc's differences", owned, 0, max_query_len)
        if query_lens is not None and (query_lens > owned).any():
            fail(op, "query_lens", query_lens.tolist(), f"at most the {owned.tolist()} tokens of query_start_loc")
    return most


def check_row_values(op: str, state, ring_len, ring_start, ring_committed, slots, x, *tokens) -> None:
    """Values of the row arguments of a replay op, on a CPU. x, *tokens: what `check_tokens` takes."""
    require_range(op, "slots", slots, 0, state.shape[0] - 1)
    require_distinct_slots(op, "slots", slots)
    most = check_tokens(op, x, *tokens)
    live = slots[slots > 0]
    require_range(op, "ring_start", ring_start[live], 0, ring_len - 1)
    require_range(op, "ring_committed", ring_committed[live], 0, ring_len - most)


def check_update_values(op: str, state, slots, token_slots, x, *tokens) -> None:
    """Values of the row arguments of an update op, on a CPU. x, *tokens: what `check_tokens` takes."""
    require_range(op, "slots", slots, 0, state.shape[0] - 1)
    check_tokens(op, x, *tokens)
    if token_slots is None:
        require_distinct_slots(op, "slots", slots)
    else:
        require_range(op, "token_slots", token_slots, 0, state.shape[0] - 1)
        require_distinct_slots(op, "token_slots", token_slots)
        read = slots[slots > 0]
        if torch.isin(token_slots, read).any():
            fail(op, "token_slots", token_slots.tolist(), f"none of the slots read ({read.tolist()})")


def check_materialize(shapes: Shapes, src_slots, dst_slots, ring_start, count, layer_group, active_rows) -> None:
    """Shapes of the plan arguments of a materialise op."""
    shapes("src_slots", src_slots, "G B", INDEX)
    shapes("dst_slots", dst_slots, "G B", INDEX)
    shapes("ring_start", ring_start, "G B", INDEX)
    shapes("count", count, "G B", INDEX)
    shapes("layer_group", layer_group, "L", INDEX)
    shapes("active_rows", active_rows, "B", INDEX)


def check_materialize_values(op: str, state, ring_len, src_slots, dst_slots, ring_start, count, layer_group,
                             active_rows) -> None:
    """Values of the plan arguments of a materialise op, on a CPU; only rows that are listed count."""
    rows, groups, slots = src_slots.shape[1], src_slots.shape[0], shape_of(state)[1]
    require_range(op, "layer_group", layer_group, 0, groups - 1)
    require_range(op, "active_rows", active_rows, -1, rows - 1)
    require_own_memory(op, "state", state, layer_group)
    listed = active_rows[(active_rows < 0).cumsum(0) == 0]
    if listed.unique().numel() != listed.numel():
        fail(op, "active_rows", active_rows.tolist(), "every row at most once")
    planned = count[:, listed]
    require_range(op, "count", planned, -1, ring_len)
    for group in range(groups):
        source, target = src_slots[group, listed], dst_slots[group, listed]
        keep = (planned[group] >= 0) & (source > 0) & (target > 0)
        source, target = source[keep], target[keep]
        require_range(op, "src_slots", source, 0, slots - 1)
        require_range(op, "dst_slots", target, 0, slots - 1)
        require_range(op, "ring_start", ring_start[group, listed][keep], 0, ring_len - 1)
        require_distinct_slots(op, "dst_slots", target)
        crossed = (target[:, None] == source[None, :]) & ~torch.eye(len(target), dtype=torch.bool)
        if crossed.any():
            fail(op, "dst_slots", target.tolist(), f"no slot that another row reads ({source.tolist()})")
