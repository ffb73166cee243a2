"""Warm-up of kernels that serving will need: each runs once at its runtime sizes and strides and changes no state.

On a CUDA device the first call of a kernel compiles it, for every dtype, stride class and constant anew. These
functions make those calls before the first request comes. `Engine.warm_up` calls them all; they also serve an engine
whose forward is elsewhere and that has nothing but a `ReplayContext`.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Optional, Union

import torch
from torch import Tensor

from .. import ops
from ..ops import backends
from ..progress import shown
from .model_state import DefaultModelState, ReplayModelState
from .pools import Pool
from .replay_context import ReplayContext

# what a step overwrites in a context besides its slots
TABLES = ("request_tables", "block_tables", "live_cols", "plan")
FEW_ROWS = 8  # beyond, replay always saves more traffic than it adds work; and so many slots a warm-up writes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def temporary_ring_state(pools: Union[ReplayContext, Sequence[Tensor]], slots: Sequence[int],
                         tables: Sequence[Tensor] = ()) -> Iterator[None]:
    """Within the block, `slots` may be written at will; afterwards they hold what they held, bit for bit.

    That is so too when the block raises. What the block writes to other slots stays written.

    Args:
        pools: a context, which stands for its `block_copy_tensors` (checkpoints, scales, rings, conv rings, cursors)
            and its tables and plans; or tensors [L, S, ...], slots in the second dimension. Tensors may be views that
            overlap: each is kept at its own width, also where several begin at one address.
        slots: in [0, S) of the smallest pool. All layers and every ring row of a slot are kept.
        tables: further tensors that are kept whole.

    Raises:
        ValueError: a slot out of range.
    """
    if isinstance(pools, ReplayContext):
        tables = [*tables, *(getattr(pools, name) for name in TABLES)]
        pools = [view for pool in pools.block_copy_tensors() for view in _stacked(pool)]
    size = min((pool.shape[1] for pool in pools), default=0)
    for slot in slots:
        if not 0 <= slot < size:
            raise ValueError(f"temporary_ring_state: slots holds {slot}, expected slots in [0, {size})")
    # copied as integers: a NaN may lose its payload on its way through a floating-point register
    pools, tables = [_as_integers(pool) for pool in pools], [_as_integers(table) for table in tables]
    at = torch.tensor(list(slots), dtype=torch.int64)
    # all are read before any is put back, so that the order of views of one address does not matter
    rows = [pool[:, at.to(pool.device)] for pool in pools]
    whole = [table.clone() for table in tables]
    try:
        yield
    finally:
        for pool, kept in zip(pools, rows, strict=True):
            pool[:, at.to(pool.device)] = kept
        for table, kept in zip(tables, whole, strict=True):
            table.copy_(kept)


def _stacked(pool: Pool) -> list[Tensor]:
    """A pool as tensors [L, S, ...]; of a list, each layer."""
    return [pool] if isinstance(pool, Tensor) else [layer.unsqueeze(0) for layer in pool]


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


@torch.no_grad()
def warm_up_decode(context: ReplayContext, capture_sizes: Iterable[int] = (), *, max_num_tokens: Optional[int] = None,
                   windows: Optional[Sequence[int]] = None, quiet: bool = False) -> list[int]:
    """Runs the decode ops of a context (short convolution and replay) in every batch size that steps will have.

    Inputs are random, laid out as a model makes them (column slices of one projection), all T tokens of a row real. The
    first `FEW_ROWS` rows use slots 1, 2, ...; those behind, whose number no kernel is compiled for, are rows of
    padding. Every layer runs, for slices of a pool may differ in alignment. Slots are put back layer by layer, which
    takes memory for a few slots of one layer.

    Args:
        capture_sizes: rows of the steps that will be captured. Sizes above the limit, which is the least of the
            context's requests, its non-null slots and max_num_tokens // T, are left out; if none remains, the limit
            itself runs.
        max_num_tokens: tokens of a step at most, None: no limit.
        windows: W of the steps, None: the context's. An engine that also uses the small-batch route passes (W, 0).
        quiet: no progress bar.

    Returns:
        The sizes that ran, ascending.

    Raises:
        ValueError: no non-null slot; max_num_tokens below T; a size below 1.
    """
    spec, sizes = context.spec, sorted(set(capture_sizes))
    if context.num_slots < 2:
        raise ValueError(f"warm_up_decode: the context has {context.num_slots} slots, expected a non-null slot besides "
                         "the null slot 0")
    if max_num_tokens is not None and max_num_tokens < spec.max_tokens:
        raise ValueError(f"warm_up_decode: max_num_tokens is {max_num_tokens}, expected at least the "
                         f"{spec.max_tokens} tokens of a row")
    if sizes and sizes[0] < 1:
        raise ValueError(f"warm_up_decode: capture_sizes holds {sizes[0]}, expected sizes of at least 1")
    limit = min(context.request_tables.shape[1], context.num_slots - 1)
    if max_num_tokens is not None:
        limit = min(limit, max_num_tokens // spec.max_tokens)
    sizes = [size for size in sizes if size <= limit] or [limit]
    calls = [(size, layer) for size in sizes for layer in range(len(context.layers))]
    for size, layer in shown(calls, f"warming up {context.family} decode", quiet):
        slots = [*range(1, size + 1)][:FEW_ROWS]
        rows = slots + [0] * (size - len(slots))
        memory = _layer_memory(context, layer)
        pools = [pool.unsqueeze(0) for pool in memory if pool is not None]
        for window in (context.window,) if windows is None else windows:
            with temporary_ring_state(pools, slots):
                convolve, replay = _decode_calls(context, memory, rows, spec.max_tokens)
                if memory[0] is not None:
                    convolve()
                replay(window)
    return sizes


@torch.no_grad()
def choose_windows(context: ReplayContext, sizes: Iterable[tuple[int, int]]) -> None:
    """Fills `context.windows` for decode steps of up to `FEW_ROWS` rows: 0 where that is faster than W by a twentieth.

    Runs the replay of all layers one after the other, as a step does, on full rows: with W through one cycle of steps
    from flush to flush, with 0 on rings of one step's tokens. On a CPU nothing is measured and W stays, as it does for
    more rows, where replay saves most of the traffic. What was chosen once stays chosen, for compiled steps hold it.

    Args:
        sizes: (rows, tokens of a row) of the steps. The slots 1 .. rows are put back, which takes memory for them.
    """
    device, window = context.device, context.window
    if device.type not in backends.MEASURED_DEVICES:
        return
    for rows, tokens in sizes:
        if rows > FEW_ROWS or (rows, tokens) in context.windows:
            continue
        cycle = window // tokens  # steps, of which the last one flushes
        cases = [(window, window), (0, tokens)] + [(window, (window - tokens) // 2)] * (cycle > 1)
        flushing, written, *between = _replay_us(context, rows, tokens, cases)
        kept = (flushing + (cycle - 1) * sum(between)) / cycle
        context.window_us[rows, tokens] = {window: kept, 0: written}
        context.windows[rows, tokens] = 0 if written < 0.95 * kept else window


def _replay_us(context: ReplayContext, rows: int, tokens: int, cases: Sequence[tuple[int, int]]) -> list[float]:
    """Microseconds of one step's replay in all layers, for each case (window, tokens in the ring)."""
    slots = range(1, rows + 1)
    with temporary_ring_state(context, slots):
        layers = [_decode_calls(context, _layer_memory(context, layer), slots, tokens)[1]
                  for layer in range(len(context.layers))]
        times = []
        for window, committed in cases:
            context.ring_committed[:, 1 : rows + 1] = committed
            step = functools.partial(_each, layers, window)
            times.append(backends.median_us(step, repeats=5, device=context.device))
    return times


