"""`replace`, `restore` and `make_cache`: the mixers of a loaded model, swapped in place."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Optional

import torch
import transformers
from torch import nn

from ...ops.backends import set_backend
from .cache import GenerationCache
from .generation import ReplayGeneration
from .mixers import FAMILIES, SILU

TESTED = ("5.24",)  # releases of transformers
PACKED = ("cu_seq_lens_q", "seq_idx")  # arguments of a forward over packed rows


@dataclass(frozen=True)
class Options:
    """What `replace` was called with."""

    window: int
    num_spec: int
    match: Optional[str]


@dataclass(frozen=True)
class Report:
    """What `replace` did. replaced: class of layer -> how many."""

    model: str
    replaced: dict[str, int]
    window: int
    num_spec: int
    version: str

    def __str__(self) -> str:
        layers = ", ".join(f"{count} {name}" for name, count in self.replaced.items())
        return (f"torch_replay: {self.model} (transformers {self.version}): {layers}; window {self.window}, drafts of "
                f"up to {self.num_spec} tokens")


class _Replaced:
    """Part of a swapped class. It is saved and copied as the class it stands for and its options."""

    replay: Options

    def __reduce_ex__(self, protocol: int) -> tuple:
        _, _, *rest = super().__reduce_ex__(protocol)
        return (_blank, (_original(type(self)), self.replay), *rest)


class _Mixer(_Replaced):
    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
        if not isinstance(cache, GenerationCache):
            return super().forward(hidden_states, cache, attention_mask, **kwargs)
        for name in PACKED:
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} is given, but a cache of make_cache takes rows, padded on the left")
        return cache.run(self, hidden_states, attention_mask)


class _Model(_Replaced, ReplayGeneration):
    def _new_cache(self, *args: Any) -> GenerationCache:
        return make_cache(self, *args)


def _original(kind: type) -> type:
    return kind.__bases__[1]  # see `_swapped`


def _swapped(kind: type, options: Options) -> type:
    """The class that instances of `kind` become. Its name is the original's, which is what configurations save."""
    part = _Mixer if kind.__name__ in FAMILIES else _Model
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (part, kind), {**names, "replay": options})


def _blank(kind: type, options: Options) -> nn.Module:
    swapped = _swapped(kind, options)
    return swapped.__new__(swapped)


def _check_version() -> None:
    if ".".join(transformers.__version__.split(".")[:2]) not in TESTED:
        raise RuntimeError(f"transformers is {transformers.__version__}, and this was tested with {', '.join(TESTED)}: "
                           "pip install 'torch_replay[hf]' takes one of them")


def _mixers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ in FAMILIES]


def _check(model: nn.Module, mixers: list[nn.Module]) -> None:
    """Raises ValueError, naming what is wrong, for a model that could not be computed here."""
    name = type(model).__name__
    others = Counter(type(module).__name__ for module in model.modules()
                     if hasattr(module, "conv1d") and hasattr(module, "layer_idx") and module not in mixers)
    known = ", ".join(FAMILIES)
    if not mixers or others:
        what = f"its {', '.join(others)} is not known here" if others else "it has no layer to replace"
        raise ValueError(f"replace: {name}: {what}; expected a model with some of {known}")
    first = mixers[0]
    family = FAMILIES[type(first).__name__]
    for mixer in mixers:
        label = f"replace: {name}: layer {mixer.layer_idx} ({type(mixer).__name__})"
        missing = [attribute for attribute in family.needs if not hasattr(mixer, attribute)]
        if type(mixer).__name__ != type(first).__name__ or missing:
            raise ValueError(f"{label} has no {', '.join(missing)}" if missing else
                             f"{label} is of another class than the first ({type(first).__name__})")
        if family.sizes(mixer) != family.sizes(first) or mixer.conv_kernel_size != first.conv_kernel_size:
            raise ValueError(f"{label} is of sizes {family.sizes(mixer)}, expected those of the first, "
                             f"{family.sizes(first)}")
        if mixer.activation not in SILU:
            raise ValueError(f"{label} has the activation {mixer.activation!r}, expected one of {SILU}")
        devices = {str(parameter.device) for parameter in mixer.parameters()}
        if devices != {str(first.conv1d.weight.device)} or "meta" in devices:
            raise ValueError(f"{label} is on {sorted(devices)}, expected all layers on one device, none offloaded")


