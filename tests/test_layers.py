"""Pools as lists of layers: a host's page views, checks by layer, and layers in one memory."""

import pytest
import torch
from harness import assert_refused, call, clone, named, raw, stacked
from triton_harness import DEVICE, requires_triton, triton_kernel

from torch_replay import ops
from torch_replay.ops import registry
from torch_replay.ops.conv import samples as conv
from torch_replay.ops.conv.naive import SAME_WIDTH
from torch_replay.ops.gdn import samples as gdn
from torch_replay.ops.kda import samples as kda
from torch_replay.ops.mamba2 import flashinfer
from torch_replay.ops.mamba2 import samples as mamba2
from torch_replay.ops.registry import OPS
from torch_replay.ops.samples import Sample, layer_by_layer

BUILDERS = {"mamba2_materialize": mamba2.materialize, "gdn_materialize": gdn.materialize,
            "kda_materialize": kda.materialize, "copy_slots": conv.slots, "zero_slots": conv.zeroed}
POOL_OPS = list(BUILDERS)


def sample(op: str, builder=None, **options) -> Sample:
    return Sample(op, "made", lambda rng: (builder or BUILDERS[op])(rng, layers=4, **options))


def in_pages(op: str, **options) -> Sample:
    """The same draws in the pages of one host: every pool of every layer in one storage."""
    return sample(op, layer_by_layer(BUILDERS[op], *(place for place, _ in OPS[op].pools), together=True), **options)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_the_ops_that_take_layers():
    """Ops over all layers have pools, others have none; each pool is named in both schemas."""
    assert sorted(POOL_OPS) == sorted(op.name for op in OPS.values() if op.pools)
    for op in map(OPS.get, POOL_OPS):
        for _, pool in op.pools:
            written = "(a" if pool in op.mutates else ""
            assert f"Tensor{written}" in op.layers_schema and f"[] {pool}" in op.layers_schema.replace("]?", "]")
        assert all(argument.alias_info.is_write == (argument.name in op.mutates)
                   for argument in op.layers_overload._schema.arguments if argument.alias_info)


def check_pages(op: str, device: str, **options) -> None:
    """Layers in pages end with the bits of stacked pools, and no byte between them changes."""
    want, got = (named(op, *made.make(device)) for made in (sample(op, **options), in_pages(op, **options)))
    views = [layer for _, name in OPS[op].pools if got[name] is not None for layer in got[name]]
    storage = torch.tensor([], dtype=torch.uint8, device=device).set_(views[0].untyped_storage())
    before, inside = storage.clone(), torch.zeros_like(storage)
    for view in views:
        same = inside.view(SAME_WIDTH[view.element_size()])
        same = same.as_strided(view.shape, view.stride(), view.storage_offset())
        same.fill_(255 if same.dtype == torch.uint8 else -1)
    outside = inside == 0
    assert all(any(layer.data_ptr() % 16 for layer in got[name]) for _, name in OPS[op].pools if got[name] is not None)
    call(op, want), call(op, got)
    for name in OPS[op].mutates:
        if want[name] is not None:
            assert torch.equal(raw(got[name]), raw(want[name])), name
    assert torch.equal(storage[outside], before[outside]) and outside.any()
    assert not torch.equal(storage, before)


@pytest.mark.parametrize("op", POOL_OPS)
def test_pages(op):
    """By the reference."""
    check_pages(op, "cpu")


@pytest.mark.parametrize("op", [op for op in POOL_OPS if "materialize" in op])
def test_pages_of_several_dtypes(op):
    """8-bit states, float32 scales and decays in one page."""
    check_pages(op, "cpu", state_dtype=torch.int8)


@requires_triton
@pytest.mark.parametrize("op", POOL_OPS)
def test_pages_in_kernels(op):
    """By the Triton kernels. (The stacked call runs them too: both forms round alike.)"""
    with triton_kernel(op):
        check_pages(op, DEVICE)


