"""Peers, each optional: FlashInfer, flash-linear-attention, and vLLM's Triton kernels from a folder.

vLLM: the environment variable TORCH_REPLAY_VLLM_PEER names a folder in which `vllm.model_executor.layers.mamba.ops`
can be imported, the real package or the few files that its kernels need. FlashInfer on a machine that cannot build its
modules: TORCH_REPLAY_FLASHINFER_PREBUILT=1 says that they lie in its cache already.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from .contestants import Case, Contestant, Replay, Update
from .families import Draw, update_bytes
from .small_ops import Materialize, Task


class Missing(Exception):
    """A peer that is not here, with the reason."""


def _import(module: str):
    try:
        return importlib.import_module(module)
    except Exception as error:  # peers break in many ways when half installed, and none may stop the benchmark
        raise Missing(f"{type(error).__name__}: {error}".splitlines()[0]) from None


@cache
def _flashinfer():
    found = _import("flashinfer.mamba")
    if not hasattr(found, "checkpointing_ssu"):
        raise Missing("this version has no checkpointing_ssu")
    if os.environ.get("TORCH_REPLAY_FLASHINFER_PREBUILT") == "1":
        core = _import("flashinfer.jit.core")
        for kind in vars(core).values():
            if isinstance(kind, type) and "build" in vars(kind):
                kind.build = lambda self, *args, **kwargs: None
    return found


@cache
def _plain_tile():
    """Not a peer but a yardstick; it is missing only where Triton is."""
    return _import(f"{__package__}.plain_tile")


@cache
def _fla():
    return _import("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule


@cache
def _vllm(module: str):
    folder = os.environ.get("TORCH_REPLAY_VLLM_PEER")
    if not folder:
        raise Missing("TORCH_REPLAY_VLLM_PEER is not set")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return getattr(_import(f"vllm.model_executor.layers.mamba.ops.{module[0]}"), module[1])


def _tied(per_head: Tensor, *sizes: int) -> Tensor:
    """[..., H] -> [..., H, *sizes] without memory: how these libraries spell one scalar a head."""
    return per_head.view(*per_head.shape, *[1] * len(sizes)).expand(*per_head.shape, *sizes)


def _tied_params(family, params) -> tuple[Tensor, Tensor, Tensor]:
    A, D, bias = params
    return _tied(A, family.dim, family.state_dim), _tied(D, family.dim), _tied(bias, family.dim)


class PlainTileReplay(Replay):
    """The shortest Triton version of the same kernel, which cannot flush: the check's flushing steps run on the op."""

    name = "plain tile"
    flushing = False

    @staticmethod
    def supports(case: Case) -> bool:
        exact = case.tokens == 1 and case.state_dtype == torch.float32 and case.mode == "no flush"
        return case.family.family == "mamba2" and exact and case.device.type == "cuda"

    def call(self, start, committed, inputs, slots) -> Tensor:
        if self.flushing:
            return super().call(start, committed, inputs, slots)
        y = torch.empty_like(inputs[0])
        _plain_tile().launch(self.state, self.rings, start, committed, *inputs, *self.params, slots, y,
                             self.case.window)
        return y

    def step(self, inputs) -> Tensor:
        self.flushing = bool((self.committed + self.case.tokens > self.case.window).any())
        return super().step(inputs)


class FlashInferReplay(Replay):
    """`checkpointing_ssu`: the same pools, cursors and flush rule as `mamba2_replay`."""

    name, against = "flashinfer", "replay"

    def __init__(self, case: Case, draw: Draw):
        super().__init__(case, draw)
        self.run = _flashinfer().checkpointing_ssu
        family = case.family
        self.A, self.D, self.bias = _tied_params(family, self.params)
        self.out = torch.empty_like(self.inputs[0][0])
        self.scratch = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), _flashinfer().allocate_checkpointing_ssu_scratch(
            case.batch, family.heads, case.tokens, case.window, self.out.dtype, case.device)))

    @staticmethod
    def supports(case: Case) -> bool:
        return case.family.family == "mamba2" and case.mode != "plain" and case.device.type == "cuda"

    def call(self, start, committed, inputs, slots) -> Tensor:
        x, dt, B, C = inputs
        self.run(self.state, *self.rings, start, committed, x, _tied(dt, self.family.dim), self.A, B, C, self.out,
                 D=self.D, dt_bias=self.bias, dt_softplus=True, state_batch_indices=slots, pad_slot_id=0,
                 **self.scratch)
        return self.out


