"""Hash constants, compressed vocabulary, table storage, and the engram layer by itself."""

import json
import math
import unicodedata

import pytest
import torch
from harness import assert_close
from safetensors.torch import save_file
from test_engram import GOLDEN, GOLDEN_IDS, golden_constants
from tokenizers import Tokenizer, decoders, models

from torch_replay.engram import (
    DeviceTable,
    Engram,
    EngramStore,
    MappedTable,
    NGramHash,
    compress_vocabulary,
    next_primes,
    quantize_rows,
)
from torch_replay.models import HybridConfig, HybridModel, load_tokenizer, small_model_dir


@pytest.fixture(scope="module")
def published():
    """The geometry of the golden values: layers 1 and 14, orders 2 to 4, 8 heads, 99,092 compressed ids."""
    return NGramHash((1, 14), 4, 8, 16_000_000, 99_092)


def test_published_constants(published):
    """Primes, multipliers, table sizes and offsets are the published ones."""
    multipliers, primes, offsets = golden_constants()
    assert torch.equal(published.primes, primes) and torch.equal(published.multipliers, multipliers)
    assert torch.equal(published.offsets, offsets)
    assert published.layer_rows == [384_006_168, 384_016_682] and published.columns == 24
    assert published.stacked_offsets[0].equal(offsets[0])
    assert published.stacked_offsets[1].equal(offsets[1] + 384_006_168)


def test_published_hash_through_the_store(published):
    """The golden vectors come out of the store as well, the second layer behind the first one's rows."""
    store = EngramStore(published, 1, 99_093, 0, table_device="meta")
    store.set_token_map(torch.cat([torch.arange(99_092), torch.tensor([-1])]))
    store.token_map[0], store.token_map[3] = 3, 0  # the pad token of the golden values is 3 after compression
    ids = torch.tensor([99_092 if token < 0 else token for token in GOLDEN_IDS])
    rows = store.rows(ids, torch.arange(6), torch.tensor([0, 6]), torch.full((1, 3), -1)).view(6, 2, 24)
    for place, layer in enumerate((1, 14)):
        for position, want in GOLDEN[layer].items():
            assert (rows[position, place, [0, 7, 8, 16, 23]] - place * 384_006_168).tolist() == want
    assert store.masked(torch.tensor([0, 99_092, 99_093, -1, 2**40])).tolist() == [False, True, True, True, True]


def test_primes():
    """Against a sieve, from every start in a range, the smallest ones included."""
    sieve = [n for n in range(2, 600) if all(n % d for d in range(2, n))]
    for start in range(400):
        assert next_primes(start, 5) == [prime for prime in sieve if prime >= start][:5]


@pytest.mark.parametrize("field, value", [("max_order", 1), ("heads", 0), ("table_size", 0), ("vocab_size", 0),
                                          ("layer_ids", (1, 1)), ("layer_ids", (-1,))])
def test_bad_constants(field, value):
    """The field and the value are named."""
    good = {"layer_ids": (0,), "max_order": 3, "heads": 2, "table_size": 10, "vocab_size": 5}
    with pytest.raises(ValueError, match=f"{field}: got"):
        NGramHash(**good | {field: value})


def toy_tokenizer(words):
    """A byte-level tokenizer whose vocabulary is `words`, written as plain text; bytes are written as ints."""
    letters = {byte: character for byte, character in enumerate(_byte_letters())}
    entries = ["".join(letters[b] for b in (w.encode() if isinstance(w, str) else bytes([w]))) for w in words]
    assert len(set(entries)) == len(words)
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters():
    """The letters in which byte-level vocabularies write bytes: printable ones as they are, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


WORDS = ["the", "The", " THE", "thé", "\uff54he", "x", " ", "  ", "\n\t", "\n", "\u00a0", "\u0301", 0xC3, 0xA9,
         "a b", "A  \n b", "\u2168", "ix"]
COMPRESSED = [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 6, 6, 7, 7]


def test_compressed_vocabulary():
    """Case, accents, width and white space do not count; a lone blank, an accent, parts of characters stay apart."""
    tokenizer = toy_tokenizer(WORDS)
    assert compress_vocabulary(tokenizer).tolist() == COMPRESSED
    assert compress_vocabulary(tokenizer, 8).tolist() == COMPRESSED
    with pytest.raises(ValueError, match="got a vocabulary of 8 compressed ids, expected 99092"):
        compress_vocabulary(tokenizer, 99092)


def plain_key(tokenizer, token):
    """The same rules with Python's own tables."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token)
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c) != "Mn").lower()
    for blank in "\t\r\n":
        folded = folded.replace(blank, " ")
    while "  " in folded:
        folded = folded.replace("  ", " ")
    return folded if folded == " " else folded.strip() or text