@requires_triton
@pytest.mark.parametrize("op", POOL_OPS)
def test_one_launch(op, monkeypatch):
    """Of a list, too: whatever the number of layers."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    runs = []
    for jitted in (InterpretedFunction, JITFunction):
        launch = jitted.run
        monkeypatch.setattr(jitted, "run", lambda self, *args, launch=launch, **kwargs: (
            runs.append(self), launch(self, *args, **kwargs))[1])
    with triton_kernel(op):
        call(op, named(op, *in_pages(op).make(DEVICE)))
    assert len(runs) == 1


@pytest.mark.parametrize("op", POOL_OPS)
def test_order_of_layers(op):
    """Negative control: the layers of one pool in another order give another result."""
    want, got = (named(op, *in_pages(op).make()) for _ in range(2))
    pool = OPS[op].pools[-2 if "materialize" in op else 0][1]
    got[pool].reverse()
    call(op, want), call(op, got)
    assert not torch.equal(raw(got[OPS[op].mutates[0]]), raw(want[OPS[op].mutates[0]]))


@pytest.mark.parametrize("op", POOL_OPS)
def test_wrapper(op):
    """The public function takes stacked pools, lists, tuples, and one pool in this form beside another in that."""
    want = named(op, *sample(op).make())
    OPS[op].wrapper(**want)
    for form in ("list", "tuple", "mixed"):
        got = named(op, *in_pages(op).make())
        for number, (_, name) in enumerate(OPS[op].pools):
            if form == "tuple" and got[name] is not None:
                got[name] = tuple(got[name])
            if form == "mixed" and got[name] is not None and number:
                got[name] = stacked(got[name])
        OPS[op].wrapper(**got)
        for name in OPS[op].mutates:
            if want[name] is not None:
                assert torch.equal(raw(list(got[name])), raw(want[name])), (form, name)


LAYERS = [torch.zeros(4, 3) for _ in range(3)]
REFUSED = {
    "shape": (dict(pool=[*LAYERS[:2], torch.zeros(5, 3)]), r"pool\[2\] is of shape .*5, 3.*, expected .*4, 3"),
    "dtype": (dict(pool=[LAYERS[0], torch.zeros(4, 3, dtype=torch.int32), LAYERS[1]]), r"pool\[1\] is of dtype"),
    "strides": (dict(pool=[*LAYERS[:2], torch.zeros(3, 4).t()]), r"pool\[2\] is of strides \(1, 4\), expected .3, 1."),
    "number": (dict(pool=LAYERS[:2]), r"layer_group is of shape \(3,\), expected \[L\] with L = 2"),
    "none": (dict(pool=[]), "pool is an empty list, expected a tensor for each layer"),
    "dimensions": (dict(pool=[torch.zeros(())] * 3), r"pool is of shape \(\), expected \[S, ...\] a layer"),
    "slots": (dict(slots=i32([[4]])), "slots is 4"),
    "groups": (dict(layer_group=i32([0, 1, 0])), "layer_group is 1"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_refused(change, message):
    """Named with the layer, before anything is written."""
    arguments = dict(pool=LAYERS, slots=i32([[1]]), layer_group=i32([0, 0, 0])) | change
    assert_refused(OPS["zero_slots"].layers_overload, arguments, f"^zero_slots: {message}")


def test_refused_pools_of_other_lengths():
    """All pools of a call have the same number of layers."""
    arguments = named("gdn_materialize", *in_pages("gdn_materialize").make())
    arguments["k_ring"].pop()
    assert_refused(OPS["gdn_materialize"].layers_overload, arguments, "k_ring is a list of 3, expected 4 layers")


def test_refused_types():
    """The wrapper names the element that is no tensor."""
    with pytest.raises(TypeError, match=r"zero_slots: pool\[1\] is NoneType, expected Tensor"):
        ops.zero_slots([LAYERS[0], None], i32([[1]]), i32([0, 0]))


@pytest.mark.parametrize("op", POOL_OPS)
def test_gradients_are_refused(op):
    """Of every layer, eagerly and compiled."""
    arguments = named(op, *in_pages(op).make())
    pool = next(name for _, name in OPS[op].pools if arguments[name][0].is_floating_point())
    arguments = {name: clone(value) for name, value in arguments.items()}
    arguments[pool][3] = arguments[pool][3].detach().requires_grad_()
    with pytest.raises(ValueError, match=f"{op}: {pool} requires a gradient"):
        OPS[op].layers_overload(**arguments)
    with pytest.raises(Exception, match=f"{op}: {pool} requires a gradient"):
        torch.compile(OPS[op].wrapper, fullgraph=True, backend="aot_eager")(**arguments)


def test_autocast():
    """Changes nothing."""
    want, got = (named("mamba2_materialize", *in_pages("mamba2_materialize").make()) for _ in range(2))
    OPS["mamba2_materialize"].layers_overload(**want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        OPS["mamba2_materialize"].layers_overload(**got)
    assert torch.equal(raw(got["state"]), raw(want["state"]))


# One memory.


def test_layers_that_share_pages():
    """Two groups may take turns at the pages of one memory: each layer writes its own group's slots."""
    pool = torch.ones(6, 3)
    ops.zero_slots([pool, pool], i32([[1], [4]]), i32([0, 1]))
    assert pool[:, 0].tolist() == [1, 0, 1, 1, 0, 1]


