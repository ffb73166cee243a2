"""The chunked scans compute what a token-by-token float64 loop computes, and so do their gradients."""

import pytest
import torch
from harness import check_sample
from truth_scan import delta_loop, delta_prefill, ssd_loop, ssd_prefill

from torch_replay.models.scan import delta_scan, kda_scan, ssd_scan
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import samples
from torch_replay.ops.scan import naive as scan


def ssd_inputs(tokens, heads=4, groups=2, head_dim=5, state_dim=7, batch=2, with_state=True, seed=0):
    """Random float64 inputs `(x, dt, A, B, C)` and a state or None."""
    torch.manual_seed(seed)
    shape = (batch, tokens)
    inputs = (
        torch.randn(*shape, heads, head_dim, dtype=torch.float64),
        torch.rand(*shape, heads, dtype=torch.float64) * 0.3,
        -torch.rand(heads, dtype=torch.float64) * 4 - 0.1,
        torch.randn(*shape, groups, state_dim, dtype=torch.float64),
        torch.randn(*shape, groups, state_dim, dtype=torch.float64),
    )
    state = torch.randn(batch, heads, head_dim, state_dim, dtype=torch.float64) if with_state else None
    return inputs, state


def delta_inputs(tokens, key_heads=2, heads=4, key_dim=6, value_dim=9, batch=2, with_state=True, seed=0):
    """Random float64 inputs `(q, k, v, g, beta)` with keys of unit length, and a state or None."""
    torch.manual_seed(seed)
    shape = (batch, tokens)
    inputs = (
        torch.randn(*shape, key_heads, key_dim, dtype=torch.float64),
        torch.nn.functional.normalize(torch.randn(*shape, key_heads, key_dim, dtype=torch.float64), dim=-1),
        torch.randn(*shape, heads, value_dim, dtype=torch.float64),
        -torch.rand(*shape, heads, dtype=torch.float64) * 0.3,
        torch.rand(*shape, heads, dtype=torch.float64),
    )
    state = torch.randn(batch, heads, value_dim, key_dim, dtype=torch.float64) if with_state else None
    return inputs, state


def kda_inputs(tokens, **sizes):
    """`delta_inputs` with a decay for each key channel."""
    (q, k, v, _, beta), state = delta_inputs(tokens, **sizes)
    return (q, k, v, -torch.rand(*v.shape[:3], k.shape[-1], dtype=torch.float64) * 0.3, beta), state


CASES = {"ssd": (ssd_scan, ssd_loop, ssd_inputs), "delta": (delta_scan, delta_loop, delta_inputs),
         "kda": (kda_scan, delta_loop, kda_inputs)}
FAMILIES = pytest.mark.parametrize("family", list(CASES))


