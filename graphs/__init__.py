from .packing import PackedParameters, pack_parameters

__all__ = ["PackedParameters", "pack_parameters"]
