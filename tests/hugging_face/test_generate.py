"""Generation by a replaced model, what is refused and why, and that the model stays what it was."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

from hugging_face.hf_models import build, feed, prompts  # noqa: E402

from torch_replay.integrations.transformers import make_cache, replace, restore  # noqa: E402

pytestmark = pytest.mark.hf


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def replaced(name, **options):
    model = build(name)
    replace(model, **options)
    return model


@pytest.mark.parametrize("name", ["Bamba", "Qwen3Next"])
def test_sampled(name):
    """With the seed of transformers' own run, the same draws."""
    model, (ids, mask) = build(name), prompts(3, 12, padded=True)
    arguments = dict(attention_mask=mask, max_new_tokens=20, do_sample=True, temperature=0.8, top_k=20)
    torch.manual_seed(5)
    expected = model.generate(ids, **arguments)
    replace(model, window=5)
    torch.manual_seed(5)
    assert torch.equal(model.generate(ids, **arguments), expected)


def test_rows_that_end_early():
    """Rows end at different steps and are filled up with padding; the others go on unharmed."""
    model, (ids, mask) = build("Qwen3Next"), prompts(3, 12, padded=True)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    eos = int(free[1, 12 + 6])  # row 1 ends within a few tokens
    arguments = dict(attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=eos)
    expected = model.generate(ids, **arguments)
    lengths = (expected[:, 12:] == eos).int().argmax(1)
    assert len(set(lengths.tolist())) > 1
    replace(model, window=5)
    assert torch.equal(model.generate(ids, **arguments), expected)


@pytest.mark.parametrize("name", ["Mamba2", "Qwen3Next"])
def test_kinds_of_cache(name):
    """generate's own static cache and prompts in chunks; caches that move states elsewhere are refused."""
    model, (ids, _) = build(name), prompts(2, 12)
    arguments = dict(max_new_tokens=14, do_sample=False)
    expected = model.generate(ids, **arguments)
    replace(model, window=5)
    assert torch.equal(model.generate(ids, cache_implementation="static", **arguments), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=5, **arguments), expected)
    for kind in ("offloaded", "quantized"):
        with pytest.raises(ValueError, match=f"cache_implementation is '{kind}', expected None, 'dynamic' or 'static'"):
            model.generate(ids, cache_implementation=kind, **arguments)
    # a second turn on the first one's cache
    cache = make_cache(model, 2)
    first = model.generate(ids, cache=cache, **arguments)
    longer = torch.cat([first, prompts(2, 5, seed=3)[0]], 1)
    expected = model.generate(longer, **arguments)
    assert torch.equal(model.generate(longer, cache=cache, **arguments), expected)
    if name == "Mamba2":  # transformers would give such a model the whole text again
        with pytest.raises(ValueError, match="input_ids are 31 tokens, and the cache holds 44 already"):
            model.generate(longer, cache=cache, **arguments)


@pytest.mark.parametrize("name", ["Mamba2", "KimiLinear"])
def test_padding_on_the_right(name):
    """Padding behind tokens is refused, in a prompt and in its second chunk, and the cache stays as it was."""
    model, (ids, mask) = replaced(name), prompts(2, 12)
    mask[1, 9:] = 0
    cache = make_cache(model, 2)
    with pytest.raises(ValueError, match="pad on the left"):
        model(ids, attention_mask=mask, cache=cache, use_cache=True)
    assert not cache.started and int(cache.memory.positions.max()) < 0
    cache = make_cache(model, 2)
    left = torch.ones(2, 24, dtype=torch.int64)
    left[1, :14] = 0  # the second row's padding goes on into the second chunk
    ids = prompts(2, 24)[0]
    for at in (0, 12):
        model(ids[:, at : at + 12], attention_mask=left[:, : at + 12], cache=cache, use_cache=True)
    left[0, 20] = 0
    cache = make_cache(model, 2)
    model(ids[:, :12], attention_mask=left[:, :12], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="pad on the left"):
        model(ids[:, 12:], attention_mask=left, cache=cache, use_cache=True)


