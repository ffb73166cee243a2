"""The compressed vocabulary: tokens that differ in case, accents, compatibility forms or white space share an id."""

from typing import Optional

import torch
from torch import Tensor

_REPLACEMENT = "\ufffd"  # what bytes that are no text decode to
_LONE_SPACE = "\ue000"  # private use: keeps a token of white space alone apart from an empty one while stripping


def compress_vocabulary(tokenizer, expected_size: Optional[int] = None) -> Tensor:
    """Compressed id of every token of a `tokenizers.Tokenizer`: int64 [V], ids 0 .. size - 1 in order of appearance.

    A token is decoded alone. Its key is that text under NFKC, NFD, without accents, in lower case, each run of blanks,
    tabs and line ends as one blank, and stripped unless a blank is all there is; the plain text if nothing is left. A
    token that does not decode to text (part of a character's bytes) has its own entry in the vocabulary as key.

    Raises:
        ValueError: the size is not `expected_size`. Every hash multiplier depends on it: with another size each table
            row would silently mean something else.
    """
    normalizer = _normalizer()
    ids: dict[str, int] = {}
    compressed = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token)
        else:
            key = normalizer.normalize_str(text) or text
        compressed.append(ids.setdefault(key, len(ids)))
    if expected_size is not None and len(ids) != expected_size:
        raise ValueError(f"expected_size: got a vocabulary of {len(ids)} compressed ids, expected {expected_size}")
    return torch.tensor(compressed, dtype=torch.int64)


def _normalizer():
    from tokenizers import Regex, normalizers

    return normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex("^ $"), _LONE_SPACE),
        normalizers.Strip(), normalizers.Replace(_LONE_SPACE, " "),
    ])
