"""The cache of a replaced model: transformers' own keys and values, and a `ReplayCache` for the recurrent layers."""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)

from ...states.replay_cache import Step
from .mixers import FAMILIES


class StateLayer(LinearAttentionCacheLayerMixin):
    """A recurrent layer's place among a cache's layers. What it holds is in the cache's `memory`; reading a state makes
    a copy with the ring folded in, in transformers' layout, and writing to that copy changes nothing."""

    is_croppable = True
    is_compileable = True
    record_past = False  # nothing grows when drafts come: the ring is there anyway
    number_of_states = 1

    def __init__(self, owner: "GenerationCache", index: int):
        self.owner, self.index = owner, index

    @property
    def device(self):
        return self.owner.memory.state.device

    @property
    def dtype(self):
        return self.owner.dtype

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {0: self.owner.started}

    is_conv_states_initialized = is_recurrent_states_initialized = has_previous_state

    @property
    def conv_states(self) -> dict[int, Optional[Tensor]]:
        """[B, channels, width], newest last."""
        return {0: self.owner.folded(self.index)[1] if self.owner.started else None}

    @property
    def recurrent_states(self) -> dict[int, Optional[Tensor]]:
        """float32 [B, H, P, N] for Mamba-2, [B, HV, K, V] for the delta rules."""
        return {0: self.owner.folded(self.index)[0] if self.owner.started else None}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("this layer of the model was not replaced, and can not use the cache of one that was")

    update_conv_state = update_recurrent_state = lazy_initialization

    # What concerns all layers at once is done by the cache.
    def activate_past_recording(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def crop(self, tokens_to_remove: int) -> None:
        pass

    def reorder_cache(self, beam_idx: Tensor) -> None:
        pass

    def offload(self) -> None:
        pass

    def prefetch(self) -> None:
        pass


class StateAndDynamicLayer(DynamicLayer, StateLayer):
    """A layer with both recurrence and attention."""

    def __init__(self, owner: "GenerationCache", index: int):
        StateLayer.__init__(self, owner, index)
        self.keys = self.values = None
        self.is_initialized = False

    device = property(lambda self: self.owner.memory.state.device, lambda self, value: None)
    dtype = property(lambda self: self.owner.dtype, lambda self, value: None)


class StateAndStaticLayer(StaticLayer, StateLayer):
    def __init__(self, owner: "GenerationCache", index: int, max_len: int):
        StateLayer.__init__(self, owner, index)
        self.keys = self.values = None
        self.is_initialized, self.max_cache_len = False, max_len
        self.cumulative_length = torch.tensor(0, dtype=torch.int64)

    device = property(lambda self: self.owner.memory.state.device, lambda self, value: None)
    dtype = property(lambda self: self.owner.dtype, lambda self, value: None)


class GenerationCache(Cache):
    """transformers' cache of a replaced model; `make_cache` makes one. All its rows advance together.

    A forward of at most 1 + num_spec tokens on a started cache is a decode step through the ring; a longer one folds
    the rings into the checkpoints and is a chunk of prompt. `crop(-k)` takes back the last k tokens: a move of cursors.
    After `activate_past_recording`, which assisted generation calls, the last tokens of a prompt go through the ring
    as well, so that they may be cropped too.

    memory: the `ReplayCache`, row b in slot b + 1. started: whether any token is in it.
    """

    def __init__(self, config, mixers: list[nn.Module], max_batch: int, max_len: Optional[int], window: int,
                 num_spec: int, dtype: torch.dtype, state_dtype: torch.dtype, match: Optional[str]):
        plain = DynamicCache(config=config) if max_len is None else StaticCache(config=config, max_cache_len=max_len)
        layers, self.index = list(plain.layers), {mixer.layer_idx: i for i, mixer in enumerate(mixers)}
        for mixer in mixers:
            at = mixer.layer_idx
            kind, own = type(layers[at]), (self, self.index[at])
            if kind is LinearAttentionLayer:
                layers[at] = StateLayer(*own)
            elif kind is LinearAttentionAndFullAttentionLayer:
                layers[at] = StateAndDynamicLayer(*own)
            elif kind is LinearAttentionAndStaticFullAttentionLayer:
                layers[at] = StateAndStaticLayer(*own, max_len)
            else:
                raise ValueError(f"layer {at} ({type(mixer).__name__}) has an unknown cache, {kind.__name__}")
        super().__init__(layers=layers)
        self.config, first = config, mixers[0]
        family = FAMILIES[type(first).__name__]
        self.first, self.last = first.layer_idx, mixers[-1].layer_idx
        self.family, self.dtype, self.match, self.static = family, dtype, match, max_len is not None
        device = first.conv1d.weight.device
        self.memory = family.memory(first, len(mixers), max_batch, window, 1 + num_spec, dtype=dtype,
                                    state_dtype=state_dtype, device=device)
        self.slots = torch.arange(1, max_batch + 1, dtype=torch.int32, device=device)
        torch._dynamo.mark_static_address(self.slots, guard=False)
        self.rollback = False
        self._forget()

    def _forget(self) -> None:
        self.started, self.rows = False, 0
        self.begun: Optional[Tensor] = torch.zeros_like(self.slots, dtype=torch.bool)  # None: all rows
        self.parts: list[tuple[int, int, Step]] = []  # of the forward under way: from token, to token, step

    @property
    def is_compileable(self) -> bool:
        return self.static and super().is_compileable

    # Forwards

    def run(self, mixer: nn.Module, hidden: Tensor, mask: Optional[Tensor]) -> Tensor:
        """One replaced layer of a forward: hidden [B, T, width] -> [B, T, width]."""
        if mixer.layer_idx == self.first:
            self._begin(hidden, mask)
        outputs = []
        for start, stop, step in self.parts:
            part = slice(start, stop)
            outputs.append(self.family.compute(mixer, hidden[:, part], None if mask is None else mask[:, part], step,
                                               self.index[mixer.layer_idx], self.match))
        if mixer.layer_idx == self.last:
            self._end()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _begin(self, hidden: Tensor, mask: Optional[Tensor]) -> None:
        rows, count = hidden.shape[:2]
        most, memory = self.memory.tokens, self.memory
        if self.parts:
            raise ValueError("the last forward with this cache was interrupted; call its reset() and start again")
        if rows != self.rows and (self.started or rows > self.slots.shape[0]):
            raise ValueError(f"the cache is for {self.rows or self.slots.shape[0]} rows, this forward has {rows}")
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise ValueError("this cache is for inference; call the model under torch.no_grad(), or without the cache")
        self._check_mask(mask)
        self.rows, slots = rows, self.slots[:rows]
        keep = min(most, count) if self.rollback else 0  # tokens at the end that go through the ring
        if self.started and count <= most:
            self.parts = [(0, count, memory.decode(slots, count))]
        elif keep == count:
            memory.reset(slots)
            self.parts = [(0, count, memory.decode(slots, count))]
        else:
            going_on = torch.ones_like(slots, dtype=torch.bool) if self.started else None
            prompt = memory.prefill(slots, count - keep, going_on)
            self.parts = [(0, count - keep, prompt)]
            if keep:
                lens = torch.full_like(slots, keep)
                tail = Step(memory, slots, lens, prompt.first + (count - keep), None, keep, False)
                self.parts.append((count - keep, count, tail))

    def _end(self) -> None:
        self.memory.commit()
        if len(self.parts) == 2:  # every layer has run the second step by now
            start, stop, tail = self.parts[1]
            self.memory.decode(tail.slots, stop - start).ran |= tail.ran
            self.memory.commit()
        self.parts, self.started = [], True

    def _check_mask(self, mask: Optional[Tensor]) -> None:
        """Padding may only come before a row's first token: behind it, it would decay the state."""
        if mask is None:
            self.begun = None
            return
        empty, rows = mask == 0, mask.shape[0]
        begun = torch.ones_like(empty[:, 0]) if self.begun is None else self.begun[:rows]
        before = torch.cat([begun[:, None], ~empty], 1).cumsum(1)[:, :-1] > 0
        wrong = (empty & before).any()
        message = ("attention_mask has padding behind tokens; pad on the left (tokenizer.padding_side = 'left'): a "
                   "recurrent state would decay over padding on the right, and its convolution would remember it. "
                   "(Without a mask, generate takes a pad_token_id among the input_ids for padding.)")
        if torch.compiler.is_compiling():
            torch._assert_async(~wrong, message)
        elif wrong:
            raise ValueError(message)
        if self.begun is not None:
            self.begun[:rows].logical_or_((~empty).any(1))

    # What generation does to a cache

    def activate_past_recording(self) -> None:
        self.rollback = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last -tokens_to_remove tokens, which must be in the ring. Waits for the device.

        Raises ValueError, having changed nothing, for a positive number or for more tokens than the ring holds.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop: tokens_to_remove is {tokens_to_remove}, expected 0 or less")
        if not self.started:
            if tokens_to_remove:
                raise ValueError(f"crop: tokens_to_remove is {tokens_to_remove}, but the cache is empty")
            return
        slots = self.slots[: self.rows]
        if tokens_to_remove:
            self.memory.rewind(slots, -tokens_to_remove)
        super().crop(tokens_to_remove)
        # A flush folds all that is committed. None may happen before the next crop, which may come after as many single
        # steps as a step has tokens.
        if int(self.memory.ring_committed[0, 1]) + self.memory.tokens > self.memory.window:
            self.memory.fold(slots)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b goes on from what row beam_idx[b] holds: state, ring, cursors, convolution, keys and values."""
        super().reorder_cache(beam_idx)
        if self.started:
            slots = self.slots[: self.rows]
            self.memory.reorder(slots, slots[beam_idx.to(slots.device)])
            if self.begun is not None:
                self.begun[: self.rows] = self.begun[beam_idx.to(slots.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError("the rows of this cache are fixed; reorder_cache moves what they hold")

    batch_repeat_interleave = batch_select_indices

    def reset(self) -> None:
        """Empties the cache and keeps its memory."""
        super().reset()
        self.memory.reset(self.slots)
        self._forget()

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens in the cache; for models with attention, what its layers say."""
        if all(self.is_linear[at] or self.is_dummy[at] for at in range(len(self.layers))):
            return int(self.memory.positions[1].clamp(min=0)) if self.started else 0
        return super().get_seq_length(layer_idx)

    # States for others

    def folded(self, index: int) -> tuple[Tensor, Tensor]:
        """State, float32 in transformers' layout, and convolution inputs [B, channels, width] of a recurrent layer,
        with the rings folded in; the cache stays as it is. index: among the recurrent layers."""
        layout = "pn" if self.family.name == "mamba2" else "kv"
        rows = [self.memory.export_state(slot, layout=layout) for slot in range(1, self.rows + 1)]
        state, conv = (torch.stack([row[name][index] for row in rows]) for name in ("state", "conv"))
        # transformers keeps one input more, which no step reads
        return state, nn.functional.pad(conv, (1, 0))

    def to_transformers(self) -> Cache:
        """A cache of transformers' own, for the model before `replace` or after `restore`: copies of everything, with
        the rings folded into the states. Static, of the same length, where this one is."""
        static = {at: layer for at, layer in enumerate(self.layers) if isinstance(layer, StaticLayer)}
        config = self.config
        longest = max((layer.max_cache_len for layer in static.values()), default=1)
        made = StaticCache(config=config, max_cache_len=longest) if self.static else DynamicCache(config=config)
        if not self.started:
            return made
        for at, layer in enumerate(self.layers):
            if isinstance(layer, StateLayer):
                state, conv = self.folded(layer.index)
                made.update_conv_state(conv, at, conv_kernel_size=conv.shape[-1])
                made.update_recurrent_state(state, at)
            if getattr(layer, "keys", None) is not None:
                length = int(layer.get_seq_length())
                made.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), at)
        return made
