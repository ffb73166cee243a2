"""`ReplayCache`: the memory of some state-space layers, for people who write their own model or engine."""

import os
from types import SimpleNamespace
from typing import Optional, Sequence, Union

import torch
from torch import Tensor

from .. import ops
from ..ops.check import EIGHT_BIT
from ..ops.rounding import bits, round_state
from .state_spec import RING_NAMES

LAYOUTS = {"mamba2": ("pn",), "gdn": ("vk", "kv"), "kda": ("vk", "kv")}
ONE_BLOCK = 2**30  # tokens: the commit publishes no snapshots, so that blocks play no part


class ReplayCache:
    """Checkpoints, rings, convolution rings, cursors and positions of L equal layers and S - 1 sequences.

    A sequence owns a slot in 1..slots; slot 0 stands for a padded row. Every step, of a prompt or of decode, is

        step = cache.decode(slots, query_lens)       # or cache.prefill(slots, query_lens)
        x = step.conv(layer, x, weight, bias)        # in each layer; likewise
        y = step(layer, *inputs)                     # the inputs of the family's decode op
        cache.commit(accepted)                       # how many of each row's tokens stay

    and may be traced, with or without the commit, into one graph: cursors, positions and the rows of the step are
    tensors, and nothing waits for the device. A prompt starts an empty sequence in its slot, whatever lay there.

    Misuse raises ValueError before anything is written: a step while the last one is uncommitted, a commit without a
    step, a slot that holds no sequence, counts out of range, a layer that is run twice or left out. What depends on
    values is looked at on a CPU, and on a GPU if the environment has TORCH_REPLAY_CHECK=1, since it must wait for the
    device; compiled code raises RuntimeError there (a failed device-side assertion on a GPU). Window and ring length
    belong to the cache, and a commit moves no row twice.

    GDN and KDA states are [V, K] here and [K, V] in transformers and in vLLM's CPU path: see `import_state`.

    Attributes: family, layers, window (W), ring_len (R), tokens (T of decode steps). state: [L, S, H, P, N] or
    [L, S, HV, V, K]; state_scale: its row scales in 8 bits, or None; rings: three [L, S, heads, R, ..]; conv_ring:
    [L, S, channels, width - 1 + T] or None. ring_start, ring_committed: [1, S] int32. positions: [S] int64, tokens
    committed, -1 where no sequence began.
    """

    @classmethod
    def for_mamba2(cls, layers: int, slots: int, window: int = 16, tokens: int = 1, *, heads: int, head_dim: int,
                   state_dim: int, groups: int = 1, **options) -> "ReplayCache":
        """For `mamba2_replay`: H heads, P head_dim, N state_dim, Gr groups. The others as in `ReplayCache.__init__`;
        conv_dim is by default that of x, B and C together."""
        options.setdefault("conv_dim", heads * head_dim + 2 * groups * state_dim)
        return cls("mamba2", layers, slots, window, tokens, heads, groups, head_dim, state_dim, **options)

    @classmethod
    def for_gdn(cls, layers: int, slots: int, window: int = 16, tokens: int = 1, *, heads: int, value_dim: int,
                key_dim: int, key_heads: Optional[int] = None, **options) -> "ReplayCache":
        """For `gdn_replay`: HV heads, V value_dim, K key_dim, H key_heads (default: heads). The others as in
        `ReplayCache.__init__`; conv_dim is by default that of q, k and v together."""
        return cls._for_delta("gdn", layers, slots, window, tokens, heads, value_dim, key_dim, key_heads, options)

    @classmethod
    def for_kda(cls, layers: int, slots: int, window: int = 16, tokens: int = 1, *, heads: int, value_dim: int,
                key_dim: int, key_heads: Optional[int] = None, **options) -> "ReplayCache":
        """For `kda_replay`; as `for_gdn`."""
        return cls._for_delta("kda", layers, slots, window, tokens, heads, value_dim, key_dim, key_heads, options)

    @classmethod
    def _for_delta(cls, family, layers, slots, window, tokens, heads, value_dim, key_dim, key_heads, options):
        key_heads = heads if key_heads is None else key_heads
        options.setdefault("conv_dim", heads * value_dim + 2 * key_heads * key_dim)
        return cls(family, layers, slots, window, tokens, heads, key_heads, value_dim, key_dim, **options)

    def __init__(self, family, layers, slots, window, tokens, heads, groups, wide, narrow, *, conv_dim: int,
                 conv_width: int = 4, rows: Optional[int] = None, ring_len: Optional[int] = None, dtype=torch.float32,
                 state_dtype=torch.float32, ring_dtype=None, philox_rounds: int = 0, device="cpu"):
        """Zeroed memory.

        Args:
            slots: sequences at most. rows: batch rows at most, padded ones included (default: slots).
            window: W. tokens: T, those of one decode row at most, at most W. ring_len: R, at least W + T (default).
            conv_dim, conv_width: channels and width of the short convolution; width 0: the layers have none.
            dtype: of activations, which the convolution's ring has. state_dtype: any of the decode ops'.
            ring_dtype: default `dtype`, but float16 for the delta rules in bfloat16. philox_rounds: as in the ops.

        Raises:
            ValueError: a size out of range, by name.
        """
        ring_len = window + tokens if ring_len is None else ring_len
        rows = slots if rows is None else rows
        for name, value, least in (("layers", layers, 1), ("slots", slots, 1), ("tokens", tokens, 1),
                                   ("window", window, tokens), ("ring_len", ring_len, window + tokens),
                                   ("rows", rows, 1), ("conv_width", conv_width, 0), ("heads", heads, 1)):
            if value < least:
                raise ValueError(f"ReplayCache: {name} is {value}, expected at least {least}")
        if groups < 1 or heads % groups:
            raise ValueError(f"ReplayCache: groups or key_heads is {groups}, expected a divisor of {heads} heads")
        if ring_dtype is None:
            ring_dtype = torch.float16 if family != "mamba2" and dtype == torch.bfloat16 else dtype
        self.family, self.layers, self.window, self.ring_len = family, layers, window, ring_len
        self.tokens, self.rows, self.conv_width, self.rounds = tokens, rows, conv_width, philox_rounds
        self.checks = torch.device(device).type == "cpu" or os.environ.get("TORCH_REPLAY_CHECK", "0") == "1"
        self._step: Optional["Step"] = None  # the step under way, where Python sees it

        def tensor(*shape, dtype=torch.int32, fill=0):
            made = torch.full(shape, fill, dtype=dtype, device=device)
            torch._dynamo.mark_static_address(made, guard=False)
            return made

        pool, count = (layers, slots + 1), rows + 1
        self.state = tensor(*pool, heads, wide, narrow, dtype=state_dtype)
        self.state_scale = None
        if state_dtype in EIGHT_BIT:
            self.state_scale = tensor(*pool, heads, wide, dtype=torch.float32, fill=1)
        decay = (heads, ring_len, narrow) if family == "kda" else (heads, ring_len)
        self.rings = (tensor(*pool, heads, ring_len, wide, dtype=ring_dtype),
                      tensor(*pool, groups, ring_len, narrow, dtype=ring_dtype),
                      tensor(*pool, *decay, dtype=torch.float32))
        self.conv_ring = tensor(*pool, conv_dim, conv_width - 1 + tokens, dtype=dtype) if conv_width else None
        self.A = tensor(layers, heads, dtype=torch.float32)  # Mamba-2's rates, as the last step gave them
        self.seed = tensor(layers, dtype=torch.int64)
        self.seed += torch.arange(layers, device=device) << 40  # layers round independently
        self.layer_group = tensor(layers)
        self.ring_start, self.ring_committed = tensor(1, slots + 1), tensor(1, slots + 1)
        self.positions = tensor(slots + 1, dtype=torch.int64, fill=-1)
        self.open = tensor(1)  # 1 while a step is uncommitted
        # the step under way by row: slot, uncommitted tokens, position of the first, whether it is a prompt's
        self.row_slots, self.row_lens, self.row_prefill = tensor(count), tensor(count), tensor(count)
        self.row_first = tensor(count, dtype=torch.int64)
        self.plan = tensor(4, 1, count)

    def prefill(self, slots: Tensor, query_lens: Union[Tensor, int], continues: Optional[Tensor] = None) -> "Step":
        """Begins a step over prompts, or chunks of them.

        Args:
            slots: [B] int32 or int64, the slot of each row, 0 for a padded row.
            query_lens: [B] tokens of each row in inputs [B, T, ..], or one number for all.
            continues: [B] bool, rows that go on from the sequence in their slot. None: all start one.
        """
        lens = self._check_rows(slots, query_lens, None)
        first = torch.zeros_like(slots, dtype=torch.int64)
        if continues is not None:
            continues = continues & (slots > 0)
            self._require(continues & (self.positions[slots] < 0), slots, "prefill continues a slot without a sequence")
            first = torch.where(continues, self.positions[slots].clamp(min=0), 0)
            self._fold(slots, continues)
        return self._begin(slots, lens, first, continues, query_lens, prefill=True)

    def decode(self, slots: Tensor, query_lens: Union[Tensor, int, None] = None,
               positions: Optional[Tensor] = None) -> "Step":
        """Begins a decode step of at most T tokens a row.

        Args:
            slots, query_lens: as in `prefill`; None: T tokens.
            positions: [B], where the caller believes that each sequence stands. It is compared, and finds a slot that
                was given to another sequence without `prefill` or `reset`.
        """
        query_lens = self.tokens if query_lens is None else query_lens
        lens = self._check_rows(slots, query_lens, self.tokens)
        first = self.positions[slots]
        self._require((slots > 0) & (first < 0), slots, "decode in a slot without a sequence (prefill or reset it)")
        if positions is not None:
            self._require((slots > 0) & (first != positions), first, "positions differ from those of the cache")
        return self._begin(slots, lens, first.clamp(min=0), None, query_lens, prefill=False)

    def _check_rows(self, slots, query_lens, most: Optional[int]) -> Tensor:
        """Tokens of each row, [B], once the arguments of a new step are found to be right."""
        if slots.dim() != 1 or slots.shape[0] > self.rows:
            raise ValueError(f"ReplayCache: slots is of shape {tuple(slots.shape)}, expected [B] with B <= {self.rows}")
        lens = torch.full_like(slots, query_lens) if isinstance(query_lens, int) else query_lens
        if lens.shape != slots.shape:
            raise ValueError(f"ReplayCache: query_lens is of shape {tuple(lens.shape)}, expected {tuple(slots.shape)}")
        self._require(self.open != 0, self.row_slots, "the last step was not committed, slots by row")
        self._require((slots < 0) | (slots >= self.state.shape[1]), slots, "slots out of range")
        self._require(((slots[:, None] == slots) & (slots > 0)).sum(1) > 1, slots, "a slot is named by two rows")
        self._require((lens < 0) | (lens > (2**31 - 1 if most is None else most)), lens, "query_lens out of range")
        return lens

    def _begin(self, slots, lens, first, continues, query_lens, prefill: bool) -> "Step":
        lens = torch.where(slots > 0, lens, 0)
        fill = (0, self.rows + 1 - slots.shape[0])
        for kept, value in ((self.row_slots, slots), (self.row_lens, lens), (self.row_first, first),
                            (self.row_prefill, torch.full_like(slots, prefill))):
            kept.copy_(torch.nn.functional.pad(value, fill))
        self.open.fill_(1)
        if self.rounds:
            self.seed.add_(1)
        step = Step(self, slots, lens, first, continues, query_lens if isinstance(query_lens, int) else None, prefill)
        if not torch.compiler.is_compiling():
            self._step = step
        return step

    def commit(self, accepted: Optional[Tensor] = None) -> None:
        """Ends the step: the first accepted tokens of each decode row stay, the others never happened.

        accepted: [B] in 0..query_lens, rows as in the step. None: all tokens. Prompts stay whole.
        """
        if self._step is not None and not torch.compiler.is_compiling():
            missing = [layer for layer in range(self.layers) if ("core", layer) not in self._step.ran]
            if missing:
                raise ValueError(f"ReplayCache: layers {missing} did not take part in the step, expected all")
        lens = self.row_lens
        self._require(self.open == 0, lens, "commit without a step since the last one, tokens by row")
        if accepted is None:
            accepted = lens
        else:
            if accepted.dim() != 1 or accepted.shape[0] > self.rows:
                raise ValueError(f"ReplayCache: accepted is of shape {tuple(accepted.shape)}, expected [B] as slots")
            accepted = torch.nn.functional.pad(accepted, (0, self.rows + 1 - accepted.shape[0]), value=-1)
            real = (lens > 0) & (self.row_prefill == 0)
            self._require(real & ((accepted < 0) | (accepted > lens)), accepted, "accepted out of range (or too short)")
            accepted = torch.where(real, accepted.clamp(min=0).minimum(lens), lens).to(torch.int32)
        ops.ring_commit(
            self.ring_start, self.ring_committed, *self.plan.unbind(), self.row_slots.view(1, -1, 1),
            query_lens=lens, num_computed=self.row_first, num_accepted=accepted, is_prefilling=self.row_prefill,
            block_size=ONE_BLOCK, window=self.window, ring_len=self.ring_len, post_step=False, materialize=False)
        at = self.row_slots.long()
        # rows without tokens write back what their slot has
        self.positions.index_put_((at,), torch.where(lens > 0, self.row_first + accepted, self.positions[at]))
        self.row_lens.zero_()
        self.open.zero_()
        if not torch.compiler.is_compiling():
            self._step = None

    def reset(self, slots: Union[Tensor, Sequence[int], int]) -> None:
        """Slots hold an empty sequence each, at position 0. A step under way is forgotten for them."""
        slots = torch.as_tensor(slots, device=self.positions.device).reshape(-1).long()
        self._require((slots < 0) | (slots >= self.state.shape[1]), slots, "slots out of range")
        state = self.state.view(torch.uint8) if self.state_scale is not None else self.state
        state.index_fill_(1, slots, 0)
        for values in (self.ring_start[0], self.ring_committed[0], self.positions):
            values.index_fill_(0, slots, 0)
        self.positions[0].fill_(-1)
        gone = torch.isin(self.row_slots, slots) & (self.row_lens > 0)
        self.row_lens.mul_(~gone)
        self.open.mul_(~gone.any() | self.row_lens.any())
        if not torch.compiler.is_compiling():
            self._step = None

    def rewind(self, slots: Tensor, tokens: int) -> None:
        """Takes back the last `tokens` committed tokens of each slot: cursors and positions move, nothing is copied.

        slots: [B], distinct. At least one token must lie in the ring for each that is taken back, and no more than T
        may be, for the convolution's ring holds no older inputs. Waits for the device.

        Raises:
            ValueError: a step is under way, or `tokens` is out of range; nothing was changed.
        """
        at = slots.long()
        live = int(self.ring_committed[0, at].min())
        if int(self.open):
            raise ValueError("ReplayCache: rewind while a step is uncommitted")
        if not 0 <= tokens <= min(live, self.tokens):
            raise ValueError(f"ReplayCache: rewind of {tokens} tokens, expected 0..{min(live, self.tokens)}: the rings "
                             f"hold {live}, and a step is of at most {self.tokens}")
        for counts in (self.ring_committed[0], self.positions):
            counts.index_add_(0, at, torch.full_like(at, -tokens).to(counts.dtype))

    def fold(self, slots: Tensor) -> None:
        """Folds the rings of slots [B], 0 skipped, into their checkpoints. What they stand for stays the same."""
        self._require(self.open != 0, self.row_slots, "fold while a step is uncommitted, slots by row")
        self._fold(slots, slots > 0)

    def reorder(self, slots: Tensor, sources: Tensor) -> None:
        """Slot slots[i] becomes a copy of what sources[i] held before the call, in all layers. [B] each; a source may
        occur more than once, as in a beam search. Copies one pool of one layer at a time."""
        self._require(self.open != 0, self.row_slots, "reorder while a step is uncommitted, slots by row")
        slots, sources = slots.long(), sources.long()
        pools = [self.state, self.state_scale, *self.rings, self.conv_ring]
        for pool in (layer for stacked in pools if stacked is not None for layer in stacked.view(bits(stacked.dtype))):
            pool[slots] = pool[sources]
        for counts in (self.ring_start[0], self.ring_committed[0], self.positions):
            counts[slots] = counts[sources]

    def export(self, slot: int) -> dict[str, Tensor]:
        """A slot's sequence, bit for bit, for `restore` in any cache of equal layers; see `ops.ring_export`."""
        position = self._settled(slot)
        history = self.conv_width - 1 if self.conv_ring is not None else None
        exported = ops.ring_export(self._pool(), slot, position=position, conv_history=history)
        rates = {"A": self.A.clone()} if self.family == "mamba2" else {}  # what folds the rows of its ring
        return exported | rates | {"position": torch.tensor([position], dtype=torch.int64)}

    def restore(self, slot: int, exported: dict[str, Tensor]) -> None:
        """Makes a slot's sequence the one that `export` gave. Raises ValueError, having written nothing, where it does
        not fit."""
        given = dict(exported)
        rates = given.pop("A", None)
        if self.conv_ring is None:
            given.pop("position", None)
        history = self.conv_width - 1 if self.conv_ring is not None else None
        ops.ring_import(self._pool(), slot, given, conv_history=history)
        self.positions[slot] = int(exported["position"])
        if rates is not None:
            self.A.copy_(rates)

    def export_state(self, slot: int, *, layout: str) -> dict[str, Tensor]:
        """A slot's sequence as other libraries keep it: ring folded into the state, which stays as it is here.

        layout: of the state's last two dimensions. Mamba-2: "pn". GDN, KDA: "vk" as here, or "kv" (transformers).

        Returns:
            "state": float32 [L, heads, .., ..]. "conv": [L, channels, width - 1], raw inputs, newest last, zero before
            the first token; absent without convolution. "position": int64 [1].
        """
        self._check_layout(layout)
        position = self._settled(slot)
        pools = [t if t is None else t[:, [0, slot, 0]] for t in (self.state, self.state_scale, *self.rings)]
        state, scale, *rings = pools
        one, rates = torch.ones(1, 1, dtype=torch.int32, device=state.device), []
        if self.family == "mamba2":
            rates = [self.A]
        fold = getattr(ops, f"{self.family}_materialize")
        fold(state, *rings, *rates, one, 2 * one, self.ring_start[:, slot, None],
             self.ring_committed[:, slot, None], self.layer_group, one[0] * 0, scale)
        values = state[:, 2].float() * (1 if scale is None else scale[:, 2].unsqueeze(-1))
        result = {"state": values.mT.contiguous() if layout == "kv" else values,
                  "position": torch.tensor([position], dtype=torch.int64)}
        if self.conv_ring is not None:
            at = torch.arange(position - self.conv_width + 1, position, device=state.device)
            inputs = self.conv_ring[:, slot][..., at % self.conv_ring.shape[-1]]
            result["conv"] = torch.where(at >= 0, inputs, 0)
        return result

    def import_state(self, slot: int, state: Tensor, conv: Optional[Tensor], position: int, *, layout: str) -> None:
        """Makes a slot's sequence one that another library computed. Arguments as `export_state` returns them; conv may
        have more columns (transformers keeps `width`).

        With V = K nothing shows a transposed state, so that the layout must always be said. Raises ValueError, having
        written nothing, for another shape or layout.
        """
        layers, count, *shape = self.state.shape
        self._check_layout(layout)
        want = (layers, *shape) if layout != "kv" else (layers, shape[0], shape[2], shape[1])
        if not 0 < slot < count or position < 0:
            raise ValueError(f"import_state: slot is {slot} and position {position}, expected 1..{count - 1} and 0..")
        if tuple(state.shape) != want:
            raise ValueError(f"import_state: state is of shape {tuple(state.shape)}, expected {want} as {layout}")
        width = max(self.conv_width - 1, 0)
        if (conv is None) != (self.conv_ring is None):
            raise ValueError(f"import_state: conv is {'None' if conv is None else 'given'}, expected "
                             f"{'inputs' if conv is None else 'None'} for conv_width {self.conv_width}")
        if conv is not None and (conv.shape[:-1] != self.conv_ring[:, 0, :, 0].shape or conv.shape[-1] < width):
            raise ValueError(f"import_state: conv is of shape {tuple(conv.shape)}, expected [{layers}, "
                             f"{self.conv_ring.shape[2]}, {width} or more]")
        values = (state.mT if layout == "kv" else state).to(self.state.device, torch.float32)
        rounded, scale = round_state(self.state.dtype, torch.arange(layers), values, self.state_scale is not None, None,
                                     0)
        self.state.view(bits(self.state.dtype))[:, slot] = rounded.view(bits(self.state.dtype))
        if scale is not None:
            self.state_scale[:, slot] = scale
        if conv is not None and width:
            at = torch.arange(position - width, position, device=conv.device) % self.conv_ring.shape[-1]
            self.conv_ring[:, slot, :, at.to(self.positions.device)] = conv[..., -width:].to(self.conv_ring)
        self.ring_start[:, slot], self.ring_committed[:, slot], self.positions[slot] = 0, 0, position

    def _check_layout(self, layout: str) -> None:
        if layout not in LAYOUTS[self.family]:
            raise ValueError(f"ReplayCache: layout is {layout!r}, expected one of {LAYOUTS[self.family]}")

    def _settled(self, slot: int) -> int:
        """The position of a slot that holds a sequence with nothing uncommitted."""
        if not 0 < slot < self.state.shape[1] or self.positions[slot] < 0:
            raise ValueError(f"ReplayCache: slot is {slot}, expected 1..{self.state.shape[1] - 1}, with a sequence")
        if ((self.row_slots == slot) & (self.row_lens > 0)).any():
            raise ValueError(f"ReplayCache: the step of slot {slot} was not committed")
        return int(self.positions[slot])

    def _pool(self) -> SimpleNamespace:
        return SimpleNamespace(
            family=self.family, state=self.state, state_scale=self.state_scale, conv_ring=self.conv_ring,
            rings=dict(zip(RING_NAMES[self.family], self.rings, strict=True)), layer_group=self.layer_group,
            window=self.window, ring_start=self.ring_start, ring_committed=self.ring_committed)

    def _fold(self, slots: Tensor, chosen: Tensor) -> None:
        """Folds the rings of the chosen rows into their checkpoints; their cursors become 0, 0."""
        at = slots.long()
        count = torch.where(chosen, self.ring_committed[0, at], -1)
        every = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
        rates = [self.A] if self.family == "mamba2" else []
        getattr(ops, f"{self.family}_materialize")(
            self.state, *self.rings, *rates, slots[None], slots[None], self.ring_start[:, at], count[None],
            self.layer_group, every, self.state_scale)
        for cursors in (self.ring_start, self.ring_committed):
            cursors.index_put_((torch.zeros_like(at), at), torch.where(chosen, 0, cursors[0, at]))

    def _require(self, wrong: Tensor, shown: Tensor, what: str) -> None:
        """No element of `wrong` is set. See the class about when it is looked at."""
        if not self.checks:
            return
        if torch.compiler.is_compiling():
            torch._assert_async(~wrong.any(), f"ReplayCache: {what}")
        elif wrong.any():
            raise ValueError(f"ReplayCache: {what}: {shown.tolist()}")


