"""Limits and choices of an engine."""

from dataclasses import dataclass
from typing import Optional

import torch

from ..ops.check import EIGHT_BIT, FLOAT


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of an engine. Lengths are in tokens.

    max_num_seqs: requests that run together. max_model_len: context, None for the model's. num_blocks: blocks of each
    KV group including the null block, None for enough to run max_num_seqs requests of full length. num_spec: drafts a
    step at most. window: W, ring rows before a checkpoint is rewritten. ring_len: R, None for W + 1 + num_spec.
    replay: False writes the recurrent state at every step. prefill_budget, chunk_size, prefill_rows: prompt tokens a
    step, prompt tokens a request a step, requests that prefill in one step. compiled: False runs the decode step
    eagerly.

    prefix_cache: requests take over what earlier ones with the same first tokens computed, see `prefix_cache`.
    state_block_size: state-space layers can be taken over at multiples of it, None for block_size; must divide the
    attention window of a model with sliding windows. num_snapshots: states kept for that, None for a few a request.

    dtype, state_dtype, ring_dtype: of activations and KV caches, of recurrent states, and of the rings (None: see
    `memory.default_ring_dtype`). float32, bfloat16 or float16; states also float8_e4m3fn and int8 with a float32 scale
    for each row, if they are replayed. stochastic_rounding: states below float32 that a decode step rewrites or
    publishes are rounded up or down at random, right on average (prefill rounds to nearest, once a chunk). What is
    drawn depends on the steps since the engine was made, and text with it.

    startup_cache: `warm_up` keeps what it compiled in the user's cache folder and takes it from there at the next
    start, see `startup_cache`; the environment variable TORCH_REPLAY_STARTUP_CACHE=0 turns that off too.

    exact_decoder_replay: a model with `decoder_replay_layers` prefills as many tokens there as make no difference.

    decode_sizes: rows of the compiled decode steps, of which each step uses the smallest that holds its requests. None:
    on a GPU 1, 4, 16, ... and max_num_seqs, elsewhere max_num_seqs alone. With num_spec each comes with and without
    drafts on a GPU. run_ahead: launch a decode step before the results of the last one are there, where nothing but the
    end of a request could depend on them: without drafts, prompts and ranks. None: on a GPU.

    compiled_prefill: prompt chunks run compiled too, see `graphs.prefill.PrefillStep`. None: on a GPU, if decode steps
    do; elsewhere compiling takes longer than many prompts gain.
    """

    max_num_seqs: int = 8
    max_model_len: Optional[int] = None
    block_size: int = 16
    num_blocks: Optional[int] = None
    num_spec: int = 0
    window: int = 16
    ring_len: Optional[int] = None
    replay: bool = True
    prefill_budget: int = 512
    chunk_size: int = 256
    prefill_rows: int = 4
    compiled: bool = True
    prefix_cache: bool = False
    state_block_size: Optional[int] = None
    num_snapshots: Optional[int] = None
    exact_decoder_replay: bool = False
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    ring_dtype: Optional[torch.dtype] = None
    stochastic_rounding: bool = False
    startup_cache: bool = True
    decode_sizes: Optional[tuple[int, ...]] = None
    run_ahead: Optional[bool] = None
    compiled_prefill: Optional[bool] = None

    def __post_init__(self):
        for name in ("max_num_seqs", "block_size", "window", "prefill_budget", "chunk_size", "prefill_rows"):
            self._require(name, 1)
        self._require("num_spec", 0)
        for name, least in (("max_model_len", 2), ("num_blocks", 2), ("state_block_size", 1),
                            ("num_snapshots", 1), ("ring_len", self.window + 1 + self.num_spec)):
            if getattr(self, name) is not None:
                self._require(name, least)
        if self.num_spec + 1 > self.window:
            raise ValueError(f"num_spec is {self.num_spec}, expected less than window = {self.window}")
        self._check_dtypes()
        if self.decode_sizes is not None:
            sizes = sorted(set(self.decode_sizes))
            if not sizes or sizes[0] < 1 or sizes[-1] != self.max_num_seqs:
                raise ValueError(f"decode_sizes is {self.decode_sizes!r}, expected sizes from 1 to max_num_seqs = "
                                 f"{self.max_num_seqs}, the largest included")

    def _check_dtypes(self) -> None:
        states = FLOAT + EIGHT_BIT if self.replay else FLOAT  # the plain update has no row scales
        for name, allowed in (("dtype", FLOAT), ("state_dtype", states), ("ring_dtype", (None, *FLOAT))):
            if getattr(self, name) not in allowed:
                where = "" if name != "state_dtype" or self.replay else " with replay=False"
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {' or '.join(map(str, allowed))}{where}")
        if not isinstance(self.stochastic_rounding, bool):
            raise ValueError(f"stochastic_rounding is {self.stochastic_rounding!r}, expected True or False")
        if self.stochastic_rounding and (self.state_dtype == torch.float32 or not self.replay):
            why = "of float32, which rounds nothing" if self.replay else "that are written at every step (replay=False)"
            raise ValueError(f"stochastic_rounding is True, expected False for states {why}")

    def _require(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, expected an integer of at least {least}")