def test_refused(monkeypatch):
    """What is not known is refused by name, and nothing is changed."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(ValueError, match="LlamaForCausalLM: it has no layer to replace"):
        replace(llama)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(ValueError, match="MambaForCausalLM: its MambaMixer is not known here"):
        replace(mamba)
    model = build("Mamba2")
    kinds = [type(module) for module in model.modules()]
    for arguments, message in ((dict(window=0), "window is 0"), (dict(window=4, num_spec=4), "num_spec 4"),
                               (dict(match="vllm"), "match is 'vllm'")):
        with pytest.raises(ValueError, match=message):
            replace(model, **arguments)
    model.backbone.layers[1].mixer.activation = "gelu"
    with pytest.raises(ValueError, match="layer 1 .Mamba2Mixer. has the activation 'gelu'"):
        replace(model)
    model.backbone.layers[1].mixer.activation = "silu"
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "5.99.1")
        with pytest.raises(RuntimeError, match="transformers is 5.99.1, and this was tested with 5.24"):
            replace(model)
    with pytest.raises(ValueError, match="was not replaced"):
        make_cache(model)
    with pytest.raises(ValueError, match="was not replaced"):
        restore(model)
    assert [type(module) for module in model.modules()] == kinds
    replace(model)
    with pytest.raises(ValueError, match="was replaced already"):
        replace(model)
    cache = make_cache(model, max_batch=2)
    with torch.enable_grad(), pytest.raises(ValueError, match="call the model under torch.no_grad"):
        model(prompts(2, 5)[0], cache=cache)
    with pytest.raises(ValueError, match="the cache is for 2 rows, this forward has 3"):
        model(prompts(3, 5)[0], cache=cache)
    model(prompts(2, 5)[0], cache=cache)
    with pytest.raises(ValueError, match="the cache is for 2 rows, this forward has 1"):
        model(prompts(1, 5)[0], cache=cache)
    with pytest.raises(ValueError, match="was not replaced"):
        build("Mamba2")(prompts(2, 5)[0], cache=cache)


def test_interrupted_forward():
    """A forward that raised half-way leaves a cache that says so, until it is reset."""
    model, (ids, _) = replaced("Mamba2"), prompts(2, 12)
    cache = make_cache(model, 2)
    expected = feed(model, cache, ids, [10, 1, 1])
    cache.reset()
    feed(model, cache, ids, [10, 1])
    hook = model.backbone.layers[1].register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError):
        model(ids[:, 11:], cache=cache)
    hook.remove()
    with pytest.raises(ValueError, match="the last forward with this cache was interrupted; call its reset()"):
        model(ids[:, 11:], cache=cache)
    cache.reset()
    assert torch.equal(feed(model, cache, ids, [10, 1, 1]), expected)


def test_report(capsys):
    report = replace(build("NemotronH"), window=8, num_spec=3)
    assert capsys.readouterr().out == (
        f"torch_replay: NemotronHForCausalLM (transformers {transformers.__version__}): 3 NemotronHMamba2Mixer; "
        "window 8, drafts of up to 3 tokens\n")
    assert report.replaced == {"NemotronHMamba2Mixer": 3}


def test_the_model_stays_what_it_was(tmp_path):
    """Classes by name and by isinstance, hooks, parameters, training and other caches; copies and files too."""
    plain, (ids, _) = build("Bamba"), prompts(2, 12)
    model = copy.deepcopy(plain)
    mixer = next(module for module in model.modules() if type(module).__name__ == "BambaMixer")
    calls = []
    hook = mixer.register_forward_hook(lambda *a: calls.append(1))
    replace(model, window=5, num_spec=2)
    assert isinstance(model, transformers.BambaForCausalLM) and isinstance(mixer, type(plain.model.layers[0].mamba))
    assert list(model.state_dict()) == list(plain.state_dict()) and type(model).__name__ == "BambaForCausalLM"
    expected = feed(plain, transformers.DynamicCache(config=plain.config), ids, [10, 1, 1])
    assert torch.equal(feed(model, transformers.DynamicCache(config=model.config), ids, [10, 1, 1]), expected)
    assert len(calls) == 3
    hook.remove()
    with torch.enable_grad():
        for one in (plain, model):
            one.train()(ids, labels=ids).loss.backward()
            one.eval()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.save_pretrained(tmp_path / "folder")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert type(loaded) is transformers.BambaForCausalLM
    torch.save(model, tmp_path / "model.pt")
    for again in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        cache = make_cache(again, 2)
        assert (cache.memory.window, cache.memory.tokens) == (5, 3)
        assert torch.equal(again.generate(ids, max_new_tokens=8, do_sample=False, cache=cache), generated)
        restore(again)
        assert type(again) is transformers.BambaForCausalLM
    assert torch.equal(loaded.generate(ids, max_new_tokens=8, do_sample=False), generated)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["FalconH1", "Qwen3Next"])
def test_to_transformers(name, static):
    """transformers goes on from a copy with the ring folded in, and the cache itself goes on as if nothing was read."""
    model, (ids, _) = build(name), prompts(2, 20)
    kind = transformers.StaticCache(config=model.config, max_cache_len=32) if static else None
    expected = feed(model, kind or transformers.DynamicCache(config=model.config), ids, [9] + [1] * 11)
    replace(model, window=5)
    cache = make_cache(model, 2, 32 if static else None)
    feed(model, cache, ids, [9, 1, 1, 1])
    given = cache.to_transformers()
    assert type(given) is (transformers.StaticCache if static else transformers.DynamicCache)
    close = dict(rtol=0, atol=5e-5 * float(expected.abs().max()))
    for one in (cache, given):
        for at in range(12, 20):
            places = {"position_ids": torch.full((2, 1), at)}
            logits = model(ids[:, at : at + 1], cache=one, use_cache=True, **places).logits
            torch.testing.assert_close(logits, expected[:, at : at + 1], **close)
