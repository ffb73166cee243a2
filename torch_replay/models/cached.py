"""The forward of a `HybridModel` over its memory: prefill of prompt chunks, and decode through the ops.

Both routes take tokens as `[rows, T]` of which the first `query_lens[row]` are real, share `project`, `split` and
`output` of each mixer with training, and leave the caches so that either route may follow.
"""

import functools

import torch
from torch import Tensor

from .. import ops
from ..ops.rounding import bits, round_state
from ..states.batch import Batch
from ..states.replay_context import ReplayContext
from .layers import decay_rates, rope_rows


def forward_hidden(model, memory, batch: Batch, prefill: bool) -> Tensor:
    """`batch.input_ids` [B, T] -> residual stream [B, T, hidden] after the last sublayer; caches and rings are written.

    Tokens that decoder-side replay dropped come out as zero, and the caches of its layers do not get them.
    Cursors are not: the caller commits them once it knows what was accepted.
    """
    rope = rope_rows(model.rope, batch.positions.view(batch.input_ids.shape))
    x = model.embedding(batch.input_ids)
    if mixers := [layer.mixer for layer in model.layers if layer.kind == "mamba2"]:
        batch.decay_rates = decay_rates(mixers)
    layers = list(zip(model.layers, memory.place))
    if batch.tail is None:
        return _run_layers(layers, memory, x, rope, batch, prefill)
    cut = len(layers) - model.config.decoder_replay_layers
    x, tail = _run_layers(layers[:cut], memory, x, rope, batch, prefill), batch.tail
    kept, rope = x.flatten(0, 1)[tail.rows][None], rope_rows(model.rope, tail.batch.positions[None])
    kept = _run_layers(layers[cut:], memory, kept, rope, tail.batch, prefill)
    return torch.zeros_like(x).flatten(0, 1).index_copy(0, tail.rows, kept[0]).view_as(x)


def _run_layers(layers, memory, x, rope, batch, prefill) -> Tensor:
    for layer, place in layers:
        h = layer.norm(x)
        if layer.kind == "mlp":
            y = layer.mixer(h)
        elif layer.kind == "engram":
            y = layer.mixer(h, batch.engram[place])
        elif layer.kind in ("swa", "full"):
            y = _attention(layer.mixer, layer.kind, memory.kv[layer.kind][place], h, rope, batch)
        else:
            route = _ROUTES[layer.kind, prefill]
            y = route(layer.mixer, memory.states[layer.kind], place, h, batch)
        x = x + y
    return x


def _attention(mixer, kind, cache, h, rope, batch):
    q, k, v = (t.flatten(0, 1) for t in mixer.project(h, rope))
    attn = batch.attn[kind]
    ops.write_kv(cache, k, v, attn.slot_mapping)
    if kind == "swa":
        out = ops.swa_attention(q, cache, attn.indices, attn.lens, scale=mixer.scale)
    else:
        out = ops.paged_attention(q, cache, attn.block_table, batch.seq_lens, batch.query_start_loc, batch.query_lens,
                                  scale=mixer.scale)
    return mixer.output(out.unflatten(0, h.shape[:2]))


def _slots(slots, states, place):
    """[B], of a batch's slots by family [G, B], those that layer `place` of a family goes through."""
    return slots[states.family][states.group_of[place]]


def _conv_replay(mixer, states, place, raw, bias, batch):
    return ops.conv_replay(states.conv_ring[place], raw, mixer.conv_weight, bias, batch.first,
                           _slots(batch.conv_slots, states, place), batch.query_lens, silu=True)


def _decode_mamba2(mixer, states, place, h, batch):
    z, raw, dt = mixer.project(h)
    x, B, C = mixer.split(_conv_replay(mixer, states, place, raw, mixer.conv_bias, batch))
    inputs = (x, dt, batch.decay_rates[place], B, C, mixer.D, z, mixer.dt_bias,
              _slots(batch.state_slots, states, place), batch.query_lens)
    if not isinstance(states, ReplayContext):
        y = ops.mamba2_update(states.state[place], *inputs, batch.token_slots["mamba2"])
    else:
        memory = states.layer(place)
        y = ops.mamba2_replay(memory.state, *memory.rings, memory.ring_start, memory.ring_committed, *inputs,
                              **states.rounding(place), window=batch.windows["mamba2"])
    return mixer.output(y)


def _decode_delta(mixer, states, place, h, batch):
    family = states.family
    update, replay = _DELTA_OPS[family]
    raw, z, a, b = mixer.project(h)
    q, k, v = mixer.split(_conv_replay(mixer, states, place, raw, None, batch))
    inputs = (q, k, v, a, b, *mixer.gate_parameters, _slots(batch.state_slots, states, place), batch.query_lens)
    how = {"scale": mixer.scale, "l2norm": True}
    if not isinstance(states, ReplayContext):
        o = update(states.state[place], *inputs, batch.token_slots[family], **how)
    else:
        memory = states.layer(place)
        o = replay(memory.state, *memory.rings, memory.ring_start, memory.ring_committed, *inputs,
                   **states.rounding(place), window=batch.windows[family], **how)
    return mixer.output(o, z)