def error(got, truth):
    """RMS of the difference over the RMS of the truth."""
    return ((got.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()).item()


def run_float32(function, inputs, state, **kwargs):
    return function(*(t.float() for t in inputs), None if state is None else state.float(), **kwargs)


@FAMILIES
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "empty"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_scan_equals_loop(family, tokens, with_state):
    """Outputs and final state, in float32, for odd lengths on both sides of a chunk edge."""
    function, loop, make = CASES[family]
    inputs, state = make(tokens, with_state=with_state)
    for got, truth in zip(run_float32(function, inputs, state), loop(*inputs, state)):
        assert got.dtype == torch.float32 and got.shape == truth.shape
        assert error(got, truth) < 1e-5


@pytest.mark.parametrize(
    "family,sizes",
    [
        ("ssd", {"heads": 3, "groups": 1}),
        ("ssd", {"heads": 3, "groups": 3, "head_dim": 1}),
        ("ssd", {"heads": 6, "groups": 2, "head_dim": 16, "state_dim": 3, "batch": 1}),
        ("delta", {"key_heads": 1, "heads": 1, "key_dim": 16, "value_dim": 4}),
        ("delta", {"key_heads": 1, "heads": 3, "value_dim": 1}),
        ("delta", {"key_heads": 3, "heads": 6, "key_dim": 5, "value_dim": 5, "batch": 1}),
    ],
)
def test_scan_sizes(family, sizes):
    """Head h reads the right group, and the two state dimensions are not mixed up."""
    function, loop, make = CASES[family]
    inputs, state = make(37, **sizes)
    for got, truth in zip(run_float32(function, inputs, state, chunk=16), loop(*inputs, state)):
        assert error(got, truth) < 1e-5


@FAMILIES
@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_float64_keeps_float64(family, chunk):
    """float64 inputs are computed in float64, with any chunk."""
    function, loop, make = CASES[family]
    inputs, state = make(50)
    for got, truth in zip(function(*inputs, state, chunk=chunk), loop(*inputs, state)):
        assert got.dtype == torch.float64
        assert error(got, truth) < 1e-13


@FAMILIES
def test_pieces_chain(family):
    """Scanning three pieces, each from the state of the one before, equals scanning the whole."""
    function, loop, make = CASES[family]
    inputs, state = make(100)
    truth, truth_state = loop(*inputs, state)
    outputs, carried = [], state
    for piece in (slice(0, 33), slice(33, 34), slice(34, 100)):
        out, carried = run_float32(function, [t[:, piece] if t.dim() > 1 else t for t in inputs], carried)
        outputs.append(out)
    assert error(torch.cat(outputs, 1), truth) < 1e-5
    assert error(carried, truth_state) < 1e-5


@FAMILIES
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_states_at_edges(family, chunk):
    """The state after any number of tokens, none and all included, on a chunk's edge and beside it, by row."""
    function, loop, make = CASES[family]
    inputs, state = make(50)
    edges = torch.tensor([[0, 1, 7, 50, 14, 13], [8, 0, 49, 6, 50, 35]])
    *_, want = loop(*inputs, state, edges)
    out, final, got = function(*inputs, state, chunk=chunk, edges=edges)
    assert error(got, want) < 1e-13 and torch.equal(got[:, 0][0], state[0])
    assert all(torch.equal(a, b) for a, b in zip((out, final), function(*inputs, state, chunk=chunk)))
    assert error(run_float32(function, inputs, state, chunk=chunk, edges=edges)[2], want) < 1e-5
    assert error(got.roll(1, 1), want) > 1e-2, "negative control: the edges differ"


def mask_tokens(family, inputs, padded):
    """The inputs with the padded tokens made no-ops as callers make them: dt = 0, or g = beta = 0."""
    keep = (~padded)[..., None].to(inputs[0].dtype)
    if family == "ssd":
        return (inputs[0], inputs[1] * keep, *inputs[2:])
    g, beta = inputs[3:]
    return (*inputs[:3], g * (keep if g.dim() == 3 else keep[..., None]), beta * keep)


@FAMILIES
def test_masked_tokens_change_nothing(family):
    """Padded tokens anywhere in a row leave its state and its other outputs as they would be without them."""
    function, loop, make = CASES[family]
    inputs, state = make(90, batch=1)
    padded = torch.zeros(1, 90, dtype=torch.bool)
    padded[:, :3] = padded[:, 40:70] = padded[:, 88:] = True
    out, final = run_float32(function, mask_tokens(family, inputs, padded), state)
    kept = [t[:, ~padded[0]] if t.dim() > 1 else t for t in inputs]
    truth, truth_final = loop(*kept, state)
    assert error(out[:, ~padded[0]], truth) < 1e-5
    assert error(final, truth_final) < 1e-5


def strong(family, inputs):
    """The inputs with a log decay of -50 at every token of the first half of the row."""
    half = inputs[0].shape[1] // 2
    if family == "ssd":
        dt = inputs[1].clone()
        dt[:, :half] = 1.0
        return (inputs[0], dt, torch.full_like(inputs[2], -50.0), *inputs[3:])
    g = inputs[3].clone()
    g[:, :half] = -50.0
    return (*inputs[:3], g, inputs[4])


@FAMILIES
def test_strong_decay(family):
    """Decays of e^-50 a token neither overflow nor cost the gentle decays after them their precision."""
    function, loop, make = CASES[family]
    inputs, state = make(200)
    inputs = strong(family, inputs)
    if family == "ssd":  # gentle in the second half: dt so small that 50 dt is about 0.01
        inputs[1][:, 100:] *= 1e-3
    for got, truth in zip(run_float32(function, inputs, state), loop(*inputs, state)):
        assert error(got, truth) < 1e-5


@FAMILIES
def test_strong_decay_gradients(family):
    """With e^-50 a token every gradient is finite in float32."""
    function, _, make = CASES[family]
    inputs, state = make(130)
    leaves = [t.float().requires_grad_() for t in (*strong(family, inputs), state)]
    out, final = function(*leaves)
    (out.square().sum() + final.sum()).backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


@FAMILIES
@pytest.mark.parametrize("tokens", [1, 21])
def test_gradients_equal_loop(family, tokens):
    """Gradients of every input, the initial state included, equal autograd through the loop."""
    function, loop, make = CASES[family]
    inputs, state = make(tokens)
    torch.manual_seed(1)
    results = []
    for route in (lambda *a: function(*a, chunk=8), loop):
        leaves = [t.clone().requires_grad_() for t in (*inputs, state)]
        out, final = route(*leaves)
        torch.manual_seed(2)
        (out * torch.randn_like(out)).sum().add((final * torch.randn_like(final)).sum()).backward()
        results.append([leaf.grad for leaf in leaves])
    for got, truth in zip(*results):
        assert error(got, truth) < 1e-12


@FAMILIES
def test_gradcheck(family):
    """The gradients also agree with finite differences."""
    function, _, make = CASES[family]
    small = {"heads": 2, "batch": 1, "groups": 1, "head_dim": 2, "state_dim": 2}
    if family != "ssd":
        small = {"key_heads": 1, "heads": 2, "batch": 1, "key_dim": 2, "value_dim": 2}
    inputs, state = make(5, **small)
    leaves = [t.requires_grad_() for t in (*inputs, state)]
    assert torch.autograd.gradcheck(lambda *a: function(*a, chunk=2), leaves)


@pytest.mark.slow
@pytest.mark.parametrize("family, backend", [
    ("ssd", "inductor"), ("delta", "aot_eager_decomp_partition"), ("kda", "aot_eager_decomp_partition")])
def test_compiled_scan(family, backend):
    """One graph, outputs and gradients, at a length that is no multiple of the chunk. Inductor takes a minute a family,
    for chunks are unrolled: one of them there, the others as the graphs that it is given."""
    function, loop, make = CASES[family]
    inputs, state = make(7)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    results = []
    for route, dtype in ((compiled, torch.float32), (loop, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (*inputs, state)]
        out, final = route(*leaves, *([4] if route is compiled else []))
        (out.square().sum() + final.square().sum()).backward()
        results.append([out.detach(), final.detach(), *(leaf.grad for leaf in leaves)])
    for got, truth in zip(*results):
        assert error(got, truth) < 1e-5


@FAMILIES
def test_negative_control_inside_a_chunk(family, monkeypatch):
    """A scan whose tokens do not see themselves is far outside the bound of these tests."""
    function, loop, make = CASES[family]
    inputs, state = make(40)
    right = scan._decay_matrix
    monkeypatch.setattr(scan, "_decay_matrix", lambda total, work: right(total, work).tril(-1))
    assert error(run_float32(function, inputs, state)[0], loop(*inputs, state)[0]) > 1e-2


@FAMILIES
def test_negative_control_between_chunks(family):
    """So is one that forgets its state at every chunk edge."""
    function, loop, make = CASES[family]
    inputs, _ = make(40)
    pieces = [[t[:, i : i + 10] if t.dim() > 1 else t for t in inputs] for i in range(0, 40, 10)]
    forgetful = torch.cat([run_float32(function, piece, None)[0] for piece in pieces], 1)
    assert error(forgetful, loop(*inputs, None)[0]) > 1e-2


@FAMILIES
def test_bad_arguments(family):
    """Shapes that do not fit are named in a ValueError."""
    function, _, make = CASES[family]
    inputs, _ = make(4)
    with pytest.raises(ValueError, match="chunk"):
        function(*inputs, chunk=0)
    with pytest.raises(ValueError, match="at least one token"):
        function(*(t[:, :0] if t.dim() > 1 else t for t in inputs))
    name, position = ("dt", 1) if family == "ssd" else ("g, beta", 3)
    bad = list(inputs)
    bad[position] = bad[position][:, :3]
    with pytest.raises(ValueError, match=name):
        function(*bad)


@pytest.mark.parametrize("sample", samples("ssd_prefill") + samples("delta_prefill"), ids=str)
def test_op_equals_loop(sample):
    """Behind the ops the scans are the same, write every output, and change no argument."""
    check_sample(sample, {"ssd_prefill": ssd_prefill, "delta_prefill": delta_prefill}[sample.op])


@pytest.mark.parametrize("op", ["ssd_prefill", "delta_prefill"])
@pytest.mark.parametrize("edge", [-1, 71])
def test_edges_out_of_range(op, edge):
    """An edge before the first token or beyond the last is refused by name."""
    (*args, _), _ = samples(op)[0].make()
    with pytest.raises(ValueError, match="edges"):
        OPS[op].wrapper(*args, torch.full((2, 3), edge))


@pytest.mark.parametrize("op, position, size, message", [
    ("ssd_prefill", 1, 3, "dt is of shape"), ("ssd_prefill", 0, 0, "x is of 0 tokens"),
    ("delta_prefill", 3, 3, "g is of shape"), ("delta_prefill", 2, 0, "v is of 0 tokens"),
])
def test_op_refuses(op, position, size, message):
    """The ops name the argument that does not fit."""
    args = list(samples(op)[0].make()[0])
    for index in range(len(args)) if size == 0 else [position]:
        if args[index] is not None and args[index].dim() > 2 and index != 5:
            args[index] = args[index][:, :size]
    with pytest.raises(ValueError, match=message):
        OPS[op].wrapper(*args)
