"""FlashInfer behind our ops, against a stand-in: argument mapping, limits, tables of addresses."""

import pytest
import torch
from fake_flashinfer import BF16, F32, GEOMETRY, MATERIALIZE, build, compare, copies, fake_module, fresh_backends  # noqa: F401

from torch_replay.ops import OPS, backends
from torch_replay.ops.backends import set_backend
from torch_replay.ops.mamba2 import flashinfer as adapter
from torch_replay.ops.mamba2.samples import materialize, replay

KEYWORDS = [name for name, parameter in OPS["mamba2_replay"].signature.parameters.items()
            if parameter.kind == parameter.KEYWORD_ONLY]
REPLAYS = {
    "typical": {},
    "padded": dict(padded=2),
    "all_padded": dict(padded=5),
    "ragged": dict(ragged=True, padded=1),
    "no_optionals": dict(optional=False),
    "window_7": dict(window=7),
    "int64_slots": dict(index_dtype=torch.int64),
    "state_bf16": dict(state_dtype=BF16),
    "state_fp16": dict(state_dtype=torch.float16),
}


@pytest.mark.parametrize("options", REPLAYS.values(), ids=REPLAYS)
def test_replay_mapping(fake, options):
    """Every argument arrives where FlashInfer expects it, padded rows give 0, dead ring rows stay as they are."""
    arguments = build("mamba2_replay", replay, **GEOMETRY | options)
    with set_backend("flashinfer", "mamba2_replay"):
        compare("mamba2_replay", arguments)
    assert fake.calls["checkpointing_ssu"] == 1 and OPS["mamba2_replay"].kernels["cuda"].calls == 0
    assert not backends.describe("mamba2_replay")["refused"]


@pytest.mark.parametrize("options", (dict(tokens=4), dict(state_dtype=torch.int8),
                                     dict(tokens=2, state_dtype=torch.float8_e4m3fn)), ids=str)
def test_replay_on_finite_rings(fake, monkeypatch, options):
    """Calls that read dead ring rows are served only where these are known to be finite."""
    with set_backend("flashinfer"):
        compare("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY | options))
        assert fake.calls["checkpointing_ssu"] == 0
        monkeypatch.setattr(adapter, "DEAD_ROWS_ARE_FINITE", True)
        compare("mamba2_replay", build("mamba2_replay", replay, **GEOMETRY | options))
    assert fake.calls["checkpointing_ssu"] == 1


def head_major(arguments):
    arguments["x"] = arguments["x"].transpose(1, 2).contiguous().transpose(1, 2).expand(-1, -1, -1, -1)
    arguments["x"] = arguments["x"].permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)


def shifted(arguments):
    x = arguments["x"]
    arguments["x"] = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