class VllmReplay(Replay):
    """vLLM's output-only decode kernel (one token). Its ring has W rows that never turn, and a flush folds the new
    token too: with p steps since the last flush, write position p, flush at p = W - 1. Cursors are by row."""

    name, against = "vllm", "replay"

    def __init__(self, case: Case, draw: Draw):
        super().__init__(case, draw)
        self.run = _vllm(("selective_state_update_replayssm_output_only",
                          "selective_state_update_replayssm_output_only"))
        family, window = case.family, case.window
        x_ring, B_ring, dt_ring = family.rings(draw, self.count, ring_len=window)
        self.rings = dict(x_cache=x_ring, B_cache=B_ring, dt_cache=dt_ring)
        self.A, self.D, self.bias = _tied_params(family, self.params)
        self.out = torch.empty_like(self.inputs[0][0][:, 0])
        self.scratch = torch.empty(case.batch, family.groups, window, device=case.device)
        self.position = torch.zeros(case.batch, dtype=torch.int32, device=case.device)

    @staticmethod
    def supports(case: Case) -> bool:
        mamba2 = case.family.family == "mamba2" and case.mode != "plain"
        return mamba2 and case.tokens == 1 and case.device.type == "cuda"

    def decode(self, position, flush, inputs, slots) -> Tensor:
        x, dt, B, C = (part[:, 0] for part in inputs)
        self.run(self.state, x, _tied(dt, self.family.dim), self.A, B, C, self.D, self.bias, dt_softplus=True,
                 **self.rings, bc_pre=self.scratch, write_pos=position, is_flush=flush, max_cache_len=self.case.window,
                 state_batch_indices=slots, out=self.out)
        return self.out.unsqueeze(1)

    def launches(self) -> list[Callable]:
        launches = []
        for phase in self.schedule.phase:
            for inputs, slots in zip(self.inputs, self.slots):
                position = phase[slots.long()].contiguous()
                launches.append(partial(self.decode, position, position == self.case.window - 1, inputs, slots))
        return launches

    def step(self, inputs) -> Tensor:
        flush = self.position == self.case.window - 1
        y = self.decode(self.position, flush, inputs, self.slots[0])
        self.position = torch.where(flush, 0, self.position + 1)
        return y


class VllmUpdate(Update):
    """vLLM's plain update with its tuned launch settings. With T > 1 a request owns T slots, one for each token's
    state; it starts from that of the last accepted token and overwrites all."""

    name, against = "vllm", "update"

    def __init__(self, case: Case, draw: Draw):
        super().__init__(case, draw)
        self.run = _vllm(("mamba_ssm", "selective_state_update"))
        family = case.family
        self.A, self.D, self.bias = _tied_params(family, self.params)
        self.out = torch.empty_like(self.inputs[0][0].flatten(0, 1))
        self.spec = {}
        if self.kept:
            lens = torch.arange(case.batch + 1, device=case.device, dtype=torch.int32) * case.tokens
            accepted = torch.full((case.batch,), case.tokens, device=case.device, dtype=torch.int32)
            self.spec = dict(cu_seqlens=lens, num_accepted_tokens=accepted)
            self.steps = 1

    @staticmethod
    def supports(case: Case) -> bool:
        return case.family.family == "mamba2" and case.mode == "plain" and case.device.type == "cuda"

    def places(self, rows: Tensor, step: int) -> tuple[Tensor, None]:
        return (rows[:, 1:] if self.kept else rows).contiguous(), None

    def initial(self) -> Tensor:
        return self.state[self.slots[0, :, -1].long()].float()

    def call(self, inputs, read, written) -> Tensor:
        x, dt, B, C = (part.flatten(0, 1) for part in inputs)
        self.run(self.state, x, _tied(dt, self.family.dim), self.A, B, C, self.D, self.bias, dt_softplus=True,
                 state_batch_indices=read, out=self.out, **self.spec)
        return self.out.view(inputs[0].shape)


