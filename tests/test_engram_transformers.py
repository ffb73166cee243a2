"""An independent check: the n-gram embedding of transformers' Qwen4-Exp through our lookback, hash and lookup.

Needs `transformers` with that model (5.17 has it), which the tests do not install; random weights, nothing is fetched.
"""

import pytest
import torch

from torch_replay import ops

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")
configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp",
                                    reason="this transformers has no Qwen4-Exp")
modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp",
                               reason="this transformers has no Qwen4-Exp")

VOCAB, EOS = 50, 7


def tiny_config(ngram_size):
    return configuration.Qwen4ExpTextConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=4, ple_layer_ids=[1, 2], ple_embed_dim=24,
        ngram_size=ngram_size, heads_per_ngram=2, ngram_vocab_size_base=97, eos_token_id=EOS, num_attention_heads=4,
        num_key_value_heads=2, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, make_ngram_vocab_size_divisible_by=8)


@pytest.fixture(scope="module", params=[2, 3, 4], ids="ngram{}".format)
def embedding(request):
    """The module of a tiny configuration, the second such layer of a model, so that its primes are not the first."""
    torch.manual_seed(0)
    config = tiny_config(request.param)
    return modeling.Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 1, 1).eval().requires_grad_(False)


class Adapter:
    """Our ops with the module's constants, over a history like the engine's.

    In that model n-grams do not reach over an end-of-text token and read as end-of-text beyond it: here it is masked,
    and the pad id. The token at the position itself does count, end of text or not, so it goes in as one id more than
    the vocabulary has, which maps to the same value: every token is a row of its own, its n-gram in the lookback.
    """

    def __init__(self, module, rows):
        heads, orders = module.heads_per_ngram, module.ngram_size
        self.module, self.depth = module, orders - 1
        self.constants = (module.layer_multipliers[None], module.ngram_heads_vocab_sizes.view(1, orders - 1, heads),
                          module.ngram_heads_offsets.view(1, orders - 1, heads), torch.tensor(EOS))
        self.token_map = torch.cat([torch.arange(VOCAB), torch.tensor([EOS])])
        self.token_map[EOS] = -1
        self.history, self.computed = torch.full((rows, 64), -5, dtype=torch.int32), 0

    def __call__(self, input_ids):
        """ids [rows, T] that follow what came before -> embeddings [rows, T, ple_embed_dim]."""
        rows, tokens = input_ids.shape
        self.history[:, self.computed : self.computed + tokens] = input_ids
        count = rows * tokens
        positions = (self.computed + torch.arange(tokens)).repeat(rows)
        start, requests = torch.arange(count + 1), torch.arange(rows).repeat_interleave(tokens)
        lookback = torch.empty(count, self.depth, dtype=torch.int32)
        ops.engram_lookback(lookback, self.history, positions, start, requests, torch.tensor(count))
        ids = torch.where(input_ids == EOS, VOCAB, input_ids).flatten()
        found = ops.ngram_hash(ids, positions, start, lookback, self.token_map, *self.constants)
        self.computed += tokens
        entries = ops.engram_lookup(self.module.ngram_embedding.weight, None, found)
        return entries.view(rows, tokens, -1)


def draw(rows=3, tokens=40):
    """Ids with ends of text among them, two in a row and at the edges of chunks too."""
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))
    ids[0, [5, 6, 11, 12, 13]], ids[1, [0, 39]], ids[2, [1, 9, 10]] = EOS, EOS, EOS
    return ids


CHUNKS = {"prefill": [40], "chunked": [11, 1, 2, 26], "decode": [12] + [1] * 28, "decode_from_one": [1] * 40}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_equal_embeddings(embedding, chunks):
    """The same embeddings, bit for bit, whichever way the tokens are cut."""
    ids, ours = draw(), Adapter(embedding, 3)
    cache = transformers.DynamicCache(config=tiny_config(embedding.ngram_size))
    whole = embedding(ids, None)
    for piece in ids.split(chunks, 1):
        begin = ours.computed
        got, want = ours(piece), embedding(piece, cache)
        assert torch.equal(got, want)
        assert torch.equal(got, whole[:, begin : begin + piece.shape[1]])


def test_multi_token_rows(embedding):
    """Chunks as rows of many tokens, as prefill has them, agree wherever the token itself is no end of text."""
    ids, adapter = draw(), Adapter(embedding, 3)
    start, positions = torch.arange(4) * 40, torch.arange(40).repeat(3)
    lookback = torch.full((3, adapter.depth), -1)
    found = ops.ngram_hash(ids.flatten(), positions, start, lookback, adapter.token_map, *adapter.constants)
    entries = ops.engram_lookup(embedding.ngram_embedding.weight, None, found).view(3, 40, -1)
    kept = ids != EOS
    assert torch.equal(entries[kept], embedding(ids, None)[kept]) and 0.8 < kept.float().mean() < 1


def test_negative_control(embedding):
    """Without the mask at ends of text, or with the multipliers in another order, the embeddings differ."""
    ids = draw()
    adapter = Adapter(embedding, 3)
    adapter.token_map[EOS] = EOS
    assert adapter.depth == 1 or not torch.equal(adapter(ids), embedding(ids, None))
    adapter = Adapter(embedding, 3)
    adapter.constants = (adapter.constants[0].flip(1), *adapter.constants[1:])
    assert not torch.equal(adapter(ids), embedding(ids, None))
