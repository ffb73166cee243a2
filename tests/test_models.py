"""The model's forward equals the token-by-token truth; folders, configurations and the shipped model hold up."""

import dataclasses
import inspect
import json
import sched
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from torch_replay.models import LAYER_KINDS, HybridConfig, HybridModel, load_tokenizer, small_model_dir
from torch_replay.models import layers as layers_module
from torch_replay.models.evaluate import forgetting_losses, generate_slow, shut_engram, token_losses
from torch_replay.models.layers import causal_conv

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder of its own
from truth_model import TruthModel  # noqa: E402


def tiny_config(**changes):
    """Odd, unequal sizes, so that a mixed-up dimension cannot pass; every layer kind once."""
    values = {
        "vocab_size": 31, "hidden_size": 24, "pattern": LAYER_KINDS, "max_position": 160, "eos_token_id": 0,
        "mamba_heads": 6, "mamba_head_dim": 5, "mamba_state_dim": 7, "mamba_groups": 2,
        "gdn_key_heads": 2, "gdn_value_heads": 4, "gdn_key_dim": 6, "gdn_value_dim": 9,
        "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "sliding_window": 5, "mlp_hidden": 17,
        "engram_order": 4, "engram_heads": 3, "engram_dim": 5, "engram_table_size": 41,
        "kda_heads": 3, "kda_head_dim": 5,
    }  # fmt: skip
    return HybridConfig(**(values | changes))