class Step:
    """One step of a `ReplayCache`, between its beginning and its commit: what every layer calls.

    slots: [B]. lens: [B] tokens, 0 for padded rows. first: [B] int64, position of each row's first token.
    """

    def __init__(self, cache, slots, lens, first, continues, count, prefill):
        self.cache, self.slots, self.lens, self.first = cache, slots, lens, first
        self.continues, self.count, self.prefill, self.ran = continues, count, prefill, set()

    def conv(self, layer: int, x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, silu: bool = True) -> Tensor:
        """The short convolution of x [B, T, channels] by weight [channels, width]; see `ops.conv_replay`."""
        self._once("conv", layer, x)
        if self.cache.conv_ring is None or weight.shape[-1] != self.cache.conv_width:
            raise ValueError(f"ReplayCache: weight is of width {weight.shape[-1]}, expected {self.cache.conv_width}")
        op = ops.conv_prefill if self.prefill else ops.conv_replay
        return op(self.cache.conv_ring[layer], x, weight, bias, self.first, self.slots, self.lens, silu=silu)

    def __call__(self, layer: int, *inputs: Optional[Tensor], **options) -> Tensor:
        """The recurrence. inputs: those of the family's decode op, from `x` (`q`) to `dt_bias`; options: its keywords
        (`scale`, by default K ** -0.5, `l2norm`, by default True, `lower_bound`, `dt_softplus`, ..).

        Mamba-2: x, dt, A, B, C, and D, z, dt_bias, which may be left out. GDN, KDA: q, k, v, a, b, A_log, dt_bias.
        """
        cache = self.cache
        self._once("core", layer, inputs[0])
        options["philox_rounds"] = cache.rounds
        if cache.family == "mamba2":
            inputs += (None,) * (8 - len(inputs))
            cache.A[layer].copy_(inputs[2])
        else:
            options = {"scale": inputs[0].shape[-1] ** -0.5, "l2norm": True} | options
        scale = None if cache.state_scale is None else cache.state_scale[layer]
        seed = cache.seed[layer : layer + 1] if cache.rounds else None
        cursors = cache.ring_start[0], cache.ring_committed[0]
        if self.prefill:
            op = getattr(ops, f"{cache.family}_prefill")
            return op(cache.state[layer], *cursors, *inputs, self.slots, self.lens, self.continues, None, scale, seed,
                      **options)
        op = getattr(ops, f"{cache.family}_replay")
        rings = [ring[layer] for ring in cache.rings]
        return op(cache.state[layer], *rings, *cursors, *inputs, self.slots, self.lens, scale, seed,
                  window=cache.window, **options)

    def _once(self, part: str, layer: int, x: Tensor) -> None:
        if not 0 <= layer < self.cache.layers:
            raise ValueError(f"ReplayCache: layer is {layer}, expected 0..{self.cache.layers - 1}")
        if self.count is not None and x.shape[1] != self.count:
            raise ValueError(f"ReplayCache: inputs have {x.shape[1]} tokens a row, expected {self.count} (query_lens)")
        if (part, layer) in self.ran:
            raise ValueError(f"ReplayCache: layer {layer} runs twice in one step")
        self.ran.add((part, layer))