def test_layers_of_a_group_that_share_pages():
    """Two layers of one group cannot: a fold would be applied twice."""
    pool = torch.ones(6, 3)
    arguments = dict(pool=[pool, pool], src_slots=i32([[1]]), dst_slots=i32([[2]]), layer_group=i32([0, 0]),
                     active_rows=i32([0]))
    assert_refused(OPS["copy_slots"].layers_overload, arguments, "pool is one memory for two layers of a group")
    arguments = named("kda_materialize", *in_pages("kda_materialize").make())
    arguments["state"][2] = arguments["state"][0]
    assert arguments["layer_group"][2] == arguments["layer_group"][0]
    assert_refused(OPS["kda_materialize"].layers_overload, arguments, "state is one memory for two layers of a group")


def test_layers_that_overlap():
    """Layers that overlap otherwise are refused."""
    memory = torch.zeros(40)
    pages = [memory[at : at + 12].view(4, 3) for at in (0, 11, 24)]
    arguments = dict(pool=pages, slots=i32([[1]]), layer_group=i32([0, 0, 0]))
    assert_refused(OPS["zero_slots"].layers_overload, arguments, r"pool\[1\] is in the memory of pool\[0\]")


def test_pools_that_overlap():
    """Two pools that are both written share no byte, whichever layers they are of."""
    arguments = named("gdn_materialize", *in_pages("gdn_materialize", state_dtype=torch.int8).make())
    arguments = {name: clone(value) for name, value in arguments.items()}
    scale = arguments["state_scale"]
    scale[:] = [layer.contiguous() for layer in scale]
    arguments["state"][:] = [layer.contiguous() for layer in arguments["state"]]
    joined = torch.zeros(arguments["state"][3].numel(), dtype=torch.int8)
    scale[2] = joined[: scale[2].numel() * 4].view(torch.float32).view_as(scale[2])
    arguments["state"][3] = joined.view_as(arguments["state"][3])
    refused = r"state_scale\[2\] is in the memory of state\[3\]"
    assert_refused(OPS["gdn_materialize"].layers_overload, arguments, refused)


def test_a_ring_in_the_memory_of_a_state():
    """What is read keeps its values while states are written, wherever it lies."""
    options = dict(key_dim=16, value_dim=20, key_heads=1, heads=1, ring_len=20)
    want, got = (named("gdn_materialize", *sample("gdn_materialize", **options).make()) for _ in range(2))
    for name in ("state", "u_ring", "k_ring", "g_ring"):
        got[name] = [layer.clone() for layer in got[name]]
    buffer = torch.zeros(max(got["state"][1].numel(), got["u_ring"][2].numel()))
    state, ring = (buffer[: like.numel()].view(like.shape) for like in (got["state"][1], got["u_ring"][2]))
    ring.copy_(got["u_ring"][2])
    want["state"][1].view(-1).copy_(buffer[: state.numel()])
    got["state"][1], got["u_ring"][2] = state, ring
    call("gdn_materialize", want), call("gdn_materialize", got)
    assert torch.equal(raw(got["state"]), raw(want["state"]))


def test_memory_of_pages_is_looked_at_once(monkeypatch):
    """A host's pools stay where they are: the pairs of their layers are not compared at every call."""
    from torch_replay.ops import overlap

    arguments = named("gdn_materialize", *in_pages("gdn_materialize").make())
    call("gdn_materialize", arguments)
    monkeypatch.setattr(overlap, "_meet", lambda *args: pytest.fail("compared again"))
    arguments["active_rows"] = arguments["active_rows"].clone()
    call("gdn_materialize", arguments)
    assert registry.keep_apart is overlap.keep_apart


def test_flashinfer_refuses_layers():
    """By a reason that `describe` can show."""
    arguments = named("mamba2_materialize", *in_pages("mamba2_materialize").make())
    assert "separate tensors of layers" in flashinfer.mamba2_materialize_limits(**arguments)
    want = named("mamba2_materialize", *sample("mamba2_materialize").make())
    assert flashinfer.mamba2_materialize_key(**arguments) == flashinfer.mamba2_materialize_key(**want)