class FlaUpdate(Update):
    """`fused_recurrent_gated_delta_rule`: no pool, a fresh float32 final state at every call, and only the state after
    the last of T tokens (so that rejecting drafts needs something else)."""

    name, against = "fla", "update"

    def __init__(self, case: Case, draw: Draw):
        super().__init__(case, draw)
        self.run = _fla()
        first = self.slots[:, :, 0].long()
        self.states = [self.state[rows].contiguous() for rows in first]
        self.finals = [None] * case.sets
        self.steps = 1

    @staticmethod
    def supports(case: Case) -> bool:
        delta = case.family.family == "gdn" and case.mode == "plain" and case.device.type == "cuda"
        return delta and case.state_dtype == torch.float32

    def decode(self, index, inputs) -> Tensor:
        q, k, v, a, b = inputs
        A_log, bias = self.params
        o, self.finals[index] = self.run(
            q, k, v, g=a, beta=b, scale=self.family.key_dim**-0.5, initial_state=self.states[index],
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias,
            use_beta_sigmoid_in_kernel=True, state_v_first=True)
        return o

    def launches(self) -> list[Callable]:
        # `finals` keeps every set's result alive: written to one address over and over, they would stay in the cache
        return [partial(self.decode, k, self.inputs[k]) for k in range(self.case.sets)]

    def bytes(self) -> float:
        case = self.case
        return update_bytes(case.family, case.batch, case.tokens, case.state_dtype, written=1)

    def step(self, inputs) -> Tensor:
        o = self.decode(0, inputs)
        self.states[0] = self.finals[0]
        return o


class FlashInferMaterialize(Materialize):
    """`replayssm_materialize`: addresses of every layer's pools in tables, built beforehand as an engine would."""

    name = "flashinfer"

    @staticmethod
    def supports(task: Task) -> bool:
        return task.op == "mamba2_materialize" and task.device.type == "cuda"

    def own(self) -> Callable:
        return _flashinfer().replayssm_materialize

    def launches(self) -> list[Callable]:
        bound = partial(self.bound, self.tables(self.state))
        return [partial(bound, *self.spread(plan)) for plan in self.plans]

    def tables(self, state: Tensor) -> list[Tensor]:
        """Address and slot stride of every layer, for state, rings, A and the scales that there are not."""
        pools = (state, *self.rings)
        numbers = [[[pool[layer].data_ptr() for layer in range(len(pool))], [pool.stride(1)] * len(pool)]
                   for pool in pools]
        A, layers = self.params[0], len(state)
        flat = [part for pair in numbers for part in pair] + [[row.data_ptr() for row in A], [0] * layers, [0] * layers]
        return [torch.tensor(part, dtype=torch.int64, device=state.device) for part in flat]

    def spread(self, plan) -> tuple[Tensor, ...]:
        """Slots by layer, cursors by row."""
        source, target, start, count, layer_group, active = plan
        groups = layer_group.long()
        return source[groups].contiguous(), target[groups].contiguous(), start[0], count[0], active

    def bound(self, tables: list[Tensor], source, target, start, count, active) -> None:
        family = self.task.family
        self.own()(*tables, source, target, start, count, active, state_dtype=self.state.dtype,
                   input_dtype=self.rings[0].dtype, matrixA_dtype=self.params[0].dtype, dim=family.dim,
                   dstate=family.state_dim, num_heads=family.heads, heads_per_group=family.heads // family.groups,
                   max_window=self.task.window, ring_buffer_len=self.ring_len, pad_slot_id=0)

    def call(self, op: Callable, state: Tensor, plan) -> None:
        if op is self.own():
            self.bound(self.tables(state), *self.spread(plan))
        else:
            super().call(op, state, plan)


PEERS: tuple[type[Contestant], ...] = (PlainTileReplay, VllmReplay, VllmUpdate, FlashInferReplay,
                                        FlaUpdate)
TASK_PEERS: tuple[type, ...] = (FlashInferMaterialize,)


def available() -> dict[str, str]:
    """Peer -> "present" or why it is missing."""
    probes = {"plain tile": _plain_tile, "flashinfer": _flashinfer, "fla": _fla,
              "vllm": lambda: _vllm(("mamba_ssm", "selective_state_update"))}
    found = {}
    for name, probe in probes.items():
        try:
            probe()
            found[name] = "present"
        except Missing as reason:
            found[name] = f"missing ({reason})"
    return found
