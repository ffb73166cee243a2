"""From outside a packed module is what it was, or whoever uses it is told."""

import gc

import pytest
import torch
from packing_examples import (
    ALONE,
    WIDTH,
    Counting,
    Everything,
    compiled,
    described,
    inputs_of,
    misaligned,
    nothing,
    stack,
    ties,
)
from tiny import tiny_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_replay import HybridModel
from torch_replay.graphs import pack_parameters, packing, packing_plan


@pytest.mark.parametrize("build", [Everything, lambda: nn.Transformer(16, 2, 2, 2, 32), lambda: stack(3, Counting),
                                   lambda: tiny_model(pattern=("mamba2", "engram", "full", "mlp")),
                                   lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
                                   lambda: nn.LSTM(3, 4, 2)],
                         ids=["everything", "transformer", "counting", "hybrid", "parametrized", "lstm"])
def test_unchanged_from_outside(build):
    """Keys, objects, values, shapes, strides, gradients and ties are those of before; all tensors but a few moved."""
    module = build()
    objects = {name: id(value) for name, value in module.state_dict(keep_vars=True).items()}
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before, tied = described(module), ties(module)
    packed = pack_parameters(module, call=nothing)
    assert described(module) == before and ties(module) == tied
    assert {name: id(value) for name, value in module.state_dict(keep_vars=True).items()} == objects
    assert all(parameter.grad is not None for parameter in module.parameters() if parameter.requires_grad)
    assert set(packed.left_alone) == (ALONE if isinstance(module, Everything) else set())
    assert not misaligned(packed)
    packed.check()


def test_tied_tensors_take_their_space_once():
    module = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    module[1].weight = module[0].weight
    packed = pack_parameters(module)
    assert [flat.numel() for flat in packed.flats] == [64 * 32]
    module[0].weight.data.fill_(3.0)
    assert (packed.flats[0] == 3).all() and (module[1].weight == 3).all()


def test_originals_are_freed_before_the_next_allocation(monkeypatch):
    """So that the memory's peak is the module's size and one flat buffer."""
    model = stack(4)
    originals = {slot.name: StorageWeakRef(slot.tensor.untyped_storage()) for slot in packing_plan.find_slots(model)}
    moved, move = [], packing.move_block

    def watched(block, flat, index, start):
        assert all(originals[name].expired() for earlier, name in moved if earlier < index)
        moved.extend((index, slot.name) for slot in block)
        return move(block, flat, index, start)

    monkeypatch.setattr(packing, "move_block", watched)
    packed = pack_parameters(model, flat_bytes=12000)
    assert len(packed.flats) == 4 and len(moved) == 4 * 4


MOVES = {
    "half": lambda model: model.half(),
    "double": lambda model: model.to(torch.float64),
    "meta": lambda model: model.to("meta"),
    "assign": lambda model: model.load_state_dict(stack(2, seed=1).state_dict(), assign=True),
    "replaced": lambda model: setattr(model[1].linear, "bias", nn.Parameter(torch.zeros(WIDTH))),
    "deleted": lambda model: delattr(model[1].linear, "bias"),
    "swapped": lambda model: setattr(model[0].linear, "bias", model[1].linear.bias),
    "transposed": lambda model: setattr(model[0].linear.weight, "data", model[0].linear.weight.data.t()),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moved_tensors_are_noticed(move):
    """Nothing is bound to flat buffers that the module has left; packed again it works, and is right."""
    model, x = stack(2), torch.randn(2, WIDTH)
    packed = pack_parameters(model, call=nothing)
    move(model)
    for stale in (packed.check, lambda: packed.bind(model)):
        with pytest.raises(RuntimeError, match=r"\d\.\w+.*expected torch\.\w+ \[48.*pack the module again"):
            stale()
    again = pack_parameters(model, call=nothing)
    again.check()
    if move not in (MOVES["meta"], MOVES["deleted"]):
        dtype = model[0].linear.weight.dtype
        with torch.no_grad():
            step = compiled(again.bind(model), backend="eager")
            torch.testing.assert_close(step(x.to(dtype)), model(x.to(dtype)))


def test_packed_twice():
    """The same module: the same buffers. A part of it, or a whole around it: refused while functions may use them."""
    model = stack(2)
    packed = pack_parameters(model)
    assert pack_parameters(model) is packed
    for other in (model[0], nn.ModuleList([model])):
        with pytest.raises(ValueError, match="norm.weight.*of a Sequential, which are in use"):
            pack_parameters(other)
    bound = packed.bind(model)
    del packed
    with pytest.raises(ValueError, match="in use"):
        pack_parameters(model[0])
    del bound
    gc.collect()
    pack_parameters(nn.ModuleList([model])).check()


def test_what_is_left_alone():
    model = stack(2)
    table = sum(parameter.numel() * 4 for parameter in model[0].parameters())
    packed = pack_parameters(model, skip=["1.linear.bias"])
    assert packed.left_alone == ["0.shift", "0.order", "1.shift", "1.order", "1.linear.bias"]
    model = stack(2)
    packed = pack_parameters(model, flat_bytes=WIDTH * WIDTH * 4 - 1)
    assert {"0.linear.weight", "1.linear.weight"} < set(packed.left_alone)
    model = stack(2)
    packed = pack_parameters(model, flat_bytes=table + 512)
    assert len(packed.flats) == 2 and all(flat.numel() * 4 <= table + 512 for flat in packed.flats)
    assert len(inputs_of(packed.bind(model), torch.randn(2, WIDTH))) == 2 + 4 + 1
    with pytest.raises(ValueError, match="skip: got 2.weight, "):
        pack_parameters(model, skip=["0.linear.bias", "2.weight"])
    for flat_bytes in (0, 2**31):
        with pytest.raises(ValueError, match="flat_bytes: got"):
            pack_parameters(model, flat_bytes=flat_bytes)


def test_skipped_ties_stay_together():
    """A name stands for its memory, under every name that it has."""
    packed = pack_parameters(Everything(), skip=["again.weight"])
    assert {"first.weight", "head.weight", "transposed"} < set(packed.left_alone)


def test_saved_and_loaded(tmp_path):
    model = tiny_model(pattern=("mamba2", "engram", "swa"))
    pack_parameters(model, call=nothing)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for name, value in torch.load(tmp_path / "weights.pt").items():
        assert torch.equal(value, model.state_dict()[name])
    model.save_pretrained(tmp_path)
    loaded = HybridModel.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].half(), value.half())


def test_a_broken_alignment_is_noticed(monkeypatch):
    """Negative control of `misaligned`."""
    monkeypatch.setattr(packing_plan, "ALIGN", 4)
    assert misaligned(pack_parameters(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))))


def test_a_broken_tie_is_noticed(monkeypatch):
    """Negative control: one block a slot, as if nothing shared memory, is seen by `ties` and by `check`."""
    monkeypatch.setattr(packing_plan, "_blocks", lambda slots: [[slot] for slot in slots])
    module = Everything()
    tied = ties(module)
    packed = pack_parameters(module, call=nothing)
    assert ties(module) != tied
    with pytest.raises(RuntimeError, match="weight"):
        packed.check()
