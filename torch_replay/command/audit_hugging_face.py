"""The decode step of a Hugging Face model folder, as `torch-replay audit` runs it."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

TOKENS, LENGTH = 6, 64  # decoded in a sweep; of the cache


def folder_target(folder: str | Path, device: str = "cpu") -> tuple[Callable, Callable]:
    """The forward of one token with the model's cache, and a drive of it for `graphs.audit.audit`.

    A sweep decodes a few tokens from position 1 on, after a prompt of one token. The cache is a `StaticCache` where the
    model takes one, else what the model makes itself at the prompt; it is written in place from step to step.

    Raises ValueError if transformers is not installed or cannot load the folder as a causal language model.
    """
    try:
        from transformers import AutoModelForCausalLM, StaticCache
    except ImportError:
        raise ValueError("a Hugging Face model folder needs transformers: in the clone, pip install '.[hf]'") from None
    try:
        model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval().requires_grad_(False)
    except Exception as error:
        raise ValueError(f"{folder}: transformers cannot load it ({type(error).__name__}: {error})") from None

    # the argument's name changed from one release of transformers to another
    argument = next((name for name in ("cache", "past_key_values", "cache_params")
                     if name in inspect.signature(model.forward).parameters), "past_key_values")

    def start() -> object:
        """The cache after a prompt of one token."""
        prompt = torch.ones(1, 1, dtype=torch.int64, device=device)
        try:
            cache = StaticCache(config=model.config, max_cache_len=LENGTH)
            model(input_ids=prompt, use_cache=True, **{argument: cache})
            return cache
        except Exception as error:
            warnings.warn(f"{type(model).__name__} takes no StaticCache ({type(error).__name__}: {error}); the audit "
                          "uses the cache that it makes itself", stacklevel=2)
            out = model(input_ids=prompt, use_cache=True)
            return next(out[name] for name in ("cache", "past_key_values", "cache_params") if out.get(name) is not None)

    with torch.no_grad():
        cache = start()
    static = isinstance(cache, StaticCache)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def step(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        places = {"position_ids": position_ids} if takes_positions else {}
        return model(input_ids=input_ids, use_cache=True, **places, **{argument: cache}).logits

    def drive(call: Callable) -> None:
        nonlocal cache
        if not static:
            cache = start()
        else:
            cache.reset()
            model(input_ids=torch.ones(1, 1, dtype=torch.int64, device=device), use_cache=True, **{argument: cache})
        for position in range(1, 1 + TOKENS):
            token, at = torch.tensor([[[position % 7 + 1]], [[position]]], dtype=torch.int64, device=device)
            call(token, at)

    return step, drive