UNSUPPORTED = {
    "packed rows": dict(packed=True),
    "window 0": dict(route_window=0),
    "R - T": dict(ring_len=20),
    "at most 16": dict(window=32),
    "rows of several tokens with query_lens": dict(tokens=2, ragged=True),
    "stochastic": dict(state_dtype=torch.float16, rounds=10),
    "softplus": dict(dt_max=0.1),
    "heads of 32": dict(dim=32),
    "multiples of 64": dict(state_dim=96),
    "8-bit": dict(state_dtype=torch.int8),
    "x_ring is torch.float32": dict(ring_dtype=F32),
    "D is torch.bfloat16 and dt_bias": lambda a: a.update(dt_bias=a["dt_bias"].float()),
    "dt is not packed": lambda a: a.update(dt=a["dt"][..., :1].expand(a["dt"].shape)),
    "x is not packed": head_major,
    "x is not aligned": shifted,
    "state is not packed": lambda a: a.update(state=a["state"].transpose(2, 3).contiguous().transpose(2, 3)),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_replay_falls_back(fake, reason):
    """What FlashInfer cannot do runs on Triton without an error, with the same result and the reason counted."""
    change = UNSUPPORTED[reason]
    arguments = build("mamba2_replay", replay, **GEOMETRY | ({} if callable(change) else change))
    if callable(change):
        change(arguments)
    with set_backend("flashinfer"):
        compare("mamba2_replay", arguments)
    assert fake.calls["checkpointing_ssu"] == 0 and OPS["mamba2_replay"].kernels["cuda"].calls == 1
    refused = backends.describe("mamba2_replay")["refused"]
    assert len(refused) == 1 and reason in next(iter(refused)) and set(refused.values()) == {1}


def test_out_of_the_caller(fake):
    """FlashInfer gets it where it is packed; heads that lie apart go to Triton."""
    arguments = build("mamba2_replay", replay, **GEOMETRY)
    args = [value for name, value in arguments.items() if name not in KEYWORDS]
    kwargs = {name: arguments[name] for name in KEYWORDS}
    rows, tokens, heads, dim = arguments["x"].shape
    with set_backend("flashinfer", "mamba2_replay"):
        for gap, ours in ((0, False), (3, True)):
            out = arguments["x"].new_empty(rows, tokens, heads, dim + gap)[..., :dim]
            kernel = backends.select(OPS["mamba2_replay"], tuple(args), kwargs | dict(out=out))
            assert (kernel is OPS["mamba2_replay"].kernels["cuda"]) == ours
    assert list(backends.describe("mamba2_replay")["refused"]) == ["out is not packed in its last 2 dimensions"]


PLANS = {
    "typical": {},
    "one_group": dict(groups=1),
    "short_ring": dict(ring_len=17),
    "window_32": dict(window=32, ring_len=40),
    "state_bf16": dict(state_dtype=BF16),
    "state_int8": dict(state_dtype=torch.int8),
    "no_rows": dict(rows=0),
}


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_materialize_mapping(fake, options):
    """Groups with plans of their own, skipped rows, copies and long replays equal the reference, bit for bit."""
    if options.get("rows") == 0:
        arguments = build("mamba2_materialize", materialize, **MATERIALIZE)
        for key in ("src_slots", "dst_slots", "ring_start", "count", "active_rows"):
            arguments[key] = arguments[key][..., :0]
    else:
        arguments = build("mamba2_materialize", materialize, **MATERIALIZE | options)
    groups = 0 if options.get("rows") == 0 else arguments["src_slots"].shape[0]
    with set_backend("flashinfer"):
        compare("mamba2_materialize", arguments)
    assert fake.calls["replayssm_materialize"] == groups
    # where a replay may be longer than FlashInfer allows, our own kernel treats the rest
    expected = int(groups > 0 and arguments["x_ring"].shape[3] > 17)
    assert OPS["mamba2_materialize"].kernels["cuda"].calls == expected


def test_materialize_strided_plans(fake):
    """Plans may be int64 and slices of wider tables, pools slices with a gap between slots."""
    arguments = build("mamba2_materialize", materialize, **MATERIALIZE)
    for key in ("src_slots", "dst_slots", "ring_start", "count"):
        arguments[key] = torch.cat([arguments[key]] * 2, 1).long()[:, : arguments[key].shape[1]]
    arguments["active_rows"] = arguments["active_rows"].long()
    wide = torch.cat([arguments["state"]] * 2, 1)
    arguments["state"] = wide[:, : arguments["state"].shape[1]]
    with set_backend("flashinfer"):
        compare("mamba2_materialize", arguments)
    assert fake.calls["replayssm_materialize"] == 2


@pytest.mark.parametrize("options", (dict(dim=32), dict(rounds=10, state_dtype=torch.float16)), ids=str)
def test_materialize_falls_back(fake, options):
    arguments = build("mamba2_materialize", materialize, **MATERIALIZE | options)
    with set_backend("flashinfer"):
        compare("mamba2_materialize", arguments)
    assert fake.calls["replayssm_materialize"] == 0 and OPS["mamba2_materialize"].kernels["cuda"].calls == 1


def test_tables_follow_the_pool(fake):
    """Tables are built once for a pool and anew for one that moved, grew or changed its strides; A, which every step
    works out anew, makes none."""
    arguments = build("mamba2_materialize", materialize, **MATERIALIZE)
    with set_backend("flashinfer"):
        for _ in range(3):
            compare("mamba2_materialize", arguments)
            arguments["A"] = arguments["A"].clone()
        assert len(adapter._known_tables) == 1
        moved = copies(arguments)  # the old pool is alive, so every address differs
        before = arguments["state"].clone()
        compare("mamba2_materialize", moved)
        assert len(adapter._known_tables) == 2 and torch.equal(arguments["state"], before)
        slots = arguments["state"].shape[1]
        grown = arguments["state"].new_zeros(3, slots + 9, *arguments["state"].shape[2:])
        grown[:, :slots] = arguments["state"]
        compare("mamba2_materialize", dict(arguments, state=grown[:, :slots]))
        assert len(adapter._known_tables) == 3


def test_tables_on_recycled_memory(fake):
    """A pool with other strides in the memory of a freed one gets tables of its own."""
    memory = torch.zeros(3 * 12 * 4 * 64 * 128)
    with set_backend("flashinfer"):
        for slots in (11, 12):
            arguments = build("mamba2_materialize", materialize, **MATERIALIZE)
            pool = memory[: 3 * slots * 4 * 64 * 128].view(3, slots, 4, 64, 128)[:, :11]
            pool.copy_(arguments["state"])
            compare("mamba2_materialize", dict(arguments, state=pool))


def test_stale_tables_would_show(fake, monkeypatch):
    """Negative control: with tables of an earlier pool the comparison fails."""
    arguments = build("mamba2_materialize", materialize, **MATERIALIZE)
    with set_backend("flashinfer"):
        compare("mamba2_materialize", arguments)
        names = ("state", "x_ring", "B_ring", "dt_ring", "A", "state_scale")
        stale = adapter._tables(*(arguments[name] for name in names))
        monkeypatch.setattr(adapter, "_tables", lambda *pools: stale)
        with pytest.raises(AssertionError, match="state"):
            compare("mamba2_materialize", copies(arguments))
