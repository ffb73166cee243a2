"""Hugging Face models that decode from a checkpoint and a ring. Needs `transformers` (pip install 'torch_replay[hf]').

    from torch_replay.integrations.transformers import replace

    replace(model)                         # a loaded model; prints what it replaced
    model.generate(**inputs, max_new_tokens=100)

`make_cache` gives the cache for a loop of your own, or for `torch.compile`; `restore` undoes it.
"""

from .cache import GenerationCache
from .replace import Report, make_cache, replace, restore

__all__ = ["GenerationCache", "Report", "make_cache", "replace", "restore"]
