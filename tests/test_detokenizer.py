"""Streamed text is `tokenizer.decode` of all tokens, for every kind of tokenizer, and its cost is linear."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from torch_replay.engine.detokenizer import Detokenizer
from torch_replay.models import load_tokenizer, small_model_dir

WORDS = ["▁", "▁a", "b", "▁▁", "c▁", ".", "▁the", "##ing", "'", "n't", "</w>", "d</w>", "|", "�", "é", "h", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0x0A, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0xC3)]
SPECIAL = ["<s>", "</s>"]


def words(decoder=None) -> Tokenizer:
    """A vocabulary of words, bytes and two special tokens, with that decoder."""
    vocabulary = [*WORDS, *BYTES]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="b"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(word, -1.0 - i) for i, word in enumerate([*WORDS, *BYTES])], 2, True))
    tokenizer.decoder = llama(strip=True)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_level() -> Tokenizer:
    """Every byte, some words, and the halves of characters as tokens."""
    letters = sorted(ByteLevel.alphabet())
    joined = ["Ġa", "Ġthe", "ä½", "½ł", "ðŁ", "ĺĢ", "bä"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate([*letters, *joined])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def llama(strip: bool):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)


TOKENIZERS = {
    "metaspace": lambda: words(decoders.Metaspace()),
    "metaspace first": lambda: words(decoders.Metaspace(prepend_scheme="first")),
    "metaspace never": lambda: words(decoders.Metaspace(prepend_scheme="never")),
    "replace, bytes, fuse, strip": lambda: words(llama(strip=True)),
    "replace, bytes, fuse": lambda: words(llama(strip=False)),
    "strip three": lambda: words(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(),
                                                    decoders.Strip(" ", 3, 0)])),
    "unigram": unigram,
    "wordpiece": lambda: words(decoders.WordPiece()),
    "wordpiece without cleanup": lambda: words(decoders.WordPiece(cleanup=False)),
    "word ends": lambda: words(decoders.BPEDecoder()),
    "ctc": lambda: words(decoders.CTC()),
    "no decoder": words,
    "byte level": byte_level,
    "rewrites fused text": lambda: words(decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("▁+a"), "A")])),
    "small model": lambda: load_tokenizer(small_model_dir()),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def stream(tokenizer, ids: list[int], stop=(), skip_special_tokens: bool = True, take=lambda: True):
    """Tokens used, and pieces, as an engine takes them."""
    text, pieces, used = Detokenizer(tokenizer, stop, skip_special_tokens), [], 0
    for token in ids:
        used += 1
        if text.append(token):
            break
        if take():
            pieces.append(text.take())
            assert text.text == "".join(pieces)
    pieces.append(text.flush())
    assert text.text == "".join(pieces)
    return used, pieces


def some_ids(tokenizer):
    """Ids of the whole vocabulary, some beyond it, and runs of one id."""
    size = tokenizer.get_vocab_size()
    token = st.integers(0, size + 1) | st.integers(max(0, size - 14), size - 1)
    runs = st.tuples(token, st.integers(1, 9)).map(lambda run: [run[0]] * run[1])
    return st.lists(runs | st.lists(token, max_size=12), max_size=9).map(lambda parts: sum(parts, []))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_are_the_text(tokenizer, data):
    """Any ids, invisible ones and halves of characters among them: the pieces add up to `decode` of all."""
    ids, skip = data.draw(some_ids(tokenizer)), data.draw(st.booleans())
    _, pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def truth(tokenizer, ids: list[int], stops) -> tuple[int, str]:
    """Tokens and text up to a stop text, from `decode` of all tokens at each length."""
    for used in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:used])
        whole = text.rstrip("\ufffd")
        if any(stop in whole for stop in stops):
            return used, text[: min(at for at in map(text.find, stops) if at >= 0)]
    text = tokenizer.decode(ids)
    return len(ids), text[: min((at for at in map(text.find, stops) if at >= 0), default=len(text))]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_stop_texts(tokenizer, data):
    """Stop texts cut from the text itself, blanks and broken characters included, end it where they first stand."""
    ids = data.draw(some_ids(tokenizer))
    text, stops = tokenizer.decode(ids), ["never there"]
    for _ in range(data.draw(st.integers(1, 2))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(1, 6))
        if (stop := text[at : at + length]) and "\ufffd" not in stop:
            stops.append(stop)
    random_takes = random.Random(data.draw(st.integers(0, 9)))
    used, pieces = stream(tokenizer, ids, tuple(stops), take=lambda: random_takes.random() < 0.6)
    assert (used, "".join(pieces)) == truth(tokenizer, ids, stops)
    assert not any(stop in "".join(pieces) for stop in stops)


def test_blanks():
    """By hand: the first word has no blank before it, the others have, and a stop text with a blank is found."""
    ids = {word: i for i, word in enumerate(WORDS)}
    told = [ids["▁a"], ids["▁the"], ids["▁a"], ids["b"]]
    for name, text in (("metaspace", "a the ab"), ("replace, bytes, fuse, strip", "a the ab"),
                       ("replace, bytes, fuse", " a the ab"), ("wordpiece", "▁a ▁the ▁a b")):
        used, pieces = stream(TOKENIZERS[name](), told)
        assert (used, "".join(pieces)) == (4, text) and all(pieces[:4])
    assert stream(TOKENIZERS["metaspace"](), told, (" the",)) == (2, ["a", ""])
    assert stream(TOKENIZERS["wordpiece"](), [ids["b"], ids["##ing"], ids["h"]])[1] == ["b", "ing", " h", ""]


def test_newline_from_a_byte_stops_at_once():
    """Where line ends are byte tokens, as in many vocabularies, a stop text of them ends the text with its token."""
    tokenizer = TOKENIZERS["replace, bytes, fuse, strip"]()
    a, newline, blank = (tokenizer.token_to_id(word) for word in ("▁a", "<0x0A>", "<0x20>"))
    assert stream(tokenizer, [a, newline, newline, a], ("\n\n",)) == (3, ["a", "", ""])
    # a blank that the decoder strips from the beginning is no blank of the text
    assert stream(tokenizer, [blank, newline, a, blank, newline], (" \n",)) == (5, ["", "", "\n a", "", ""])


def test_text_that_is_rewritten_waits():
    """A decoder that rewrites fused text shows nothing before the end, and stop texts count as they are then."""
    tokenizer = TOKENIZERS["rewrites fused text"]()
    blank, word, letter = (tokenizer.token_to_id(word) for word in ("▁", "▁a", "b"))
    assert stream(tokenizer, [letter, blank, word, letter])[1] == ["", "", "", "", "bAb"]
    assert stream(tokenizer, [letter, blank, word, letter], ("A",)) == (3, ["", "", "b"])


def test_broken_run_of_bytes_flows():
    """A byte that fits nowhere spoils its whole run of bytes, each of which then is a broken character at once."""
    tokenizer = Counted(TOKENIZERS["replace, bytes, fuse"]())
    a, bad, word = (tokenizer.token_to_id(word) for word in ("<0x41>", "<0xFF>", "▁a"))
    pieces = stream(tokenizer, [a, a, bad, *[a] * 1000, word, a])[1]
    assert pieces == ["", "", "\ufffd" * 3, *["\ufffd"] * 1000, " a", "", "A"]
    assert tokenizer.decoded < 20 * 1000


class Counted:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


LONE = {
    "byte level": ["ÿ", "ä", "½", "a"], "small model": ["ÿ", "ð"], "wordpiece": ["b", "�"], "metaspace": ["▁", "▁a"],
    "replace, bytes, fuse, strip": ["<0xFF>", "<0xE4>", "�", "▁"], "no decoder": ["b"], "ctc": ["�"],
}


@pytest.mark.parametrize("name, word", [(name, word) for name, these in LONE.items() for word in these])
def test_one_token_again_and_again(name, word):
    """Half a character, or any other token, 3,000 times: text flows within five tokens, and work is linear."""
    tokenizer = Counted(TOKENIZERS[name]())
    ids = [tokenizer.token_to_id(word)] * 3000
    _, pieces = stream(tokenizer, ids, stop=("never there", "b b b b c"))
    assert tokenizer.decoded < 30 * len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if name != "ctc":  # which drops repeated tokens
        shown = "".join(pieces[:6])
        assert shown and all(any(pieces[at : at + 5]) for at in range(0, 2990, 5))


@pytest.mark.parametrize("name, word", [("byte level", "a"), ("byte level", "ÿ"), ("no decoder", "b"),
                                        ("replace, bytes, fuse", "<0x41>")])
def test_search_is_linear(monkeypatch, name, word):
    """Characters searched for stop texts: a few for each new one, also in a run of bytes that shows nothing yet."""
    tokenizer, searched = Counted(TOKENIZERS[name]()), 0
    holds_stop = Detokenizer._holds_stop

    def counting(self, text):
        nonlocal searched
        searched += len(text)
        return holds_stop(self, text)

    monkeypatch.setattr(Detokenizer, "_holds_stop", counting)
    ids = [tokenizer.token_to_id(word)] * 3000
    _, pieces = stream(tokenizer, ids, stop=("never", "b b b c", "A" * 9 + "B"))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert 2999 <= searched < 20 * len("".join(pieces)) and tokenizer.decoded < 30 * 3000
