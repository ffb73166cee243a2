"""torch_replay: hybrid language models that decode fast and correctly under `torch.compile`.

Importing it registers the custom ops (`torch.ops.torch_replay.*`).
"""

import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "ops")):
    # Inside a clone this folder shadows an installed copy, and ops/ and graphs/ lie beside it, not in it.
    __path__.append(_os.path.dirname(_here))

from . import ops  # noqa: E402
from .ops.backends import set_backend  # noqa: E402

if _TYPE_CHECKING:  # what `__getattr__` finds, for a type checker
    from . import nn as nn
    from .engine.config import EngineConfig as EngineConfig
    from .engine.engine import Engine as Engine
    from .engine.output import RequestOutput as RequestOutput
    from .engine.parallel import RankFailure as RankFailure
    from .engine.parallel import StepAgreement as StepAgreement
    from .engine.request import SamplingParams as SamplingParams
    from .models import HybridConfig as HybridConfig
    from .models import HybridModel as HybridModel
    from .states.builders import Builder as Builder
    from .states.builders import FullAttentionBuilder as FullAttentionBuilder
    from .states.builders import SlidingWindowBuilder as SlidingWindowBuilder
    from .states.builders import register_builder as register_builder
    from .states.groups import KVGroup as KVGroup
    from .states.model_state import DefaultModelState as DefaultModelState
    from .states.model_state import ReplayModelState as ReplayModelState
    from .states.pools import ContextPools as ContextPools
    from .states.protocols import Memory as Memory
    from .states.protocols import RequestLike as RequestLike
    from .states.protocols import Sampling as Sampling
    from .states.replay_cache import ReplayCache as ReplayCache
    from .states.replay_context import ReplayContext as ReplayContext
    from .states.request_state import InputBatch as InputBatch
    from .states.request_state import RequestState as RequestState
    from .states.specialized_decode import SpecializedDecodeModelState as SpecializedDecodeModelState
    from .states.state_spec import StateGroup as StateGroup
    from .states.state_spec import StateLayer as StateLayer

__version__ = "0.1.0"
_LAZY = {
    "Engine": "engine.engine", "EngineConfig": "engine.config", "RequestOutput": "engine.output",
    "SamplingParams": "engine.request", "StepAgreement": "engine.parallel", "RankFailure": "engine.parallel",
    "ReplayCache": "states.replay_cache", "ReplayContext": "states.replay_context",
    "ContextPools": "states.pools", "StateGroup": "states.state_spec", "StateLayer": "states.state_spec",
    "DefaultModelState": "states.model_state", "ReplayModelState": "states.model_state",
    "SpecializedDecodeModelState": "states.specialized_decode",
    "RequestState": "states.request_state", "InputBatch": "states.request_state", "KVGroup": "states.groups",
    "register_builder": "states.builders", "FullAttentionBuilder": "states.builders",
    "SlidingWindowBuilder": "states.builders", "Builder": "states.builders",
    "Memory": "states.protocols", "Sampling": "states.protocols", "RequestLike": "states.protocols",
    "HybridConfig": "models", "HybridModel": "models",
}
__all__ = ["nn", "ops", "set_backend", *_LAZY]


def __dir__():
    return sorted({*globals(), *__all__})


def __getattr__(name: str):
    """Engine and models are imported on first use: the ops alone cost no more than torch itself."""
    if name in _LAZY or name == "nn":
        import importlib

        if name == "nn":
            return importlib.import_module(".nn", __name__)
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
