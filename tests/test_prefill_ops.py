"""Prefill ops take the decode ops' inputs and give the token-by-token truth; decode goes on from what they leave."""

import pytest
import torch
import truth_prefill
from harness import RATIO, assert_close, assert_refused, call, check_sample, named, raw

from torch_replay import ops
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples

NAMES = ("mamba2_prefill", "gdn_prefill", "kda_prefill", "conv_prefill")
SAMPLES = [sample for name in NAMES for sample in samples(name)]
EIGHT_BIT = [sample for sample in SAMPLES if "int8" in sample.id or "fp8" in sample.id]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_equals_truth(sample, dtype):
    """Outputs, checkpoints, cursors and conv rings; null slots and rows without tokens write nothing."""
    skip = ("state", "state_scale") if sample in EIGHT_BIT else ()
    check_sample(sample, getattr(truth_prefill, sample.op), "cpu", dtype, skip)


@pytest.mark.parametrize("sample", EIGHT_BIT, ids=str)
def test_eight_bit_states(sample):
    """What is stored decodes to the truth's final state; other slots keep their bytes and scales."""
    arguments = named(sample.op, *sample.make())
    want = {name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in arguments.items()}
    scale = arguments["state_scale"].clone()
    want |= {"state": arguments["state"].double() * scale.double()[..., None], "state_scale": None}
    want |= {name: arguments[name].clone() for name in ("ring_start", "ring_committed")}
    before = arguments["state"].clone()
    getattr(truth_prefill, sample.op)(**want)
    call(sample.op, arguments)
    written = arguments["slots"][(arguments["slots"] > 0) & (arguments["query_lens"] > 0)].long()
    kept = torch.tensor([slot for slot in range(len(before)) if slot not in written])
    got = arguments["state"].double() * arguments["state_scale"].double()[..., None]
    assert_close("state", got[written], want["state"][written], RATIO[before.dtype])
    assert torch.equal(raw(before)[kept], raw(arguments["state"])[kept])
    assert torch.equal(scale[kept], arguments["state_scale"][kept]) and len(kept) >= 3


def test_stochastic_rounding_depends_on_the_slot():
    """Equal rows in two slots round to different neighbours of the same value."""
    arguments = named("mamba2_prefill", *samples("mamba2_prefill")[0].make())
    for name in ("x", "dt", "B", "C", "z"):
        arguments[name] = arguments[name][:1].expand(4, *arguments[name].shape[1:])
    arguments |= dict(state=arguments["state"].half().nan_to_num(0), has_state=None, philox_rounds=10,
                      seed=torch.tensor([3]))
    call("mamba2_prefill", arguments)
    first, second = arguments["state"][arguments["slots"][:2].long()].float()
    assert not torch.equal(first, second) and torch.allclose(first, second, rtol=2e-3, atol=1e-6)


FAMILIES = {
    "mamba2": (("x_ring", "B_ring", "dt_ring"), ("x", "dt", "B", "C", "z")),
    "gdn": (("u_ring", "k_ring", "g_ring"), ("q", "k", "v", "a", "b")),
    "kda": (("u_ring", "k_ring", "g_ring"), ("q", "k", "v", "a", "b")),
}


def rings(family, arguments, rows):
    """Empty rings for the op's sizes, full of NaN."""
    slots, heads, wide, narrow = arguments["state"].shape
    groups = arguments["B" if family == "mamba2" else "k"].shape[2]
    last = (slots, heads, rows, narrow) if family == "kda" else (slots, heads, rows)
    shapes = (slots, heads, rows, wide), (slots, groups, rows, narrow), last
    return {name: torch.full(shape, float("nan")) for name, shape in zip(FAMILIES[family][0], shapes)}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_then_decode(family, packed):
    """A prompt in two chunks and then decode steps of three tokens, through flushes of the ring, give the outputs of
    the whole sequence at once. Negative control: cursors that the prefill left alone give something else."""
    arguments = named(f"{family}_prefill", *samples(f"{family}_prefill")[0].make())
    arguments |= dict(has_state=None)
    inputs = {name: arguments[name][:, :40] for name in FAMILIES[family][1]}
    total = 40
    # before any call: the truth reads what the ops write
    expected = getattr(truth_prefill, f"{family}_prefill")(
        **{name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
           for name, value in (arguments | inputs).items() if name not in ("ring_start", "ring_committed")},
        ring_start=arguments["ring_start"].clone(), ring_committed=arguments["ring_committed"].clone())
    found = []
    for first, last in ((0, 11), (11, 19)):
        piece = {name: value[:, first:last] for name, value in inputs.items()}
        how = dict(has_state=torch.full((4,), first > 0))
        if packed:
            piece = {name: value.flatten(0, 1) for name, value in piece.items()}
            how |= dict(query_start_loc=torch.arange(5) * (last - first), max_query_len=last - first + 2)
        y = call(f"{family}_prefill", arguments | piece | how)[0]
        found.append(y.view(4, last - first, *y.shape[-2:]))
    start, committed = arguments["ring_start"], arguments["ring_committed"]
    live = arguments["slots"].long()
    assert not start[live].any() and not committed[live].any()

    common = {name: value for name, value in arguments.items() if name in OPS[f"{family}_replay"].signature.parameters}
    common |= rings(family, arguments, 8) | dict(window=5)
    wrong = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in common.items()}
    wrong["ring_committed"][live] = 5
    for first in range(19, total, 3):
        piece = {name: value[:, first : first + 3] for name, value in inputs.items()}
        found.append(call(f"{family}_replay", common | piece)[0])
        flushed = committed[live] + 3 > 5
        start[live] = torch.where(flushed, (start[live] + committed[live]) % 8, start[live])
        committed[live] = torch.where(flushed, 0, committed[live]) + 3
    assert_close("whole", torch.cat(found, 1), expected, 1e-5)
    first = {name: value[:, 19:22] for name, value in inputs.items()}
    assert not torch.allclose(call(f"{family}_replay", wrong | first)[0], expected[:, 19:22].float(), atol=1e-2)


