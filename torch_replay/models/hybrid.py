"""`HybridModel`: a language model whose residual sublayers follow any pattern of layer kinds, and its folder format.

A model folder holds `config.json`, `model.safetensors` (floats in 16 bits) and `tokenizer.json`.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..engram import Engram, EngramStore, MappedTable, NGramHash, PinnedTable
from .config import HybridConfig
from .layers import MLP, Attention, GDNMixer, KDAMixer, Mamba2Mixer, RMSNorm, rope_rows, rope_table

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
ENGRAM_TABLE = "engram.weight"
TOKENIZER_FILE = "tokenizer.json"
_OUTPUTS = {"engram": "kv_proj", "kda": "o_proj"}  # projections into the residual stream that have other names


class Sublayer(nn.Module):
    """One residual step, `x + mixer(norm(x))`; an engram mixer has norms of its own, so `norm` changes nothing there.

    `dropout` (per element) and `skip` (the chance that a whole sequence goes without this sublayer) act in training
    only; both are plain attributes, zero unless a training script sets them.
    """

    def __init__(self, kind: str, config: HybridConfig, device=None, dtype=None):
        super().__init__()
        self.kind = kind
        self.dropout = self.skip = 0.0
        own_norm = kind == "engram"
        self.norm = nn.Identity() if own_norm else RMSNorm(config.hidden_size, config.norm_eps, device, dtype)
        self.mixer = _build_mixer(kind, config, device, dtype)

    def forward(self, x, context):
        """x `[B,T,hidden]` -> the same; context: `(cos, sin)` from `rope_rows`, of an engram layer from the store."""
        y = self.mixer(self.norm(x), context)
        if self.training and self.dropout:
            y = F.dropout(y, self.dropout)
        if self.training and self.skip:
            y = y * (torch.rand(y.shape[0], 1, 1, dtype=torch.float32, device=y.device) >= self.skip)
        return x + y


class HybridModel(nn.Module):
    """Tied embedding, the sublayers of `config.pattern`, final norm. Weights are random until loaded.

    Matrices and norms have `dtype`; A_log, dt_bias, D and the RoPE table are float32 always, so choose the dtype here
    or in `from_pretrained` and not with `.to(dtype)`.
    """

    def __init__(self, config: HybridConfig, device=None, dtype=torch.float32, table_device=None):
        super().__init__()
        self.config = config
        self.engram = _build_store(config, device, dtype, table_device) if "engram" in config.pattern else None
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(Sublayer(kind, config, device, dtype) for kind in config.pattern)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, device, dtype)
        self.register_buffer("rope", rope_table(config, device), persistent=False)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self):
        self.embedding.weight.normal_(std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=0.5 * module.in_features**-0.5)
        for layer in self.layers:  # what enters the residual stream stays of one size however deep the model is
            out = getattr(layer.mixer, _OUTPUTS.get(layer.kind, "out_proj")).weight
            if layer.kind == "engram":
                out = out[-self.config.hidden_size :]
            out.mul_(len(self.layers) ** -0.5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Differentiable forward of whole sequences: ids `[B,T]` (T <= max_position) -> logits `[B,T,vocab_size]`.

        Raises ValueError for ids that are not two-dimensional, empty, or longer than the context.
        """
        if input_ids.dim() != 2 or not 1 <= input_ids.shape[1] <= self.config.max_position:
            expected = f"[batch, 1..{self.config.max_position}]"
            raise ValueError(f"input_ids: got shape {list(input_ids.shape)}, expected {expected}")
        return self.logits(self.hidden(input_ids))

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids `[B,T]` -> the residual stream after the last sublayer, `[B,T,hidden]`."""
        rope = rope_rows(self.rope, torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.embedding(input_ids)
        memories = iter(() if self.engram is None else self.engram(input_ids))
        for layer in self.layers:
            x = layer(x, next(memories) if layer.kind == "engram" else rope)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream `[..., hidden]` -> logits `[..., vocab_size]` by final norm and the tied embedding."""
        return F.linear(self.norm(x), self.embedding.weight)

    def num_parameters(self) -> int:
        """The number of trained values; the tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Writes `config.json` and `model.safetensors`, all weights rounded to the 16-bit `dtype`; makes the folder.

        Raises ValueError for another dtype, and for a model whose n-gram table was put elsewhere than its parameters.
        """
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype: got {dtype}, expected torch.float16 or torch.bfloat16")
        if self.engram is not None and self.engram.table is not None:
            raise ValueError(f"engram: got a {type(self.engram.table).__name__}, expected the table to be a parameter")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save(folder / CONFIG_FILE)
        tensors = {name: value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
                   for name, value in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: str | Path, device="cpu", dtype=torch.float32,
                        engram_table: str = "device") -> "HybridModel":
        """The model a folder holds, in evaluation mode, matrices in `dtype` on `device`.

        engram_table: where the n-gram table of a model with engram layers goes: "device", as any weight; "pinned", into
        host memory that a GPU reads; "mapped", nowhere: the host reads rows from the file. The last two keep the file's
        16 bits and never hold the table on the device.

        Raises FileNotFoundError for a missing folder or file and ValueError for a file that cannot be read, for a bad
        configuration, for weights whose names or shapes are not those of the configuration, and for another place.
        """
        if engram_table not in ("device", "pinned", "mapped"):
            raise ValueError(f"engram_table: got {engram_table!r}, expected 'device', 'pinned' or 'mapped'")
        folder = _existing_folder(folder)
        elsewhere = engram_table != "device"
        model = cls(HybridConfig.load(folder / CONFIG_FILE), device, dtype, "meta" if elsewhere else None)
        path = _existing_file(folder / WEIGHTS_FILE)
        wanted = model.state_dict()
        try:
            with safe_open(path, framework="pt") as weights:
                names = list(weights.keys())
                _check_weights(path, {name: weights.get_slice(name).get_shape() for name in names}, wanted)
                for name, value in wanted.items():
                    if not (elsewhere and name == ENGRAM_TABLE):
                        value.copy_(weights.get_tensor(name))
        except SafetensorError as error:
            raise ValueError(f"{path}: not readable as safetensors ({error})") from error
        if elsewhere and model.engram is not None:
            table = MappedTable(path, ENGRAM_TABLE)
            model.engram.place(PinnedTable(table.weight, device=device) if engram_table == "pinned" else table)
        return model.eval()


