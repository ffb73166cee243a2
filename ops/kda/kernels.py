"""Launchers of the Kimi Delta Attention ops: the gated delta rule's kernels, with a decay per key channel.

Those kernels tell the families apart by the inputs alone: `a` and `g_ring` have a dimension more here.
"""

from ..gdn.kernels import gdn_materialize as kda_materialize
from ..gdn.kernels import gdn_replay as kda_replay
from ..gdn.kernels import gdn_update as kda_update

__all__ = ["kda_materialize", "kda_replay", "kda_update"]
