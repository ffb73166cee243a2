"""Hybrid language models: configuration, layers, the model itself, and the small trained model of the package."""

from .config import LAYER_KINDS, HybridConfig
from .hybrid import HybridModel, load_tokenizer, small_model_dir

__all__ = ["LAYER_KINDS", "HybridConfig", "HybridModel", "load_tokenizer", "small_model_dir"]
