"""Ready-made layers over a `ReplayCache`, with the parameter names of the public models: worked examples as well."""

from .gdn import GatedDeltaNet
from .kda import KimiDeltaAttention
from .mamba2 import Mamba2Mixer

__all__ = ["GatedDeltaNet", "KimiDeltaAttention", "Mamba2Mixer"]