def load_tokenizer(folder: str | Path):
    """The `tokenizers.Tokenizer` of a model folder; FileNotFoundError without it, ValueError if it cannot be read.

    Decode with `skip_special_tokens=False` to get back exactly the text that was encoded.
    """
    from tokenizers import Tokenizer

    path = _existing_file(_existing_folder(folder) / TOKENIZER_FILE)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not readable as a tokenizer ({error})") from error


def small_model_dir() -> Path:
    """The folder of the small trained model that ships with the package."""
    return Path(__file__).resolve().parent / "small"


def _build_mixer(kind, config, device, dtype):
    if kind == "mamba2":
        return Mamba2Mixer(config, device, dtype)
    if kind == "gdn":
        return GDNMixer(config, device, dtype)
    if kind == "kda":
        return KDAMixer(config, device, dtype)
    if kind == "mlp":
        return MLP(config, device, dtype)
    if kind == "engram":
        entry_size = config.engram_columns * config.engram_dim
        return Engram(config.hidden_size, entry_size, config.norm_eps, device=device, dtype=dtype)
    return Attention(config, config.sliding_window if kind == "swa" else None, device, dtype)


def _build_store(config, device, dtype, table_device):
    layers = tuple(index for index, kind in enumerate(config.pattern) if kind == "engram")
    constants = NGramHash(layers, config.engram_order, config.engram_heads, config.engram_table_size,
                          config.engram_vocab_size or config.vocab_size)
    sizes = config.engram_dim, config.vocab_size, config.eos_token_ids[0]
    return EngramStore(constants, *sizes, device, dtype, table_device)


def _existing_folder(folder):
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder, expected a model folder with {CONFIG_FILE}")
    return folder


def _existing_file(path):
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, expected a model folder to hold {path.name}")
    return path


def _check_weights(path, found, wanted):
    for name in sorted(set(wanted) | set(found)):
        if name not in found:
            raise ValueError(f"{path}: got no tensor {name}, expected one of shape {list(wanted[name].shape)}")
        if name not in wanted:
            raise ValueError(f"{path}: got a tensor {name}, expected only those of the configuration")
        if list(found[name]) != list(wanted[name].shape):
            raise ValueError(f"{path}: {name}: got shape {list(found[name])}, expected {list(wanted[name].shape)}")
