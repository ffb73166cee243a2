"""The configuration of a hybrid model: plain sizes, and the pattern of its residual sublayers."""

import dataclasses
import json
import math
from pathlib import Path

MODEL_TYPE = "torch_replay_hybrid"
LAYER_KINDS = ("mamba2", "gdn", "swa", "full", "mlp", "engram", "kda")
_REAL_FIELDS = ("rope_theta", "norm_eps")


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Sizes of a `HybridModel`; every pattern needs all of them, so that any pattern is one edit away.

    `pattern` names the residual sublayers from the embedding to the final norm, each one of `LAYER_KINDS`. Letters in
    the comments are those that the ops use for the same size. The last `decoder_replay_layers` sublayers, sliding
    windows and MLPs alone, an engine runs on the last window of a prompt only.

    Raises ValueError, naming field, value got and value expected, when a size is no positive integer, a head count does
    not divide by its group count, a kind is unknown, or a sublayer of another kind would be in that tail.
    """

    vocab_size: int
    hidden_size: int
    pattern: tuple[str, ...]
    mamba_heads: int  # H
    mamba_head_dim: int  # P
    mamba_state_dim: int  # N
    mamba_groups: int  # Gr
    gdn_key_heads: int  # H
    gdn_value_heads: int  # HV
    gdn_key_dim: int  # K
    gdn_value_dim: int  # V
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int  # SW: a token sees itself and the SW - 1 tokens before it
    mlp_hidden: int
    max_position: int
    eos_token_id: int | tuple[int, ...]  # tokens that end a text; the first also stands for missing history
    conv_width: int = 4
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    decoder_replay_layers: int = 0
    kda_heads: int = 4  # H and HV
    kda_head_dim: int = 64  # K and V
    engram_order: int = 3  # n: n-grams of 2 to n tokens
    engram_heads: int = 4  # H, table rows read for each order
    engram_dim: int = 16  # D, values of a table row
    engram_table_size: int = 4096  # rows of a column, about: where the search for primes begins
    engram_vocab_size: int = 0  # compressed ids; 0: vocab_size, every token its own

    def __post_init__(self):
        _check_pattern(self.pattern)
        object.__setattr__(self, "pattern", tuple(self.pattern))
        for field in dataclasses.fields(self):
            if field.name in _REAL_FIELDS:
                _check_real(field.name, getattr(self, field.name))
            elif field.name not in ("pattern", "eos_token_id", "decoder_replay_layers", "engram_vocab_size"):
                _check_size(field.name, getattr(self, field.name))
        _check_divides(self, "mamba_heads", "mamba_groups")
        _check_divides(self, "gdn_value_heads", "gdn_key_heads")
        _check_divides(self, "num_heads", "num_kv_heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even number (RoPE turns pairs)")
        if self.engram_order < 2:
            raise ValueError(f"engram_order: got {self.engram_order}, expected 2 or more")
        size = self.engram_vocab_size
        if not _is_int(size) or not 0 <= size <= self.vocab_size:
            raise ValueError(f"engram_vocab_size: got {size!r}, expected an integer in [0, {self.vocab_size}]")
        eos = self.eos_token_id
        if isinstance(eos, list):
            object.__setattr__(self, "eos_token_id", tuple(eos))
        each = eos if isinstance(eos, (list, tuple)) else [eos]
        if not each or not all(_is_int(token) and 0 <= token < self.vocab_size for token in each):
            raise ValueError(f"eos_token_id: got {eos!r}, expected an integer in [0, {self.vocab_size}), or several")
        _check_tail(self.decoder_replay_layers, self.pattern)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a text."""
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def decoder_replay_windows(self) -> int:
        """Sliding-window layers of the tail that `decoder_replay_layers` names."""
        return self.pattern[len(self.pattern) - self.decoder_replay_layers :].count("swa")

    @property
    def mamba_inner(self) -> int:
        """Width H * P of the Mamba-2 inner stream."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def mamba_conv_dim(self) -> int:
        """Channels of the Mamba-2 short convolution: x, then B, then C."""
        return self.mamba_inner + 2 * self.mamba_groups * self.mamba_state_dim

    @property
    def gdn_conv_dim(self) -> int:
        """Channels of the gated-delta-rule short convolution: q, then k, then v."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def kda_conv_dim(self) -> int:
        """Channels of the Kimi Delta Attention short convolution: q, then k, then v."""
        return 3 * self.kda_heads * self.kda_head_dim

    @property
    def engram_columns(self) -> int:
        """Table rows that a token reads in one engram layer."""
        return (self.engram_order - 1) * self.engram_heads

    def to_dict(self) -> dict:
        """A dict that `json.dump` takes, with `model_type` added; `from_dict` reads it back."""
        return {"model_type": MODEL_TYPE, **dataclasses.asdict(self), "pattern": list(self.pattern)}

    @classmethod
    def from_dict(cls, values: dict) -> "HybridConfig":
        """The configuration a dict describes; ValueError for a missing or unknown field or another model type."""
        if not isinstance(values, dict):
            raise ValueError(f"config: got {type(values).__name__}, expected a JSON object")
        values = dict(values)
        kind = values.pop("model_type", None)
        if kind != MODEL_TYPE:
            raise ValueError(f"model_type: got {kind!r}, expected {MODEL_TYPE!r}")
        fields = dataclasses.fields(cls)
        unknown = sorted(set(values) - {field.name for field in fields})
        if unknown:
            raise ValueError(f"{unknown[0]}: unknown field, expected only {', '.join(f.name for f in fields)}")
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        missing = sorted(required - set(values))
        if missing:
            raise ValueError(f"{missing[0]}: missing, expected a value")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as indented JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "HybridConfig":
        """Reads what `save` wrote; FileNotFoundError without the file, ValueError if it is not such a JSON file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, expected a model's config.json")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not readable as JSON ({error})") from error
        return cls.from_dict(values)


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_size(name, value):
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a positive integer")


def _check_real(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}: got {value!r}, expected a positive finite number")


def _check_divides(config, whole, part):
    count, groups = getattr(config, whole), getattr(config, part)
    if count % groups:
        raise ValueError(f"{whole}: got {count}, expected a multiple of {part} = {groups}")


def _check_pattern(pattern):
    if not isinstance(pattern, (tuple, list)) or not pattern:
        raise ValueError(f"pattern: got {pattern!r}, expected a non-empty list of layer kinds")
    for kind in pattern:
        if kind not in LAYER_KINDS:
            raise ValueError(f"pattern: got {kind!r}, expected each entry to be one of {', '.join(LAYER_KINDS)}")


def _check_tail(count, pattern):
    if not _is_int(count) or not 0 <= count <= len(pattern):
        raise ValueError(f"decoder_replay_layers: got {count!r}, expected an integer in [0, {len(pattern)}]")
    for index in range(len(pattern) - count, len(pattern)):
        if pattern[index] not in ("swa", "mlp"):
            raise ValueError(f"decoder_replay_layers: got {count}, which takes in sublayer {index} of kind "
                             f"{pattern[index]}, expected a tail of swa and mlp alone: the others need every token")
    if count and "swa" not in pattern[len(pattern) - count :]:
        raise ValueError(f"decoder_replay_layers: got {count}, expected a tail with a swa layer")