def _each(calls: Sequence[Callable[[int], object]], argument: int) -> None:
    for call in calls:
        call(argument)


def _layer_memory(context: ReplayContext, layer: int) -> list[Optional[Tensor]]:
    """Conv ring, checkpoint, rings, cursors and scales of a layer, as the decode ops take them, [S, ...] each."""
    memory = context.layer(layer)
    return [memory.conv_ring, memory.state, *memory.rings, memory.ring_start, memory.ring_committed, memory.state_scale]


def _decode_calls(context: ReplayContext, memory: list[Optional[Tensor]], slots: Sequence[int],
                  tokens: int) -> tuple[Callable[[], object], Callable[[int], object]]:
    """Decode ops of one layer on random inputs, `tokens` a row: the convolution, and the replay with a window of its
    argument. They write the slots."""
    spec, device, rows = context.spec, context.device, (len(slots), tokens)
    slots = torch.tensor(slots, dtype=torch.int32, device=device)
    conv_ring, *memory, scale = memory
    wide, narrow = spec.heads * spec.head_dim, spec.groups * spec.state_dim
    lens = torch.full_like(slots, tokens)
    draw = {"device": device, "generator": torch.Generator(device).manual_seed(0)}  # the caller's stays where it is

    def columns(*widths: int) -> tuple[Tensor, ...]:
        return torch.randn(*rows, sum(widths), **draw).to(spec.conv_dtype).split(widths, -1)

    def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, **draw).to(dtype)

    mamba2 = context.family == "mamba2"
    by_head, by_group = (spec.heads, spec.head_dim), (spec.groups, spec.state_dim)
    if mamba2:
        z, raw, dt = columns(wide, spec.conv_dim, spec.heads)
        first, second, third = columns(wide, narrow, narrow)
    else:
        raw, _, a, b = columns(spec.conv_dim, wide, math.prod(spec.decay_shape), spec.heads)
        first, second, third = columns(narrow, narrow, wide)
    weight = parameter(spec.conv_dim, spec.conv_width, dtype=spec.conv_dtype)
    bias = parameter(spec.conv_dim, dtype=spec.conv_dtype) if mamba2 else None
    convolve = functools.partial(ops.conv_replay, conv_ring, raw, weight, bias,
                                 torch.zeros_like(slots, dtype=torch.int64), slots, lens, silu=True)
    if mamba2:
        op, how = ops.mamba2_replay, {}
        inputs = (first.unflatten(-1, by_head), dt, -parameter(spec.heads), second.unflatten(-1, by_group),
                  third.unflatten(-1, by_group), parameter(spec.heads), z.unflatten(-1, by_head), parameter(spec.heads))
    else:
        op = ops.gdn_replay if context.family == "gdn" else ops.kda_replay
        how = {"scale": spec.state_dim**-0.5, "l2norm": True}
        inputs = (first.unflatten(-1, by_group), second.unflatten(-1, by_group), third.unflatten(-1, by_head),
                  a.unflatten(-1, spec.decay_shape), b, parameter(spec.heads), parameter(*spec.decay_shape))
    seed = None if context.seeds is None else context.seeds[0]
    return convolve, lambda window: op(*memory, *inputs, slots, lens, scale, seed, window=window,
                                       philox_rounds=spec.philox_rounds, **how)


