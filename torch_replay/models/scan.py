"""The chunked scans of the recurrences, differentiable, as training calls them. Prefill runs the ops over them."""

from ..ops.scan.naive import delta_scan, kda_scan, ssd_scan

__all__ = ["delta_scan", "kda_scan", "ssd_scan"]
