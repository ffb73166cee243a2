"""`torch_replay.nn`: the layers compute what a plain recurrence in float64 computes from the same parameters."""

import pytest
import torch
import torch.nn.functional as F
from harness import assert_close

import torch_replay
from torch_replay.nn import GatedDeltaNet, KimiDeltaAttention, Mamba2Mixer

HIDDEN, WIDTH = 12, 4
LAYERS = {
    "mamba2": lambda: Mamba2Mixer(HIDDEN, heads=4, head_dim=6, state_dim=5, groups=2),
    "mamba2_limits": lambda: Mamba2Mixer(HIDDEN, heads=4, head_dim=6, state_dim=5, groups=2, use_bias=True,
                                         time_step_limit=(0.02, 0.05), norm_groups=1),
    "gdn": lambda: GatedDeltaNet(HIDDEN, heads=4, value_dim=6, key_dim=5, key_heads=2),
    "kda": lambda: KimiDeltaAttention(HIDDEN, heads=3, head_dim=6),
}


def conv(x, weight, bias=None):
    """[T, D] by weight [D, 1, width], then silu."""
    padded = F.pad(x.T, (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded[None], weight, bias, groups=len(weight))[0].T)


def rms(x, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def unit(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def plain_mamba2(layer, x):
    heads, inner = len(layer.A_log), layer.norm.weight.numel()
    shared = (layer.conv1d.weight.shape[0] - inner) // 2
    z, mixed, dt = layer.in_proj(x).split([inner, inner + 2 * shared, heads], -1)
    u, B, C = conv(mixed, layer.conv1d.weight, layer.conv1d.bias).split([inner, shared, shared], -1)
    u, (B, C) = u.view(len(x), heads, -1), (t.view(len(x), 2, -1).repeat_interleave(heads // 2, 1) for t in (B, C))
    dt = F.softplus(dt + layer.dt_bias).clamp(layer.limits["dt_min"], layer.limits["dt_max"])
    state, outputs = 0, []
    for t in range(len(x)):
        kept = torch.exp(-torch.exp(layer.A_log) * dt[t])[:, None, None]
        state = kept * state + dt[t][:, None, None] * u[t][:, :, None] * B[t][:, None]
        outputs.append((state @ C[t][:, :, None])[..., 0] + layer.D[:, None] * u[t])
    gated = torch.stack(outputs).flatten(1) * F.silu(z)
    groups = layer.norm.groups
    return layer.out_proj(rms(gated.unflatten(-1, (groups, -1)), layer.norm.eps).flatten(1) * layer.norm.weight)


def delta(q, k, v, g, beta):
    """[T, heads, ..], g [T, heads, K or 1], by the recurrence as it is written."""
    state, outputs = torch.zeros(v.shape[1], v.shape[2], k.shape[2], dtype=v.dtype), []
    for t in range(len(v)):
        state = state * torch.exp(g[t])[:, None]
        u = beta[t][:, None] * (v[t] - (state @ k[t][:, :, None])[..., 0])
        state = state + u[:, :, None] * k[t][:, None]
        outputs.append((state @ q[t][:, :, None])[..., 0] * k.shape[2] ** -0.5)
    return torch.stack(outputs)


def plain_gdn(layer, x):
    """Key head by key head: its columns of in_proj_qkvz are q, k, then v and z of its value heads."""
    K, V, parts = 5, 6, {name: [] for name in "qkvzba"}
    for h in range(2):
        own = layer.in_proj_qkvz(x).view(len(x), 2, -1)[:, h]
        for name, first, last in (("q", 0, K), ("k", K, 2 * K), ("v", 2 * K, 2 * K + 2 * V),
                                  ("z", 2 * K + 2 * V, 2 * K + 4 * V)):
            parts[name].append(own[:, first:last])
        own = layer.in_proj_ba(x).view(len(x), 2, 4)[:, h]
        parts["b"].append(own[:, :2])
        parts["a"].append(own[:, 2:])
    q, k, v, z, b, a = (torch.cat(parts[name], 1) for name in "qkvzba")
    mixed = conv(torch.cat([q, k, v], 1), layer.conv1d.weight)
    q, k = (unit(t.view(len(x), 2, K)).repeat_interleave(2, 1) for t in (mixed[:, : 2 * K], mixed[:, 2 * K : 4 * K]))
    g = -torch.exp(layer.A_log) * F.softplus(a + layer.dt_bias)
    o = delta(q, k, mixed[:, 4 * K :].view(len(x), 4, V), g[..., None], torch.sigmoid(b))
    gated = rms(o, layer.norm.eps) * layer.norm.weight * F.silu(z.view(len(x), 4, V))
    return layer.out_proj(gated.flatten(1))


def plain_kda(layer, x):
    q, k, v = (conv(project(x), conv1d.weight).view(len(x), 3, 6) for project, conv1d in (
        (layer.q_proj, layer.q_conv1d), (layer.k_proj, layer.k_conv1d), (layer.v_proj, layer.v_conv1d)))
    a = layer.f_b_proj(layer.f_a_proj(x)) + layer.dt_bias
    g = -torch.exp(layer.A_log.view(3, 1)) * F.softplus(a).view(len(x), 3, 6)
    o = delta(unit(q), unit(k), v, g, torch.sigmoid(layer.b_proj(x)))
    gate = torch.sigmoid(layer.g_b_proj(layer.g_a_proj(x))).view(len(x), 3, 6)
    return layer.o_proj((rms(o, layer.o_norm.eps) * layer.o_norm.weight * gate).flatten(1))


PLAIN = {"mamba2": plain_mamba2, "gdn": plain_gdn, "kda": plain_kda}


def build(name):
    """A layer whose parameters are all random, norms and biases too, and strong enough to be seen."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key not in ("A_log", "dt_bias"):
                parameter.normal_(0 if parameter.dim() > 1 else 1, 0.5)
    return layer


def double(name, layer):
    copy = LAYERS[name]()
    copy.load_state_dict(layer.state_dict())
    return copy.double()


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layer_equals_plain_recurrence(name):
    """A prompt in two chunks, then steps of three tokens with two of them kept, in two slots of two layers; the state
    matters: without its past the last outputs are others."""
    layer = build(name)
    cache = layer.cache(2, slots=3, window=4, tokens=3)
    text, slots = torch.randn(2, 35, HIDDEN), torch.tensor([3, 1])
    want = [PLAIN[name.split("_")[0]](double(name, layer), row.double()) for row in text]
    found, at = [], 0

    def run(step, x):
        outputs = [layer(x, step, index) for index in range(2)]
        assert torch.equal(*outputs)
        return outputs[0]

    for count in (7, 4):
        again = torch.full((2,), at > 0)
        found.append(run(cache.prefill(slots, count, again), text[:, at : at + count]))
        cache.commit()
        at += count
    while at + 3 <= 35:
        found.append(run(cache.decode(slots), text[:, at : at + 3])[:, :2])
        cache.commit(torch.tensor([2, 2]))
        at += 2
    got = torch.cat(found, 1)
    for row in range(2):
        assert_close(name, got[row], want[row][:at], 2e-5)
    alone = PLAIN[name.split("_")[0]](double(name, layer), text[0, at - 1 : at].double())
    assert (alone[0] - want[0][at - 1]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["mamba2", "gdn", "kda"])
@torch.no_grad()
def test_prefill_and_decode(name):
    """The two methods of a layer alone begin the step; a decode step with its commit is one compiled graph."""
    layer = build(name)
    cache, slots, text = layer.cache(1, slots=2, window=3), torch.tensor([2, 1]), torch.randn(2, 14, HIDDEN)
    torch._dynamo.reset()

    def decode(x):
        y = layer.decode(x, cache, slots)
        cache.commit()
        return y

    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    found = [layer.prefill(text[:, :6], cache, slots)]
    cache.commit()
    found += [compiled(text[:, at : at + 1]) for at in range(6, 14)]
    want = torch.stack([PLAIN[name](double(name, layer), row.double()) for row in text])
    assert_close(name, torch.cat(found, 1), want, 2e-5)


def test_names():
    """The parameters have the public models' names."""
    names = {name: {key.removesuffix(".weight") for key in LAYERS[name]().state_dict()} for name in PLAIN}
    assert names["mamba2"] == {"in_proj", "conv1d", "conv1d.bias", "A_log", "dt_bias", "D", "norm", "out_proj"}
    assert names["gdn"] == {"in_proj_qkvz", "in_proj_ba", "conv1d", "dt_bias", "A_log", "norm", "out_proj"}
    assert names["kda"] == {"q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_a_proj", "f_b_proj",
                            "b_proj", "A_log", "dt_bias", "g_a_proj", "g_b_proj", "o_norm", "o_proj"}
    assert torch_replay.nn.GatedDeltaNet is GatedDeltaNet


def theirs(name):
    """transformers' layer of the same sizes and how its parameters are called."""
    import transformers

    if name == "mamba2":
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Layer
        config = transformers.Mamba2Config(hidden_size=HIDDEN, num_heads=4, head_dim=6, state_size=5, n_groups=2,
                                           expand=2, conv_kernel=WIDTH, chunk_size=8, layer_norm_epsilon=1e-5)
    elif name == "gdn":
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet as Layer
        config = transformers.Qwen3NextConfig(hidden_size=HIDDEN, linear_num_value_heads=4, linear_num_key_heads=2,
                                              linear_key_head_dim=5, linear_value_head_dim=6,
                                              linear_conv_kernel_dim=WIDTH, rms_norm_eps=1e-6)
    else:
        kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        Layer = kimi.KimiLinearDeltaAttention
        config = kimi.KimiLinearConfig(hidden_size=HIDDEN, linear_num_heads=3, linear_head_dim=6, rms_norm_eps=1e-5,
                                       linear_conv_kernel_dim=WIDTH)
    return Layer(config, 0)


def renamed(name, weights):
    """Our parameters as transformers calls them, which keeps those of Kimi-Linear's convolutions and decay elsewhere
    than the public checkpoint does."""
    if name != "kda":
        return weights
    found = {key: value for key, value in weights.items() if "conv1d" not in key}
    for key in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
        found[f"forget_gate.{key}"] = found.pop(key)
    return found | {"conv1d.weight": torch.cat([weights[f"{part}_conv1d.weight"] for part in "qkv"])}


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_transformers_layers(name):
    """With the same parameters transformers' own layers give the same, if they are installed."""
    pytest.importorskip("transformers")
    layer, other = build(name), theirs(name)
    other.load_state_dict(renamed(name, layer.state_dict()))
    text, slots = torch.randn(1, 13, HIDDEN), torch.tensor([1])
    cache = layer.cache(1, slots=1, window=4)
    found = [layer.prefill(text[:, :8], cache, slots)]
    for at in range(8, 13):
        cache.commit()
        found.append(layer.decode(text[:, at : at + 1], cache, slots))
    assert_close(name, torch.cat(found, 1), other.eval()(text), 1e-5)
