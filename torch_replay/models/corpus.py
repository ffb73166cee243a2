"""Builds the corpus of the small model: Python's standard library and the King James Bible, as arrays of token ids.

    python -m torch_replay.models.corpus --bible FOLDER --out .corpus

FOLDER is where the Debian packages `bible-kjv` and `bible-kjv-text` were unpacked (`apt-get download` both, then
`dpkg -x PACKAGE FOLDER` each): the text is stored in a format of its own, which the program in the first one prints.
The standard library is the one of the running Python. The output folder gets `tokenizer.json`, `corpus.json` (what
went in) and one array of uint16 ids per part and split; documents are separated by the end-of-text token.
"""

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sysconfig
from pathlib import Path

import numpy as np

EOS = "<|endoftext|>"
PARTS = {
    "code": "Python standard library, PSF License Version 2",
    "text": "King James Version of the Bible (Debian package bible-kjv-text), public domain",
}
SKIPPED_FOLDERS = {"site-packages", "idlelib", "lib2to3", "__pycache__", "turtledemo", "pydoc_data"}
# tables and tests are many and alike: this percentage of their files is taken
THINNED_FOLDERS = {"encodings": 5, "test": 35, "tests": 35}
LARGEST_FILE = 200_000
VALID_PERCENT = 3
CHAPTERS_PER_DOCUMENT = 4


def _percentile(name: str) -> int:
    """A number in [0, 100) that depends on the name alone, so that a split never changes with the machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100


def read_code(folder: Path) -> list[tuple[str, str]]:
    """`(relative path, source)` of the library's files, sorted by path, thinned as the constants above say."""
    documents = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        parents = set(relative.parts[:-1])
        share = min((THINNED_FOLDERS[name] for name in parents & set(THINNED_FOLDERS)), default=100)
        too_large = path.stat().st_size > LARGEST_FILE
        if parents & SKIPPED_FOLDERS or too_large or _percentile(f"keep {relative.as_posix()}") >= share:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # some tests are written in other encodings on purpose
            continue
        if text.strip() and EOS not in text:
            documents.append((relative.as_posix(), text))
    return documents


def read_bible(folder: Path) -> list[tuple[str, str]]:
    """`(first chapter's title, text)` per run of a few chapters; FileNotFoundError unless both packages are there."""
    program, data = folder / "usr/bin/bible", folder / "usr/lib"
    for path in (program, data / "bible.data"):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, expected the unpacked packages bible-kjv, bible-kjv-text")
    command = [str(program.resolve()), "-p", str(data.resolve()), "-l72", "gen1:1-rev22:21"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # a chapter opens with its title alone between blank lines
    pieces = re.split(r"(?m)^\n((?:[1-3] )?[A-Z][A-Za-z ]+ \d+)\n\n", "\n" + printed.lstrip("\n"))[1:]
    chapters = list(zip(pieces[::2], pieces[1::2]))
    documents = []
    for start in range(0, len(chapters), CHAPTERS_PER_DOCUMENT):
        group = chapters[start : start + CHAPTERS_PER_DOCUMENT]
        documents.append((group[0][0], "\n".join(f"{title}\n\n{body.rstrip()}\n" for title, body in group)))
    return documents


def train_tokenizer(texts: list[str], size: int):
    """A byte-level BPE of `size` entries with the end-of-text token as entry 0; decoding gives back any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer, documents: list[tuple[str, str]]) -> np.ndarray:
    """uint16 ids of the documents, the end-of-text token before each one and after the last."""
    eos = tokenizer.token_to_id(EOS)
    ids = [eos]
    for name, text in documents:
        encoded = tokenizer.encode(text).ids
        if tokenizer.decode(encoded, skip_special_tokens=False) != text:
            raise ValueError(f"{name}: the tokenizer does not give this text back")
        ids += encoded + [eos]
    return np.array(ids, dtype=np.uint16)


def build(bible: Path, out: Path, vocab_size: int) -> dict:
    """Writes tokenizer, arrays and `corpus.json` to `out` and returns what `corpus.json` holds."""
    out.mkdir(parents=True, exist_ok=True)
    parts = {"code": read_code(Path(sysconfig.get_paths()["stdlib"])), "text": read_bible(bible)}
    splits = {}
    for part, documents in parts.items():
        splits[part] = {"train": [], "valid": []}
        for name, text in documents:
            split = "valid" if _percentile(f"valid {name}") < VALID_PERCENT else "train"
            splits[part][split].append((name, text))
    training = [text for part in splits.values() for _, text in part["train"]]
    tokenizer = train_tokenizer(training, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    info = {"python": platform.python_version(), "vocab_size": tokenizer.get_vocab_size(), "eos": EOS, "parts": {}}
    for part, by_split in splits.items():
        info["parts"][part] = {"source": PARTS[part]}
        for split, documents in by_split.items():
            ids = encode(tokenizer, documents)
            np.save(out / f"{split}_{part}.npy", ids)
            size = sum(len(text.encode()) for _, text in documents)
            info["parts"][part][split] = {"documents": len(documents), "bytes": size, "tokens": len(ids)}
        info["parts"][part]["held_out"] = [name for name, _ in by_split["valid"]]
    (out / "corpus.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    return info


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bible", type=Path, required=True, help="folder of the unpacked Debian packages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, about 20 MB")
    parser.add_argument("--vocab-size", type=int, default=1024)
    options = parser.parse_args()
    print(json.dumps(build(options.bible, options.out, options.vocab_size), indent=1))


if __name__ == "__main__":
    main()
