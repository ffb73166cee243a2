"""A request: its prompt, how its text is drawn, what it has produced, and what the caches hold of it."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Optional

FINISH_REASONS = ("stop", "length", "abort", "error")
MAX_INT32 = 2**31 - 1


def check_int(name: str, value: object, low: int, high: Optional[int] = None) -> int:
    """`value` as an int in [low, high]. Raises TypeError for bools and non-integers, ValueError out of range."""
    wanted = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected {wanted}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}: expected {wanted}, got {value}")
    return int(value)


def _check_real(name: str, value: object, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {wanted}, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected {wanted}, got {value}")
    return float(value)


def check_token_ids(name: str, ids: object) -> list[int]:
    """A sequence of integers, or a one-dimensional array or tensor of them, as a list. Raises TypeError for anything
    else, texts, bytes, bools and floats among it, and ValueError for another number of dimensions."""
    wanted = "a sequence of token ids, or a one-dimensional array or tensor of them"
    if isinstance(ids, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{name}: expected {wanted}, got {type(ids).__name__}")
    if hasattr(ids, "tolist") and hasattr(ids, "shape"):
        if len(ids.shape) != 1:
            raise ValueError(f"{name}: expected {wanted}, got shape {tuple(ids.shape)}")
        ids = ids.tolist()
    try:
        ids = list(ids)
    except TypeError:
        raise TypeError(f"{name}: expected {wanted}, got {ids!r}") from None
    if set(map(type, ids)) <= {int}:
        return ids
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TypeError(f"{name}[{place}]: expected a token id, an integer, got {token!r}")
    return [int(token) for token in ids]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    max_tokens: most tokens to produce, at least 1; 0 with prompt_logprobs, to score a prompt and no more. temperature:
    0 is greedy. top_k: keep the k likeliest tokens, 0 keeps all. top_p: then keep the smallest set whose probability
    reaches it, in (0, 1]. seed: in [0, 2**63); with the position of a token it fixes the draw. None: a fresh one for
    each request, which its outputs tell.

    stop: texts that end the request, one string or several. stop_token_ids: tokens that do, beside the model's
    end-of-text tokens. A token that ends the request is among its tokens, but not in its text. ignore_eos: do not end
    at the model's end-of-text tokens. skip_special_tokens: the text leaves special tokens out, as `tokenizer.decode`
    does; stop texts are looked for in what is left.

    prompt_logprobs: also give the log probability of each prompt token after those before it; such a request takes no
    prefix over from others, for it needs every prompt token computed. Raises TypeError or ValueError, naming the field.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: Optional[int] = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True

    def __post_init__(self):
        stop_token_ids = check_token_ids("stop_token_ids", self.stop_token_ids)
        checked = {
            "max_tokens": check_int("max_tokens", self.max_tokens, 0 if self.prompt_logprobs else 1),
            "temperature": _check_real("temperature", self.temperature, "a finite number of at least 0"),
            "top_k": check_int("top_k", self.top_k, 0, MAX_INT32),
            "top_p": _check_real("top_p", self.top_p, "a number above 0 and at most 1"),
            "seed": None if self.seed is None else check_int("seed", self.seed, 0, 2**63 - 1),
            "stop": _stop_texts(self.stop),
            "stop_token_ids": tuple(check_int("stop_token_ids", token, 0) for token in stop_token_ids),
        }
        if checked["temperature"] < 0:
            raise ValueError(f"temperature: expected a finite number of at least 0, got {self.temperature}")
        if not 0 < checked["top_p"] <= 1:
            raise ValueError(f"top_p: expected a number above 0 and at most 1, got {self.top_p}")
        for name in ("ignore_eos", "prompt_logprobs", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def fresh_seed() -> int:
    """One that no generator of the program knows. Below 2**53: JSON readers that know only doubles keep it."""
    return secrets.randbits(53)


def _stop_texts(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"stop: expected a string, or a list or tuple of strings, got {stop!r}")
    if not all(texts):
        raise ValueError(f"stop: expected texts that are not empty, got {stop!r}")
    return tuple(texts)


@dataclass(eq=False)
class Request:
    """One request, from arrival to its finish. Compared and hashed by identity.

    The engine appends to `output_ids`; the scheduler owns `index`, `tables`, `arrival`, `admission`, `finish_reason`
    and `preemptions`, moves `num_computed`, and takes it back to 0 when the caches are taken away.

    num_computed: tokens whose state is in the caches, always the first ones. pending: 1 if a step is under way whose
    token is counted already, in num_tokens and num_computed, but not known yet. index: row in the persistent
    per-request buffers, -1 when not admitted. tables: for each KV group the block ids by position // block_size, 0
    where a window block was freed. arrival: order in which the scheduler got it. admission: number of its last
    admission, the scheduler's first being 0. drafted, accepted: draft tokens proposed and kept.

    prompt_logprobs: those of prompt tokens 1, 2, ... as far as the prompt is computed, if they are asked for.

    With a prefix cache: only requests of one cache_salt share prefixes. prefix_keys: names of the first tokens, see
    `prefix_cache`. hit_tokens: H, the boundary up to which the request took over what others computed. first_hit: H of
    its last admission, kept when it is put back, None before any. branch_edge: where a snapshot would have made the hit
    longer. replay_start: first position that its sliding windows may look at, 0: all. source: snapshot that its state
    starts from, snapshots: those that this step may publish, by the edge they stand at; both are held for one step
    only. output_edges: where it published snapshots beyond its prompt that are still wanted. private: publishes nothing
    until it is computed anew.

    params: with the request's own seed, if they came without one.

    Raises TypeError or ValueError for an id or salt that is no text and for prompt ids that are no token ids.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    pending: int = 0
    index: int = -1
    tables: dict[str, list[int]] = field(default_factory=dict)
    finish_reason: Optional[str] = None
    arrival: int = -1
    admission: int = -1
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    cache_salt: str = ""
    prefix_keys: list[bytes] = field(default_factory=list)
    hit_tokens: int = 0
    first_hit: Optional[int] = None
    replay_start: int = 0
    source: int = 0
    snapshots: dict[int, int] = field(default_factory=dict)
    branch_edge: int = 0
    output_edges: list[int] = field(default_factory=list)
    private: bool = False
    prompt_logprobs: list[float] = field(default_factory=list)

    def __post_init__(self):
        if not isinstance(self.id, str):
            raise TypeError(f"id: expected a string, got {self.id!r}")
        if not isinstance(self.cache_salt, str):
            raise TypeError(f"cache_salt: expected a string, got {self.cache_salt!r}")
        try:
            self.cache_salt.encode()
        except UnicodeEncodeError:
            raise ValueError(f"cache_salt: expected text that UTF-8 can encode, got {self.cache_salt!r}") from None
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"params: expected SamplingParams, got {self.params!r}")
        if self.params.seed is None:
            self.params = replace(self.params, seed=fresh_seed())
        self.prompt_ids = check_token_ids("prompt_ids", self.prompt_ids)
        if min(self.prompt_ids, default=0) < 0:
            place = next(i for i, token in enumerate(self.prompt_ids) if token < 0)
            check_int(f"prompt_ids[{place}]", self.prompt_ids[place], 0)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output as far as they are known, a fresh list."""
        return self.prompt_ids + self.output_ids

    @cached_property
    def view(self) -> "Tokens":
        """`tokens` without a copy: it follows the request."""
        return Tokens(self)

    @property
    def token_ids(self) -> "Tokens":
        """The view, by the name that model states know."""
        return self.view

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.pending

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_decoding(self) -> bool:
        """Admitted, with an output, and only the last token not computed yet. An admitted request that is not decoding
        is prefilling, be it over its prompt or, after a preemption, over prompt and outputs."""
        return self.index >= 0 and bool(self.output_ids) and self.num_computed == self.num_tokens - 1


class Tokens(Sequence):
    """The tokens of a request, read in place: `len` and single ones at no cost, slices as lists of their own."""

    def __init__(self, request: Request):
        # the lists, not the request: it holds this view, and both go when the last user lets go
        self._prompt, self._output = request.prompt_ids, request.output_ids

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    def __eq__(self, other) -> bool:
        """Equal to a list or tuple of the same tokens, as a drafter may compare; two views only if they are one."""
        return self is other or (isinstance(other, (list, tuple)) and self[:] == list(other))

    __hash__ = object.__hash__  # a view stands for its request

    def __getitem__(self, place):
        prompt = len(self._prompt)
        if isinstance(place, slice):
            begin, end, step = place.indices(len(self))
            if step != 1:
                return [self[i] for i in range(begin, end, step)]
            return self._prompt[begin:end] + self._output[max(begin - prompt, 0) : max(end - prompt, 0)]
        if not -len(self) <= place < len(self):
            raise IndexError(f"token {place} of {len(self)}")
        place %= len(self)
        return self._prompt[place] if place < prompt else self._output[place - prompt]
