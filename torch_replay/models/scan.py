"""The chunked scans of the two recurrences, differentiable, as training calls them. Prefill runs the ops over them."""

from ..ops.scan.naive import delta_scan, ssd_scan

__all__ = ["delta_scan", "ssd_scan"]