def _prefill_mamba2(mixer, states, place, h, batch):
    z, raw, dt = mixer.project(h)
    history = _conv_history(states, place, states.spec.conv_width - 1, batch)
    x, B, C = mixer.split(mixer.conv(raw, history))
    _append_conv(states, place, raw, batch)
    real = _real_tokens(h, batch)[..., None]
    scan = functools.partial(ops.ssd_prefill, edges=batch.edges)
    y, final, at_edges = mixer.core(x, torch.where(real, mixer.step_sizes(dt), 0.0), B, C,
                                    _initial_state(states, place, batch), scan)
    _store_states(states, place, final, at_edges, batch)
    return mixer.output(mixer.gate(y, z))


def _prefill_delta(mixer, states, place, h, batch):
    raw, z, a, b = mixer.project(h)
    history = _conv_history(states, place, states.spec.conv_width - 1, batch)
    q, k, v = mixer.split(mixer.conv(raw, history))
    _append_conv(states, place, raw, batch)
    real = _real_tokens(h, batch)
    g, beta = (torch.where(real.view(*real.shape, *[1] * (value.dim() - 2)), value, 0.0)
               for value in mixer.decays(a, b))
    scan = functools.partial(ops.delta_prefill, edges=batch.edges)
    o, final, at_edges = mixer.core(q, k, v, g, beta, _initial_state(states, place, batch), scan)
    _store_states(states, place, final, at_edges, batch)
    return mixer.output(o, z)


_DELTA_OPS = {"gdn": (ops.gdn_update, ops.gdn_replay), "kda": (ops.kda_update, ops.kda_replay)}
_ROUTES = {
    ("mamba2", True): _prefill_mamba2, ("mamba2", False): _decode_mamba2,
    ("gdn", True): _prefill_delta, ("gdn", False): _decode_delta,
    ("kda", True): _prefill_delta, ("kda", False): _decode_delta,
}


def _real_tokens(h, batch):
    """[B, T] flags of tokens that are not padding: padding passes a scan with step 0, which changes nothing."""
    return torch.arange(h.shape[1], device=h.device) < batch.query_lens[:, None]


def _initial_state(states, place, batch):
    """State [B, ...] that a chunk starts from: zero at a prompt's first chunk, whatever the slot holds."""
    began, slots = (batch.first > 0).view(-1, 1, 1, 1), _slots(batch.state_slots, states, place).long()
    found = states.state[place, slots].float()
    if states.state_scale is not None:
        found = found * states.state_scale[place, slots].unsqueeze(-1)
    return torch.where(began, found, 0.0)


def _store_states(states, place, final, at_edges, batch):
    """Hands the state [B, ...] over as the new checkpoint, those at edges [B, E, ...] as snapshots."""
    _store_state(states, place, final, _slots(batch.state_slots, states, place).long())
    if batch.edges is not None:
        _store_state(states, place, at_edges.flatten(0, 1), _slots(batch.edge_slots, states, place).flatten().long())


def _store_state(states, place, final, slots):
    """Writes checkpoints [B, ...], rounded to nearest, to slots [B]; the null slot stays as it is."""
    dtype, real, old = states.state.dtype, (slots > 0).view(-1, 1, 1, 1), states.state[place, slots]
    rounded, scales = round_state(dtype, slots, final, states.state_scale is not None, None, 0)
    if scales is not None:
        kept = torch.where(real[..., 0], scales, states.state_scale[place, slots])
        _write_slots(states.state_scale, place, slots, kept)
    # as integers: there is no `where` of float8
    stored = torch.where(real, rounded.view(bits(dtype)), old.view(bits(dtype)))
    _write_slots(states.state, place, slots, stored.view(dtype))


def _write_slots(pool, place, slots, values):
    """pool [L, S, ...] at layer `place` and slots [B]. Of a slice of the pool Inductor would write a copy."""
    pool.index_put_((torch.full_like(slots, place), slots), values)


def _conv_history(states, place, width, batch):
    """The `width` inputs before each row's first token, [B, width, D], oldest first, zeros before position 0."""
    ring, slots = states.conv_ring[place], _slots(batch.conv_slots, states, place).long()
    position = batch.first[:, None] + torch.arange(-width, 0, device=ring.device)
    found = ring[slots[:, None], :, position % ring.shape[2]]
    return torch.where((position >= 0)[..., None], found, 0.0)


def _append_conv(states, place, raw, batch):
    """Writes each row's last inputs to their columns, `position % conv_len`, and to the ring of a snapshot inside the
    chunk the last inputs before it. raw: [B, T, D]."""
    ring, slots = states.conv_ring[place], _slots(batch.conv_slots, states, place).long()[:, None]
    length, ends, live = ring.shape[2], batch.query_lens.long()[:, None], ring[slots]
    if batch.edges is not None:
        ends = torch.cat([ends, batch.edges.long()], 1)
        slots = torch.cat([slots, _slots(batch.edge_slots, states, place).long()], 1)
    column = torch.arange(length, device=raw.device)
    # the newest token before each end that falls on each column, counted from the row's first token
    token = ends[..., None] - 1 - ((batch.first[:, None] + ends)[..., None] - 1 - column) % length
    at = token.clamp(min=0).flatten(1)[..., None].expand(-1, -1, raw.shape[2])
    new = raw.gather(1, at).unflatten(1, token.shape[1:]).transpose(2, 3)
    values = torch.where((token >= 0)[:, :, None], new.to(ring.dtype), live)
    values = torch.where((slots > 0)[..., None, None], values, ring[0])  # nobody writes the null slot
    _write_slots(states.conv_ring, place, slots.flatten(), values.flatten(0, 1))
