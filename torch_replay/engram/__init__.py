"""Engram: n-gram memory. Hash constants, compressed vocabulary, tables and the layer; the ops are in `ops/engram`."""

from .hashing import NGramHash, next_primes
from .layer import Engram, EngramStore
from .tables import DeviceTable, MappedTable, PinnedTable, quantize_rows
from .vocabulary import compress_vocabulary

__all__ = ["DeviceTable", "Engram", "EngramStore", "MappedTable", "NGramHash", "PinnedTable", "compress_vocabulary",
           "next_primes", "quantize_rows"]