def tiny_model(seed=0, **changes):
    """A model with random weights of ordinary size; norm weights, biases and D are random too."""
    torch.manual_seed(seed)
    model = HybridModel(tiny_config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "conv_bias", "mixer.D", "q_weight", "k_weight", "engram.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def error(got, truth):
    """RMS of the difference over the RMS of the truth."""
    return ((got.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()).item()


@pytest.mark.parametrize(
    "pattern,tokens,changes",
    [
        (LAYER_KINDS, 1, {}),
        (LAYER_KINDS, 133, {}),
        (("mamba2",), 70, {"mamba_groups": 3}),
        (("gdn",), 70, {"gdn_key_heads": 4}),
        (("swa",), 23, {"sliding_window": 1}),
        (("swa", "full"), 40, {"sliding_window": 64, "num_kv_heads": 1}),
        (("mlp",), 3, {}),
        (("kda",), 37, {}),
        (("gdn", "mamba2", "mamba2", "mlp"), 66, {"conv_width": 2}),
        (("engram",), 30, {"engram_order": 2, "engram_heads": 1}),
        (("engram", "mlp", "engram"), 30, {"engram_order": 5}),
    ],
)
def test_forward_equals_truth(pattern, tokens, changes):
    """Chunked float32 logits equal the token-by-token float64 ones, for mixed patterns and those of one kind."""
    model = tiny_model(pattern=pattern, **changes)
    ids = torch.randint(31, (2, tokens))
    got = model(ids)
    assert got.shape == (2, tokens, 31)
    for row in range(2):
        assert error(got[row], TruthModel(model).logits(ids[row].tolist())) < 1e-5


def test_float64_forward_equals_truth():
    """In float64 only the float32 RoPE table keeps the two apart."""
    model = tiny_model().double()
    ids = torch.randint(31, (1, 80))
    assert error(model(ids)[0], TruthModel(model).logits(ids[0].tolist())) < 1e-7


@pytest.mark.parametrize("broken", ["causal_conv", "l2_normalise", "rotate"])
def test_negative_control(broken, monkeypatch):
    """A layer broken on purpose is far outside the bound that the forward is held to."""
    model = tiny_model()
    ids = torch.randint(31, (1, 40))
    truth = TruthModel(model).logits(ids[0].tolist())
    replacements = {
        "causal_conv": lambda x, weight, bias=None, history=None: causal_conv(x, weight.flip(1), bias, history),
        "l2_normalise": lambda x: x,
        "rotate": lambda x, rope: x,
    }
    monkeypatch.setattr(layers_module, broken, replacements[broken])
    assert error(model(ids)[0], truth) > 1e-3


def test_truth_model_steps():
    """`step` and `logits` agree, `logits` starts anew each time, and `zero_states` changes what follows."""
    truth = TruthModel(tiny_model())
    ids = torch.randint(31, (12,)).tolist()
    whole = truth.logits(ids)
    assert torch.equal(truth.logits(ids), whole) and whole.dtype == torch.float64
    truth.reset()
    steps = [truth.step(token) for token in ids[:6]]
    truth.zero_states()
    steps += [truth.step(token) for token in ids[6:]]
    assert torch.equal(torch.stack(steps[:6]), whole[:6])
    assert not torch.allclose(torch.stack(steps[6:]), whole[6:])


def test_gradients_reach_every_parameter():
    """Backward through the chunked forward gives each parameter a finite gradient that is not all zero."""
    model = tiny_model().train()
    logits = model(torch.randint(31, (2, 70)))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(31, (140,))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_mixers_continue_from_state():
    """Conv history and core state, handed over, make two pieces equal the whole: what cached prefill will do."""
    model = tiny_model()
    x = torch.randn(2, 50, 24)
    mamba, gdn = model.layers[0].mixer, model.layers[1].mixer

    def run_mamba(piece, history, state):
        z, xbc, dt = mamba.project(piece)
        inner, b, c = mamba.split(mamba.conv(xbc, history))
        y, state = mamba.core(inner, mamba.step_sizes(dt), b, c, state)
        return mamba.output(mamba.gate(y, z)), xbc[:, -3:], state

    def run_gdn(piece, history, state):
        qkv, z, a, b = gdn.project(piece)
        o, state = gdn.core(*gdn.split(gdn.conv(qkv, history)), *gdn.decays(a, b), state)
        return gdn.output(o, z), qkv[:, -3:], state

    for mixer, run in ((mamba, run_mamba), (gdn, run_gdn)):
        first, history, state = run(x[:, :21], None, None)
        second, _, _ = run(x[:, 21:], history, state)
        assert error(torch.cat([first, second], 1), mixer(x).double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_save_and_load(tmp_path, dtype):
    """A saved model comes back with its weights rounded to 16 bits, and saving that one again changes nothing."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "a", dtype)
    again = HybridModel.from_pretrained(tmp_path / "a")
    assert again.config == model.config and not again.training
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(dtype).float()), name
    again.save_pretrained(tmp_path / "b", dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_load_in_bfloat16(tmp_path):
    """Matrices take the dtype asked for; decays and the RoPE table stay float32; the forward runs."""
    tiny_model().save_pretrained(tmp_path)
    model = HybridModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, value in model.state_dict().items() if value.dtype == torch.float32}
    assert kept == {f"layers.0.mixer.{n}" for n in ("A_log", "D", "dt_bias")} | {
        f"layers.{i}.mixer.{n}" for i in (1, 6) for n in ("A_log", "dt_bias")
    }
    assert model.rope.dtype == torch.float32
    logits = model(torch.randint(31, (1, 9)))
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()


def test_bad_folders(tmp_path):
    """Unknown folders, missing or broken files and wrong weights are named."""
    with pytest.raises(FileNotFoundError, match="no such folder"):
        HybridModel.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="config.json"):
        HybridModel.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    tiny_config().save(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        HybridModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="not readable as safetensors"):
        HybridModel.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not readable as a tokenizer"):
        load_tokenizer(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    tiny_config(mlp_hidden=18).save(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"layers.4.mixer.out_proj.weight: got shape \[24, 17\], expected \[24, 18\]"):
        HybridModel.from_pretrained(tmp_path)
    tiny_config(pattern=LAYER_KINDS[:4]).save(tmp_path / "config.json")
    with pytest.raises(ValueError, match="got a tensor engram.token_map"):
        HybridModel.from_pretrained(tmp_path)
    tiny_config(pattern=(*LAYER_KINDS, "mlp")).save(tmp_path / "config.json")
    with pytest.raises(ValueError, match=f"got no tensor layers.{len(LAYER_KINDS)}"):
        HybridModel.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        HybridModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype: got torch.float32"):
        tiny_model().save_pretrained(tmp_path, torch.float32)


def test_config_round_trip(tmp_path):
    """A configuration equals what its JSON file gives back, and cannot be changed in place."""
    config = tiny_config()
    config.save(tmp_path / "config.json")
    assert HybridConfig.load(tmp_path / "config.json") == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 3


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"hidden_size": 0}, "hidden_size: got 0, expected a positive integer"),
        ({"hidden_size": 24.0}, "hidden_size: got 24.0"),
        ({"mlp_hidden": True}, "mlp_hidden: got True"),
        ({"pattern": ()}, r"pattern: got \(\)"),
        ({"pattern": "mlp"}, "pattern: got 'mlp'"),
        ({"pattern": ("mlp", "rnn")}, "pattern: got 'rnn'"),
        ({"mamba_groups": 4}, "mamba_heads: got 6, expected a multiple of mamba_groups = 4"),
        ({"gdn_key_heads": 3}, "gdn_value_heads: got 4"),
        ({"num_kv_heads": 4}, "num_heads: got 6"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
        ({"norm_eps": 0.0}, "norm_eps: got 0.0"),
        ({"engram_order": 1}, "engram_order: got 1, expected 2 or more"),
        ({"engram_dim": 0}, "engram_dim: got 0"),
        ({"engram_vocab_size": 32}, r"engram_vocab_size: got 32, expected an integer in \[0, 31\]"),
        ({"rope_theta": float("nan")}, "rope_theta: got nan"),
        ({"eos_token_id": 31}, r"eos_token_id: got 31, expected an integer in \[0, 31\)"),
    ],
)
def test_bad_configs(changes, message):
    """Each bad field is named with the value got and the value expected."""
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"model_type": "llama"}, "model_type: got 'llama'"),
        ({"colour": 1}, "colour: unknown field"),
        ({"hidden_size": None}, "hidden_size: missing"),
    ],
)
def test_bad_config_dicts(change, message):
    """A dict of another model, with a field too many or too few, is refused."""
    values = {k: v for k, v in (tiny_config().to_dict() | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        HybridConfig.from_dict(values)


def test_bad_input_ids():
    """Ids of the wrong rank, none, or more than the context holds."""
    model = tiny_model(pattern=("mlp",))
    for shape in ((3,), (1, 0), (1, 161)):
        with pytest.raises(ValueError, match="input_ids: got shape"):
            model(torch.zeros(shape, dtype=torch.long))


@pytest.fixture(scope="module")
def small():
    """The shipped model and its tokenizer."""
    return HybridModel.from_pretrained(small_model_dir()), load_tokenizer(small_model_dir())


def test_small_model_folder(small):
    """The shipped folder is complete, small, and of one piece."""
    model, tokenizer = small
    assert (small_model_dir() / "model.safetensors").stat().st_size <= 12_000_000
    assert set(model.config.pattern) >= set(LAYER_KINDS) - {"engram", "kda"}
    assert tokenizer.get_vocab_size() == model.config.vocab_size
    assert tokenizer.token_to_id("<|endoftext|>") == model.config.eos_token_id
    card = (small_model_dir() / "README.md").read_text()
    for word in ("PSF License", "public domain", "zeroed state", "bits per byte"):
        assert word in card
    assert json.loads((small_model_dir() / "config.json").read_text())["model_type"] == "torch_replay_hybrid"


@pytest.mark.parametrize(
    "text", ["", "def f(x):\n\treturn  x\r\n", "naïve \u4e2d\u6587 \U0001f40d \x00", "a<|endoftext|>b", " \n\n  lead"]
)
def test_tokenizer_gives_text_back(small, text):
    """decode(encode(x)) == x for any text, the special token included."""
    _, tokenizer = small
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_small_model_equals_truth(small):
    """The shipped weights too: chunked forward against the truth, past the sliding window and a chunk edge."""
    model, tokenizer = small
    ids = tokenizer.encode(inspect.getsource(textwrap)).ids[:90]
    with torch.no_grad():
        assert error(model(torch.tensor([ids]))[0], TruthModel(model).logits(ids)) < 1e-5


def test_small_model_reads_python(small):
    """Held-out library source costs far less than the 6.9 nats of a guess among 1024 tokens."""
    model, tokenizer = small
    ids = torch.tensor([tokenizer.encode(inspect.getsource(sched)).ids[:1024]])
    assert token_losses(model, ids).mean() < 2.6


PSALM = """Psalms 3

  1 Lord, how are they increased that trouble me! many are they that
rise up against me.
  2 Many there be which say of my soul, There is no help for him in God.
Selah.
  3 But thou, O LORD, art a shield for me; my glory, and the lifter up
of mine head.
  4 I cried unto the LORD with my voice, and he heard me out of his holy
hill. Selah.
  5 I laid me down and slept; I awaked; for the LORD sustained me.
  6 I will not be afraid of ten thousands of people, that have set
themselves against me round about.
"""


def test_small_model_uses_its_state(small):
    """Zeroing the recurrent state after a prompt clearly raises the loss of the next tokens, in code and in text."""
    model, tokenizer = small
    for text in (inspect.getsource(sched), PSALM):
        ids = torch.tensor(tokenizer.encode(text).ids)
        kept, zeroed = forgetting_losses(model, ids.unfold(0, 136, 7)[:32], 128)
        assert (zeroed - kept)[:, :8].mean() > 0.1


def test_small_model_uses_its_engram(small):
    """Shutting the gate of the engram layer clearly raises the loss of library source and of scripture."""
    model, tokenizer = small
    for text in (inspect.getsource(sched), PSALM):
        ids = torch.tensor([tokenizer.encode(text).ids[:1024]])
        kept = token_losses(model, ids)
        with shut_engram(model):
            assert (token_losses(model, ids) - kept).mean() > 0.05
        assert torch.equal(token_losses(model, ids), kept)


def test_shut_engram():
    """Without the gate a model is the one that has no engram layer at all."""
    model = tiny_model(pattern=("mlp", "engram", "gdn"))
    ids = torch.randint(31, (1, 20))
    without = HybridModel(tiny_config(pattern=("mlp", "gdn"))).eval()
    with torch.no_grad():
        for name, value in without.state_dict().items():
            value.copy_(model.state_dict()[name.replace("layers.1", "layers.2")])
        with shut_engram(model):
            assert torch.equal(model(ids), without(ids))
        assert not torch.allclose(model(ids), without(ids))


def test_generate_slow_is_greedy_and_padded_right(small):
    """Prompts of unequal length in one batch are continued as they are alone."""
    model, tokenizer = small
    prompts = [tokenizer.encode(text).ids for text in ("def main():\n    parser =", "And it came to pass")]
    together = generate_slow(model, prompts, 6)
    assert together == [generate_slow(model, [prompt], 6)[0] for prompt in prompts]
    with pytest.raises(ValueError, match="prompts"):
        generate_slow(model, [[1] * 2048], 1)