def replace(model: nn.Module, window: int = 16, num_spec: int = 0, backend: Optional[str] = None,
            match: Optional[str] = None) -> Report:
    """Lets the recurrent layers of a loaded transformers model decode from a checkpoint and a ring, in place.

    Each such layer, and the model where it can `generate`, gets a subclass of its class that computes with this
    library's ops when it is called with a cache of `make_cache`, which `generate` makes by itself. Parameters, buffers,
    hooks and state_dict stay; so does every forward without a cache or with one of transformers' own, training
    included. `restore` undoes it. Deep copies, `save_pretrained` and `torch.save` work as before.

    Args:
        model: Mamba2, Bamba, NemotronH, GraniteMoeHybrid, FalconH1, Zamba2 (Mamba-2), Qwen3Next, Qwen3_5, Qwen3_5Moe,
            OlmoHybrid (gated delta rule) or KimiLinear (Kimi delta attention), or a part of one.
        window: W, tokens after which a state is written. num_spec: drafted tokens that a forward may verify at once
            (`generate` takes what its own arguments ask for, if that is more). Both are defaults of `make_cache`.
        backend: as `torch_replay.set_backend`, for this family's decode ops and the process; None leaves it.
        match: None: the model's `time_step_limit` holds for prompts and decode alike. "transformers": as there, where
            it holds for prompts only, and NemotronH sets one of its own.

    Returns:
        A report, which is printed too.

    Raises:
        ValueError: nothing to replace, a model that is not known, was replaced before, or lies on several devices; an
            argument out of range. RuntimeError: a version of transformers that this was not tested with. Nothing was
            changed then.
    """
    _check_version()
    if window < 1 or num_spec < 0 or num_spec >= window:
        raise ValueError(f"replace: window is {window} and num_spec {num_spec}, expected 1.. and 0..window - 1")
    if match not in (None, "transformers"):
        raise ValueError(f"replace: match is {match!r}, expected None or 'transformers'")
    if any(isinstance(module, _Replaced) for module in model.modules()):
        raise ValueError(f"replace: {type(model).__name__} was replaced already; restore it first")
    mixers = _mixers(model)
    _check(model, mixers)
    options = Options(window, num_spec, match)
    if backend is not None:
        set_backend(backend, [f"{FAMILIES[type(mixers[0]).__name__].name}_replay", "conv_replay"])
    report = Report(type(model).__name__, dict(Counter(type(mixer).__name__ for mixer in mixers)), window, num_spec,
                    transformers.__version__)
    for module in mixers + ([model] if hasattr(model, "generate") else []):
        module.__class__ = _swapped(type(module), options)
    print(report)
    return report


def restore(model: nn.Module) -> int:
    """Undoes `replace`. Returns how many layers were put back; raises ValueError if there is none."""
    replaced = [module for module in model.modules() if isinstance(module, _Replaced)]
    if not replaced:
        raise ValueError(f"restore: {type(model).__name__} was not replaced")
    for module in replaced:
        module.__class__ = _original(type(module))
    return len(_mixers(model))


def make_cache(model: nn.Module, max_batch: int = 1, max_len: Optional[int] = None, window: Optional[int] = None,
               num_spec: Optional[int] = None, state_dtype: torch.dtype = torch.float32) -> GenerationCache:
    """The cache of a replaced model, for `model(.., cache=cache)` or `model.generate(.., past_key_values=cache)`.

    Args:
        max_batch: rows at most, beams included. max_len: tokens that attention layers have room for, at fixed
            addresses: what a compiled step needs. None: they grow.
        window, num_spec: as in `replace`, whose values are the defaults. state_dtype: of the checkpoints, any of
            `ReplayCache`'s.

    Raises:
        ValueError: a model that was not replaced, a size out of range.
    """
    mixers = [mixer for mixer in _mixers(model) if isinstance(mixer, _Mixer)]
    if not mixers:
        raise ValueError(f"make_cache: {type(model).__name__} was not replaced; call replace(model) first")
    options = mixers[0].replay
    window = options.window if window is None else window
    num_spec = options.num_spec if num_spec is None else num_spec
    if window < 1 or num_spec < 0 or num_spec >= window:
        raise ValueError(f"make_cache: window is {window} and num_spec {num_spec}, expected 1.. and 0..window - 1")
    if max_batch < 1 or (max_len is not None and max_len < 1):
        raise ValueError(f"make_cache: max_batch is {max_batch} and max_len {max_len}, expected 1 or more")
    config: Any = model.config.get_text_config(decoder=True)
    return GenerationCache(config, mixers, max_batch, max_len, window, num_spec, mixers[0].conv1d.weight.dtype,
                           state_dtype, options.match)