def test_compressed_vocabulary_of_the_shipped_tokenizer():
    """Against Python's Unicode tables, token by token: equal keys get equal ids, in the order of appearance."""
    tokenizer = load_tokenizer(small_model_dir())
    compressed = compress_vocabulary(tokenizer)
    ids = {}
    want = [ids.setdefault(plain_key(tokenizer, token), len(ids)) for token in range(tokenizer.get_vocab_size())]
    assert compressed.tolist() == want
    assert 500 < len(ids) < 1024


def test_bad_token_maps():
    """A map of another length, or whose ids are not all of 0 .. size - 1, would leave the hash without its bound."""
    store = EngramStore(NGramHash((0,), 2, 1, 11, 3), 4, 5, 0)
    store.set_token_map(torch.tensor([0, 1, 2, -1, 2]))
    with pytest.raises(ValueError, match=r"token_map: got shape \[4\], expected \[5\]"):
        store.set_token_map(torch.tensor([0, 1, 2, 2]))
    for bad in ([0, 1, 2, 3, -1], [0, 1, 1, 1, 1], [-1] * 5):
        with pytest.raises(ValueError, match="expected all of 0..2"):
            store.set_token_map(torch.tensor(bad))


def test_quantized_rows():
    """Each group's largest value fits, none is off by more than e4m3 rounding, and no smaller exponent would do."""
    values = torch.randn(40, 96) * torch.exp(6 * torch.randn(40, 1))
    values[0], values[1, :32] = 0.0, 448.0
    rows, exponents = quantize_rows(values)
    got = DeviceTable(rows, exponents).lookup(torch.arange(40)[:, None])[:, 0].float()
    peak = values.unflatten(1, (3, 32)).abs().amax(-1)
    assert ((got - values).abs().unflatten(1, (3, 32)).amax(-1) <= peak / 16).all()
    factor = torch.exp2(exponents.float() - 127)
    assert (peak <= 448 * factor).all() and (peak > 224 * factor)[1:].all()
    assert torch.equal(got[1, :32], values[1, :32]) and not got[0].any()
    with pytest.raises(ValueError, match="values: got shape"):
        quantize_rows(torch.zeros(3, 31))


def test_mapped_table(tmp_path):
    """Rows of a file equal the tensors that were saved, in 16 bits and in float8."""
    rows, exponents = quantize_rows(torch.randn(50, 64))
    half = torch.randn(30, 5).half()
    save_file({"odd": torch.ones(3, dtype=torch.uint8), "half": half, "rows": rows, "exponents": exponents},
              tmp_path / "t.safetensors")
    wanted = torch.tensor([[3, 29, -1], [0, 3, 17]])
    for names, memory in ((("half",), DeviceTable(half)), (("rows", "exponents"), DeviceTable(rows, exponents))):
        assert torch.equal(MappedTable(tmp_path / "t.safetensors", *names).lookup(wanted), memory.lookup(wanted))
    for arguments, message in ((("nothing",), "got no tensor nothing"), (("rows", "none"), "got no tensor none")):
        with pytest.raises(ValueError, match=message):
            MappedTable(tmp_path / "t.safetensors", *arguments)
    with pytest.raises(FileNotFoundError, match="no such file"):
        MappedTable(tmp_path / "nowhere", "half")
    (tmp_path / "bad").write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="expected a safetensors file"):
        MappedTable(tmp_path / "bad", "half")
    whole = (tmp_path / "t.safetensors").read_bytes()
    (tmp_path / "short").write_bytes(whole[:-200])
    with pytest.raises(ValueError, match="expected .* or more"):
        MappedTable(tmp_path / "short", "rows", "exponents")


