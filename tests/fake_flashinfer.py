"""A stand-in for FlashInfer, made of the reference, and what the tests of back ends share.

`checkpointing_ssu` and `replayssm_materialize` have the signatures of FlashInfer 0.7.4 and check of the arguments what
its launchers check, so that a wrong mapping shows without a GPU.
"""

import ctypes
import sys
import types

import pytest
import torch
from harness import named, raw

from torch_replay.ops import OPS, backends
from torch_replay.ops.backends import select, set_backend
from torch_replay.ops.mamba2 import flashinfer as adapter
from torch_replay.ops.mamba2 import naive
from torch_replay.ops.samples import Rng

BF16, F32 = torch.bfloat16, torch.float32
GEOMETRY = dict(rows=5, heads=4, dim=64, state_dim=128, groups=2)
MATERIALIZE = dict(layers=3, groups=2, heads=4, dim=64, state_dim=128)


def tied(tensor, *shape):
    """A per-head value expanded over the dimensions that FlashInfer wants: stride 1 over heads, 0 beyond."""
    assert tensor.shape == shape and tensor.stride(-1) == 0
    return tensor[..., 0]


def checkpointing_ssu(state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out,
                      D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1,
                      state_scale=None, rand_seed=None, philox_rounds=10, d_split=None, cu_seqlens=None,
                      max_seqlen=None, enable_pdl=False, cb_scaled=None, cumAdt_vec=None, cb_old=None,
                      precompute_heads_per_cta=0, algorithm="auto"):
    """FlashInfer 0.7.4's signature and rules: window R - T, rows of the pad slot left as they are."""
    assert pad_slot_id == 0 and state_batch_indices.is_contiguous() and cu_seqlens is None
    assert (cb_scaled is not None) == (state.element_size() > 1)
    (rows, tokens, heads, dim), state_dim = x.shape, state.shape[3]
    assert A.stride() == (1, 0, 0) and dt.stride()[2:] == (1, 0)
    D, dt_bias = (None if t is None else tied(t, heads, dim) for t in (D, dt_bias))
    y = torch.empty_like(x)
    naive.mamba2_replay(
        state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, tied(dt, rows, tokens, heads, dim),
        tied(A, heads, dim, state_dim)[:, 0], B, C, D, z, dt_bias, state_batch_indices, None, state_scale,
        window=x_cache.shape[2] - tokens, dt_softplus=dt_softplus, out=y)
    real = state_batch_indices != pad_slot_id
    out[real] = y[real]
    return out


def at(address, shape, strides, dtype):
    """The tensor behind an entry of a table."""
    size = sum((n - 1) * s for n, s in zip(shape, strides)) + 1
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def replayssm_materialize(state_ptrs, state_strides, x_ptrs, x_strides, B_ptrs, B_strides, dt_ptrs, dt_strides, A_ptrs,
                          scale_ptrs, scale_strides, src_slots, dst_slots, ring_start, replay_prefix_len,
                          active_request_indices, *, state_dtype, input_dtype, matrixA_dtype, dim, dstate, num_heads,
                          heads_per_group, max_window, ring_buffer_len, pad_slot_id=-1, rand_seed=None,
                          philox_rounds=0, dependency_inputs=None, dependency_outputs=None):
    """FlashInfer 0.7.4's signature and rules: one plan for all layers, which are found by their addresses."""
    tensors = (src_slots, dst_slots, ring_start, replay_prefix_len, active_request_indices)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors) and input_dtype == BF16
    assert 1 <= max_window <= 16 and replay_prefix_len.min() >= 0 and replay_prefix_len.max() <= max_window
    slots = int(max(src_slots.max(), dst_slots.max())) + 1

    def table(pointers, strides, dtype, *inner):
        packed = torch.empty(inner, device="meta").stride()
        return [at(int(p), (slots, *inner), (int(s), *packed), dtype) for p, s in zip(pointers, strides)]

    groups = num_heads // heads_per_group
    states = table(state_ptrs, state_strides, state_dtype, num_heads, dim, dstate)
    xs = table(x_ptrs, x_strides, BF16, num_heads, ring_buffer_len, dim)
    Bs = table(B_ptrs, B_strides, BF16, groups, ring_buffer_len, dstate)
    dts = table(dt_ptrs, dt_strides, F32, num_heads, ring_buffer_len)
    scaled = int(scale_ptrs[0]) != 0
    scales = table(scale_ptrs, scale_strides, F32, num_heads, dim) if scaled else [None] * len(xs)
    for layer, (pool, x, B, dt, scale) in enumerate(zip(states, xs, Bs, dts, scales)):
        rates = at(int(A_ptrs[layer]), (1, num_heads), (num_heads, 1), matrixA_dtype)
        plan = (src_slots[layer], dst_slots[layer], ring_start, replay_prefix_len)
        naive.mamba2_materialize(
            pool[None], x[None], B[None], dt[None], rates, *(t[None] for t in plan), torch.zeros(1, dtype=torch.int32),
            active_request_indices, None if scale is None else scale[None])