@torch.no_grad()
def warm_up_lifecycle(context: ReplayContext) -> None:
    """Runs what moves slots around a step: reset, commit, compaction and slot copies, on at most two non-null slots.

    They work on a table and plans of their own with the strides of the live ones, which are neither read nor written;
    the slots (1 and 2) are put back. Returns silently if the context has no non-null slot.
    """
    rows, columns = context.block_tables.shape[1:]
    slots = list(range(1, context.num_slots))[: min(2, columns)]
    if not slots:
        return
    scratch = copy.copy(context)
    for name in ("block_tables", "plan"):
        live = getattr(context, name)
        setattr(scratch, name, live.new_empty_strided(live.shape, live.stride()).zero_())
    device = scratch.block_tables.device
    scratch.block_tables[:, 0, : len(slots)] = torch.tensor(slots, dtype=torch.int32, device=device)

    def first(value: int, others: int = 0) -> Tensor:
        column = torch.full((rows,), others, dtype=torch.int32, device=device)
        column[0] = value
        return column

    # the last column becomes a copy of the first (or, alone, a fresh slot), takes a token up to a block's edge, and is
    # published in the first
    live = len(slots) - 1
    with temporary_ring_state(context, slots):
        scratch.reset_new_slots(first(live - 1, -1), first(live, -1), first(0, -1))
        decoding = torch.zeros(rows, dtype=torch.bool, device=device)
        plan = scratch.commit(first(context.block_size - 1), first(1), decoding, query_lens=first(1),
                              live_cols=first(live), idx_mapping=first(0, -1))
        active, _ = ops.compact_active(plan[3], torch.ones(1, dtype=torch.int32, device=device))
        if context.conv_ring is not None:
            ops.copy_slots(context.conv_ring, *plan[:2], context.layer_group, active)


