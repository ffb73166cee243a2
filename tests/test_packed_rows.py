"""Packed rows, tokens [tokens, ...] with query_start_loc: they give what they give padded, and touch nothing else."""

import pytest
import torch
from harness import assert_refused, call, clone, compare, named, raw
from triton_harness import DEVICE, GPU, on_device, triton_kernel

from torch_replay.ops.backends import set_backend
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

DELTA = ("v", "q", "k", "a", "b")
TOKENS = {
    "mamba2_replay": ("x", "dt", "B", "C", "z"), "mamba2_update": ("x", "dt", "B", "C", "z", "token_slots"),
    "mamba2_prefill": ("x", "dt", "B", "C", "z"),
    "gdn_replay": DELTA, "gdn_update": (*DELTA, "token_slots"), "gdn_prefill": DELTA,
    "kda_replay": DELTA, "kda_update": (*DELTA, "token_slots"), "kda_prefill": DELTA,
    "conv_replay": ("x",), "conv_prefill": ("x",),
}
RAGGED = [next(s for s in samples(op) if "ragged" in s.id and "packed" not in s.id)
          for op in TOKENS]
KEPT = [s for op in TOKENS for s in samples(op) if "kept_ragged" in s.id]


def in_place(tokens: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """tokens [B, T, ...] packed from `starts` on, as columns of a wider tensor; what is no real token holds NaN."""
    rest = tokens.shape[2:]
    width = int(torch.tensor(rest).prod()) if rest else 1
    wide = tokens.new_full((int(starts[-1]) + 3, width + 5), float("nan") if tokens.is_floating_point() else 0)
    view = wide[:, 2 : 2 + width].unflatten(1, rest) if rest else wide[:, 2]
    for row, count in enumerate(lens.tolist()):
        view[int(starts[row]) : int(starts[row]) + count] = tokens[row, :count]
    return view


def pack(op: str, arguments: dict, spare: int, seed: int = 0) -> dict:
    """The call with packed rows, which begin at token 1 and own up to `spare` tokens more than are real."""
    lens, packed = arguments["query_lens"].cpu().long(), {name: clone(value) for name, value in arguments.items()}
    bound = arguments[TOKENS[op][0]].shape[1]
    more = torch.randint(0, spare + 1, lens.shape, generator=torch.Generator().manual_seed(seed))
    owned = (lens + more).clamp(max=bound)
    starts = 1 + torch.nn.functional.pad(owned.cumsum(0), (1, 0))
    for name in TOKENS[op]:
        if arguments[name] is not None:
            packed[name] = in_place(arguments[name], starts, lens)
    return packed | dict(query_start_loc=starts.to(arguments["slots"]), max_query_len=bound,
                         query_lens=packed["query_lens"] if spare else None)


def check(sample, spare: int, shift: int = 0, seed: int = 0) -> None:
    op = sample.op
    padded = named(op, *sample.make(DEVICE, seed=seed))
    slots = padded["slots"]
    packed = pack(op, padded, spare, seed)
    packed["query_start_loc"] = packed["query_start_loc"] + shift
    expected = call(op, padded)[0]
    (y,) = call(op, packed)
    want, starts = torch.zeros_like(y), packed["query_start_loc"].tolist()
    for row, count in enumerate(padded["query_lens"].tolist()):
        if slots[row] > 0:
            want[starts[row] : starts[row] + count] = expected[row, :count]
    compare(f"{sample}: y", y, want)
    assert not y[(want == 0).flatten(1).all(1)].any()  # exactly
    for name in OPS[op].mutates:
        if padded[name] is not None:
            compare(f"{sample}: {name}", packed[name], padded[name])


@pytest.mark.parametrize("backend", ["auto", "naive"])
@pytest.mark.parametrize("spare", [0, 2], ids=["all_real", "in_part"])
@pytest.mark.parametrize("sample", RAGGED + KEPT, ids=str)
def test_equals_padded(sample, spare, backend):
    """Lengths from 0 to T, padded rows that own tokens, NaN in every token that is not real, strided columns."""
    with set_backend(backend):
        for seed in range(3):
            check(sample, spare, seed=seed)


@pytest.mark.parametrize("sample", RAGGED, ids=str)
def test_negative_control(sample):
    """Rows that begin a token later are other rows."""
    with pytest.raises((AssertionError, ValueError)):
        check(sample, 0, shift=1)


# in the interpreter, which is slow, one of the delta rule's two families
ON_DEVICE = [s for s in (RAGGED + KEPT if GPU else RAGGED) if GPU or not ("prefill" in s.op or "kda" in s.op)]


@pytest.mark.parametrize("sample", ON_DEVICE, ids=str)
def test_kernels_equal_padded(sample):
    """The same by the Triton kernels."""
    with triton_kernel(sample.op):
        check(sample, spare=2)


test_kernels_equal_padded.pytestmark += on_device


@pytest.mark.parametrize("op", TOKENS)
def test_one_dtype_of_index_each(op):
    """query_start_loc and the other index tensors may differ in dtype; one row and one token are enough."""
    sample = next(s for s in samples(op) if s.id.startswith("packed_padded"))
    arguments = named(op, *sample.make())
    want = call(op, {name: clone(value) for name, value in arguments.items()})[0]
    other = torch.int32 if arguments["query_start_loc"].dtype == torch.int64 else torch.int64
    got = call(op, arguments | dict(query_start_loc=arguments["query_start_loc"].to(other)))[0]
    assert torch.equal(raw(got), raw(want))


def wrong(**change):
    return lambda arguments: arguments | {name: edit(arguments) for name, edit in change.items()}


REFUSED = {
    "no bound": (wrong(max_query_len=lambda a: None), "max_query_len is None, expected a bound for packed rows"),
    "bound alone": (wrong(query_start_loc=lambda a: None), "max_query_len is .* None for others"),
    "bound of 0": (wrong(max_query_len=lambda a: 0), "max_query_len is 0, expected 1 or more"),
    "too few starts": (wrong(query_start_loc=lambda a: a["query_start_loc"][:-1]), r"query_start_loc .* \[B\+1\] with"),
    "starts of floats": (wrong(query_start_loc=lambda a: a["query_start_loc"].float()), "query_start_loc is of dtype"),
    "rows go back": (wrong(query_start_loc=lambda a: a["query_start_loc"].flip(0)), ".*differences is -"),
    "beyond the tokens": (wrong(query_start_loc=lambda a: a["query_start_loc"] + 3), "query_start_loc is "),
    "longer than the bound": (wrong(max_query_len=lambda a: 1), ".*differences is "),
    "more real than owned": (wrong(query_lens=lambda a: a["query_start_loc"].diff() + (a["query_start_loc"][1:] < 1)
                                   + torch.tensor([0, 1, 0, 0, 0])), "query_lens is .* tokens of query_start_loc"),
}


@pytest.mark.parametrize("edit, message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("op", TOKENS)
def test_refused(op, edit, message):
    """Row bounds that cannot be right are named, before anything is written."""
    sample = next(s for s in samples(op) if s.id.startswith("packed_padded"))
    assert_refused(OPS[op].overload, edit(named(op, *sample.make())), f"{op}: {message}")


def test_more_tokens_than_the_window():
    """The bound stands for T in T <= W and R >= W + T."""
    arguments = named("mamba2_replay", *samples("mamba2_replay")[0].make())
    for name in TOKENS["mamba2_replay"]:
        arguments[name] = arguments[name].flatten(0, 1)
    arguments |= dict(query_start_loc=torch.arange(5), max_query_len=17)
    assert_refused(OPS["mamba2_replay"].overload, arguments, "window is 16, expected at least T = 17")