@pytest.fixture(name="fresh", autouse=True)
def fresh_backends(monkeypatch):
    """Ops of this file have a FlashInfer kernel, and nothing is remembered from test to test."""
    for name in ("mamba2_replay", "mamba2_materialize"):
        monkeypatch.setattr(OPS[name], "flashinfer", "torch_replay.ops.mamba2.flashinfer")
        monkeypatch.setitem(OPS[name].kernels, "cuda", triton_of(name))
    adapter._known_tables.clear()
    backends.reset()
    yield
    backends.reset()
    adapter._mamba.cache_clear()


def triton_of(name):
    """Stands in for our Triton kernel."""
    def triton(*args, **kwargs):
        triton.calls += 1
        getattr(naive, name)(*args, **kwargs)

    triton.calls = 0
    return triton


@pytest.fixture(name="fake")
def fake_module(monkeypatch):
    """A module `flashinfer` whose functions count their calls."""
    calls = {"checkpointing_ssu": 0, "replayssm_materialize": 0}

    def counted(function):
        def call(*args, **kwargs):
            calls[function.__name__] += 1
            return function(*args, **kwargs)
        return call

    module, mamba = types.ModuleType("flashinfer"), types.ModuleType("flashinfer.mamba")
    module.mamba = mamba
    mamba.checkpointing_ssu, mamba.replayssm_materialize = counted(checkpointing_ssu), counted(replayssm_materialize)
    mamba.allocate_checkpointing_ssu_scratch = lambda *args: tuple(torch.empty(1) for _ in range(3))
    mamba.calls = calls
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.mamba", mamba)
    adapter._mamba.cache_clear()
    return mamba


def run(name, arguments):
    """What the CUDA implementation of an op does, on CPU tensors: body, choice, kernel."""
    op = OPS[name]
    kinds = {key: parameter.kind for key, parameter in op.signature.parameters.items()}
    args = tuple(value for key, value in arguments.items() if kinds[key] != kinds[key].KEYWORD_ONLY)
    kwargs = {key: value for key, value in arguments.items() if kinds[key] == kinds[key].KEYWORD_ONLY}
    out = op.body(*args, **kwargs)
    if out is not None:
        out.fill_(float("nan"))
    select(op, args, kwargs)(*args, **kwargs, **({} if out is None else {"out": out}))
    return out


def build(name, builder, seed=0, **options):
    return named(name, *builder(Rng(seed, "cpu", BF16), **options))


def copies(arguments):
    return {k: v.clone() if isinstance(v, torch.Tensor) and 0 not in v.stride() else v for k, v in arguments.items()}


def compare(name, arguments, mutate=None):
    """Runs the op under the current choice and by the reference on equal inputs."""
    want = copies(arguments)
    with set_backend("naive"):
        expected = run(name, want)
    if mutate:
        mutate(arguments)
    got = run(name, arguments)
    if expected is not None:
        assert torch.equal(raw(got), raw(expected)), "output"
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(raw(value), raw(want[key])), key
