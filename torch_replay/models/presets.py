"""Geometries of public hybrid models, for measurements with random weights. Sizes only: no weights are read."""

from .config import HybridConfig

# sublayers of a 52-layer hybrid: M a Mamba-2 layer, - an MLP, * full attention
_PATTERN_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_LETTERS = {"M": "mamba2", "-": "mlp", "*": "full"}


def hybrid_8b(max_position: int = 8192) -> HybridConfig:
    """The geometry of Nemotron-H 8B (arXiv 2504.03624, table 1): 24 Mamba-2 layers, 4 of attention, 24 MLPs.

    Its MLP has two matrices of 21,504 columns; the gated one here has three, so 14,336 columns keep the weight count.
    """
    return HybridConfig(
        vocab_size=131072, hidden_size=4096, pattern=tuple(_LETTERS[letter] for letter in _PATTERN_8B), mamba_heads=128,
        mamba_head_dim=64, mamba_state_dim=128, mamba_groups=8, gdn_key_heads=1, gdn_value_heads=1, gdn_key_dim=64,
        gdn_value_dim=64, num_heads=32, num_kv_heads=8, head_dim=128, sliding_window=4096, mlp_hidden=14336,
        max_position=max_position, eos_token_id=0)


PRESETS = {"hybrid-8b": hybrid_8b}