@pytest.mark.parametrize("ring_len", [5, 6, 9])
def test_conv_chunks_then_decode(ring_len):
    """Chunks shorter and longer than the ring, then decode: the outputs of the whole sequence at once."""
    x, weight = torch.randn(2, 40, 7), torch.randn(7, 4)
    slots = torch.tensor([3, 1])
    whole = ops.conv_prefill(torch.zeros(4, 7, ring_len), x, weight, None, slots * 0, slots, silu=True)
    ring, found = torch.full((4, 7, ring_len), float("nan")), []
    for first, last in ((0, 2), (2, 20), (20, 21)):
        found.append(ops.conv_prefill(ring, x[:, first:last], weight, None, slots * 0 + first, slots, silu=True))
    for first in range(21, 39, 2):
        found.append(ops.conv_replay(ring, x[:, first : first + 2], weight, None, slots * 0 + first, slots, silu=True))
    assert_close("whole", torch.cat(found, 1), whole[:, :39], 1e-6)


def changed(op, **change):
    arguments = named(op, *samples(op)[0].make())
    return arguments | {name: edit(arguments) for name, edit in change.items()}


def first_of(name, value):
    """The argument with its first element replaced."""
    def edit(arguments):
        values = arguments[name].clone()
        values.view(-1)[0] = value
        return values
    return edit


REFUSED = {
    "A_log": ("mamba2_prefill", dict(A=lambda a: -a["A"]), "A is .* expected negative rates"),
    "one rate of zero": ("mamba2_prefill", dict(A=first_of("A", 0.0)), "A is 0 in places"),
    "slot twice": ("gdn_prefill", dict(slots=lambda a: a["slots"] * 0 + 2), "slots is .* at most once"),
    "slot out of range": ("kda_prefill", dict(slots=first_of("slots", 6)), "slots is 6"),
    "ring not empty": ("gdn_prefill", dict(ring_committed=lambda a: a["ring_committed"] + 2), "fold the ring"),
    "length": ("mamba2_prefill", dict(query_lens=lambda a: torch.tensor([71, 0, 0, 0])), "query_lens is 71"),
    "no bound": ("conv_prefill", dict(query_start_loc=lambda a: torch.arange(5)), "max_query_len is None"),
    "bound alone": ("conv_prefill", dict(max_query_len=lambda a: 3), "max_query_len is 3"),
    "short ring": ("conv_prefill", dict(conv_ring=lambda a: a["conv_ring"][..., :2]), "conv_ring is of 2 columns"),
    "negative position": ("conv_prefill", dict(positions=first_of("positions", -1)), "positions is -1"),
    "state transposed": ("gdn_prefill", dict(state=lambda a: a["state"].transpose(2, 3)), "q is of shape"),
    "lower_bound": ("kda_prefill", dict(lower_bound=lambda a: 1.0), "lower_bound is 1.0"),
    "8 bits without scale": ("gdn_prefill", dict(state=lambda a: a["state"].nan_to_num(0).to(torch.int8)),
                             "state_scale is None"),
    "raw dt": ("ssd_prefill", dict(dt=lambda a: a["dt"] - 1), "dt is .* .mamba2_prefill takes raw dt"),
    "A_log in a scan": ("ssd_prefill", dict(A=lambda a: -a["A"]), "A is .* negative rates"),
    "raw a": ("delta_prefill", dict(g=first_of("g", 0.5)), "g is 0.5 in places"),
    "raw b": ("delta_prefill", dict(beta=first_of("beta", -0.5)), "beta is -0.5"),
    "keys as they come": ("delta_prefill", dict(k=lambda a: a["k"] * 1.5), "k's norm is 1.5"),
}


@pytest.mark.parametrize("op, change, message", REFUSED.values(), ids=REFUSED)
def test_refused(op, change, message):
    """Values and shapes that cannot be right are named, and nothing is written."""
    assert_refused(OPS[op].overload, changed(op, **change), message)


@pytest.mark.parametrize("starts, bound, message", [
    ([0, 3, 2, 5, 9], 9, "differences is -1"), ([0, 3, 4, 5, 9], 3, "differences is 4"),
    ([0, 3, 4, 5, 99], 99, "is 99"),
])
def test_packed_rows_refused(starts, bound, message):
    """Row bounds that go back, exceed the bound, or leave the tokens."""
    arguments = changed("conv_prefill", x=lambda a: a["x"].flatten(0, 1), max_query_len=lambda a: bound,
                        query_start_loc=lambda a: torch.tensor(starts))
    assert_refused(OPS["conv_prefill"].overload, arguments, message)


def test_nan_passes_the_value_checks():
    """A row of NaN is one request's trouble: it is no wrong sign, and the other rows of the scan stay finite."""
    arguments = named("delta_prefill", *samples("delta_prefill")[0].make())
    for name in ("k", "g", "beta"):
        arguments[name][0] = float("nan")
    o = call("delta_prefill", arguments)[0]
    assert o[1].isfinite().all() and o[0].isnan().any()
