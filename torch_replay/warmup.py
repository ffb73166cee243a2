"""Warm-up of kernels; see `states.warmup`."""

from .states.warmup import (
    choose_windows,
    temporary_ring_state,
    warm_up_decode,
    warm_up_kernels,
    warm_up_lifecycle,
    warm_up_materializer,
    warm_up_replay_kernels,
)

__all__ = [
    "choose_windows",
    "temporary_ring_state",
    "warm_up_decode",
    "warm_up_kernels",
    "warm_up_lifecycle",
    "warm_up_materializer",
    "warm_up_replay_kernels",
]