@torch.no_grad()
def warm_up_materializer(contexts: Union[ReplayContext, Iterable[ReplayContext]]) -> int:
    """Runs the snapshot kernel of contexts with every request inactive, so that nothing is written.

    Once per distinct signature (family, device, and shape, strides and dtype of each pool and ring): contexts remember
    the one they were warmed for, so that a second call does nothing until a pool was resized. Returns the number of
    launches.
    """
    contexts = [contexts] if isinstance(contexts, ReplayContext) else list(contexts)
    done = {context.warmed_signature for context in contexts}
    launches = 0
    for context in contexts:
        signature = _signature(context)
        if signature not in done:
            done.add(signature)
            launches += 1
            A = torch.full((len(context.layers), context.spec.heads), -1.0, dtype=torch.float32,
                           device=context.device)
            plan = list(torch.zeros_like(context.plan).unbind())
            context.materialize([*plan[:3], plan[3].fill_(-1)], torch.full_like(context.live_cols, -1),
                                A if context.family == "mamba2" else None)
        context.warmed_signature = signature
    return launches


def _signature(context: ReplayContext) -> tuple:
    pools = [_stacked(pool) for _, pool in context.pools.named()]
    return (context.family, str(context.device), *(
        (len(layers), tuple(layers[0].shape), layers[0].stride(), layers[0].dtype) for layers in pools))


@torch.no_grad()
def warm_up_replay_kernels(state: DefaultModelState) -> None:
    """Runs the kernels of bounded replay that a batch of padding never launches, on scratch tensors: slot padding (with
    a prefix cache) and the gathering of kept rows (with decoder-side replay). Nothing to do for a state without them.
    """
    if not isinstance(state, ReplayModelState) or not state.groups:
        return
    device, groups = state.memory.device, list(state.groups.values())
    tokens = groups[0].block_size
    # one row of `tokens` tokens, of which the last stays: the others replay, or are dropped
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    positions = torch.arange(1, tokens + 1, device=device)
    slots = positions.repeat(len(groups), 1)
    lens, one = ends[1:].clone(), torch.ones(1, dtype=torch.int32, device=device)
    if state.replay_window:
        ops.pad_replayed_slots(slots, state.cacheable_groups, ends, positions, one, lens, window=state.replay_window)
    if state.tail_windows:
        rows, kept_positions = torch.empty(2, 1, dtype=torch.int64, device=device).unbind()
        dropped = torch.tensor([0, tokens - 1], dtype=torch.int32, device=device)
        ops.gather_replay_rows(
            rows, torch.empty_like(ends), kept_positions, rows.new_empty(1, 1), torch.empty_like(one), ends, dropped,
            lens + 1, one, positions, slots[:1], lens, window=state.kept_tokens)


def warm_up_kernels(state: DefaultModelState, sizes: Sequence[tuple[int, int]], quiet: bool = False) -> None:
    """What a model state's own memory needs, with decode steps of `sizes` (rows, tokens of a row); pools of plain
    states need nothing."""
    contexts = [states for states in state.memory.states.values() if isinstance(states, ReplayContext)]
    for context in contexts:
        choose_windows(context, sizes)
        windows = sorted({context.window, *context.windows.values()})
        warm_up_decode(context, [rows for rows, _ in sizes], windows=windows, quiet=quiet)
        warm_up_lifecycle(context)
    warm_up_materializer(context for context in contexts if context.mode == "align")  # none publishes no snapshots
    warm_up_replay_kernels(state)