def test_mapped_table_larger_than_memory(tmp_path):
    """A table of 96 GB, almost all of it a hole in the file: rows at its far end are read without the rest."""
    count, dim = 3 * 2**27, 256
    size = count * dim
    header = json.dumps({"t": {"dtype": "F8_E4M3", "shape": [count, dim], "data_offsets": [0, size]},
                         "e": {"dtype": "U8", "shape": [count, dim // 32], "data_offsets": [size, size + size // 32]}})
    header = header.ljust(-(-len(header) // 8) * 8).encode()
    rows, exponents = quantize_rows(torch.randn(2, dim))
    with (tmp_path / "huge").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for place, row in ((5, 0), (count - 1, 1)):
            file.seek(8 + len(header) + place * dim)
            file.write(bytes(rows[row].view(torch.uint8).tolist()))
            file.seek(8 + len(header) + size + place * dim // 32)
            file.write(bytes(exponents[row].tolist()))
        file.truncate(8 + len(header) + size + size // 32)
    table = MappedTable(tmp_path / "huge", "t", "e")
    got = table.lookup(torch.tensor([[5, count - 1, 7]]))[0]
    want = DeviceTable(rows, exponents).lookup(torch.tensor([[0, 1, -1]]))[0]
    assert torch.equal(got, want) and table.weight.numel() == size


def test_layer_of_several_branches():
    """Every branch against the formula in float64: own norm and gate, one shared value; masked tokens gain nothing."""
    torch.manual_seed(0)
    layer = Engram(16, 24, eps=1e-4, branches=3)
    torch.nn.init.normal_(layer.q_weight)
    torch.nn.init.normal_(layer.k_weight)
    hidden, entries = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 24)
    masked = torch.zeros(2, 5, dtype=torch.bool)
    masked[1, 2] = True
    got = layer.read(hidden, entries, masked)
    want = torch.zeros(2, 5, 3, 16, dtype=torch.float64)
    weight, q, k = (t.detach().double() for t in (layer.kv_proj.weight, layer.q_weight, layer.k_weight))
    for b, t, h in ((b, t, h) for b in range(2) for t in range(5) for h in range(3)):
        projected = (weight @ entries[b, t].double()).view(4, 16)
        x, key, value = hidden[b, t, h].double(), projected[h], projected[3]
        dot = float((x * q[h] * k[h] * key).sum()) / 4.0
        for vector in (x, key):
            dot /= math.sqrt(float(vector.square().mean()) + 1e-4)
        root = math.sqrt(max(abs(dot), 1e-6))
        want[b, t, h] = 0.0 if masked[b, t] else value / (1 + math.exp(-math.copysign(root, dot)))
    assert_close("read", got, want, 1e-5)
    assert not got[1, 2].any()


def test_gate_at_zero():
    """A dot of exactly 0 counts as positive: sigmoid(1e-3)."""
    layer = Engram(4, 4)
    gate = layer.gate(torch.zeros(1, 1, 4), torch.ones(1, 1, 4), torch.zeros(1, dtype=torch.bool))
    assert torch.allclose(gate, torch.tensor(1e-3).sigmoid(), rtol=0, atol=1e-7) and gate.item() > 0.5


def test_layer_trains():
    """Next tokens that depend on the last two, which nothing but n-grams can see here: gradient steps learn them, and
    the same model whose gate is shut cannot."""
    torch.manual_seed(0)
    sizes = HybridConfig.load(small_model_dir() / "config.json").to_dict() | {
        "vocab_size": 16, "hidden_size": 32, "pattern": ["engram", "mlp"], "mlp_hidden": 32, "engram_order": 3,
        "engram_heads": 2, "engram_dim": 8, "engram_table_size": 512, "engram_vocab_size": 0}
    rule = torch.randint(16, (16, 16))
    losses = {}
    for shut in (False, True):
        torch.manual_seed(1)
        model = HybridModel(HybridConfig.from_dict(sizes))
        if shut:
            model.layers[0].mixer.gate = lambda hidden, keys, masked: torch.zeros(hidden.shape[:-1])
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses[shut] = []
        for _ in range(50):
            ids = torch.randint(16, (16, 2))
            for _ in range(14):
                ids = torch.cat([ids, rule[ids[:, -2], ids[:, -1]][:, None]], 1)
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1])[:, 1:].flatten(0, 1), ids[:, 2:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[shut].append(loss.item())
    first, (last, last_shut) = losses[False][0], (sum(losses[shut][-5:]) / 5 for shut in (False, True))
    assert first > 2.5 and last < 0.4 and last_shut > 1.0, (first, last, last_shut)
