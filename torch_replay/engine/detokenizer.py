"""Text of a growing output, in whole characters and without any part of a stop text."""

import codecs
import json
import re

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
FUSING = ("Fuse", "ByteLevel")  # decoders after which all tokens are one
CONTEXT = 8  # tokens; more than bytes of two characters


class Detokenizer:
    """Turns tokens into text as they come. `append` each token, then `take` what may be shown, `flush` at the end.

    The text is `tokenizer.decode` of all tokens at once, up to where the first stop text begins. A text stops with the
    token after which that, less the bytes of an unfinished character, holds a stop text. Work grows with the tokens,
    not with their square. With no tokenizer the text stays empty.

    text: all that was taken.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = (), skip_special_tokens: bool = True):
        self._decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, skip_special_tokens)
        self.stop, self._overlap = stop, max(map(len, stop), default=1) - 1
        self.text = ""
        self._held = ""  # certain, but not taken
        self._stopped = False

    def append(self, token: int) -> bool:
        """Adds a token; True if the text now holds a stop text, which then ends just before it."""
        decoder = self._decoder
        if decoder is None or self._stopped:
            return self._stopped
        likely = len(decoder.likely)
        certain = decoder.add(token)
        self._held += certain
        new = len(certain) or len(decoder.likely) - likely
        if self.stop and (new > 0 or not decoder.local):
            # nothing before the overlap can begin a stop text that ends in what is new
            seen = _last(decoder.likely, self._overlap + new)
            seen = _last(self._held, self._overlap + new - len(seen)) + seen
            if not decoder.local or self._holds_stop(seen):
                text = self._held + decoder.rest()
                self._stopped = self._holds_stop(text)
                if self._stopped:
                    self._held = self._cut(text)
        return self._stopped

    def take(self) -> str:
        """New text that no later token can change."""
        end = len(self._held)
        if not self._stopped:
            end -= max((held_back(self._held, stop) for stop in self.stop), default=0)
        return self._give(self._held[:end], self._held[end:])

    def flush(self) -> str:
        """All text not taken yet; for the end of a request."""
        if self._decoder is None:
            return ""
        rest = "" if self._stopped else self._decoder.rest()
        return self._give(self._cut(self._held + rest), "")

    def _give(self, text: str, held: str) -> str:
        self.text, self._held = self.text + text, held
        return text

    def _holds_stop(self, text: str) -> bool:
        return any(stop in text for stop in self.stop)

    def _cut(self, text: str) -> str:
        return text[: min((at for at in map(text.find, self.stop) if at >= 0), default=len(text))]


class IncrementalDecoder:
    """`tokenizer.decode` of a growing list of tokens, piece by piece.

    Decoders render a token by what stands beside it: a blank before all but the first, bytes joined to a character. So
    a token is decoded behind the last few before it, whose text is taken off again. What a later token can change:

    * bytes of an unfinished character, which decode to one U+FFFD at the end;
    * with byte fallback (tokens <0x00> to <0xFF>) a whole run of bytes, which decodes to U+FFFD for every byte unless
      all of it is UTF-8: so until the run ends, or cannot become UTF-8 any more;
    * everything, if a decoder rewrites the text after the tokens were fused (`local` is False): then all waits.

    likely: the whole characters of a run of bytes that has not ended.
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.local = _is_local(getattr(tokenizer, "decoder", None))
        self.likely = ""
        self._token_of = getattr(tokenizer, "id_to_token", None)
        added = tokenizer.get_added_tokens_decoder() if skip_special_tokens and self._token_of else {}
        self._special = {token.content for token in added.values() if token.special}
        self._ids: list[int] = []  # the context and, behind it, what is not certain yet
        self._done = 0  # characters of their text that were given out
        self._run: list[int] = []  # of bytes, which follow
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._broken = False  # the context ends in a run of bytes that is no UTF-8

    def add(self, token: int) -> str:
        """The text that has become certain with this token."""
        name = "" if self._token_of is None else self._token_of(token)
        if name is None or name in self._special:
            return ""  # the decoder does not see it
        if not self.local:
            self._ids.append(token)
            return ""
        byte = BYTE_TOKEN.fullmatch(name)
        if byte and self._decode([token]) != name:
            return self._add_byte(token, int(byte[1], 16))
        self._ids += [*self._run, token]
        self._end_run(broken=False)
        text = self._decode(self._ids)
        new, rest = text[self._done :], ""
        if new.endswith("\ufffd"):
            new, rest = new[:-1], "\ufffd"
        self._done += len(new)
        if len(self._ids) >= 2 * CONTEXT:
            self._move_context(CONTEXT, rest)
        return new

    def rest(self) -> str:
        """The text behind what is certain, if no token follows."""
        return self._decode(self._ids + self._run)[self._done :]

    def _add_byte(self, token: int, value: int) -> str:
        if self._broken:
            return self._decode([*self._ids, token])[self._done :]
        self._run.append(token)
        try:
            self.likely += self._utf8.decode(bytes([value]))
            return ""
        except UnicodeDecodeError:
            new = self.rest()
            self._ids = self._run[-4:]  # they hold the fault: bytes of one character and the one that does not fit
            self._done = len(self._decode(self._ids))
            self._end_run(broken=True)
            return new

    def _end_run(self, broken: bool) -> None:
        self._run, self.likely, self._broken = [], "", broken
        self._utf8.reset()

    def _move_context(self, count: int, rest: str) -> None:
        """Lets go of all but `count` tokens, or as many as have any text: else the next may look like the first."""
        while not (text := self._decode(self._ids[-count:])) and count < len(self._ids):
            count *= 2
        self._ids = self._ids[-count:]
        self._done = len(text) - len(rest)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens)


def _is_local(decoder) -> bool:
    """Whether a `tokenizers` decoder never rewrites text that stands further back."""
    if decoder is None:
        return True
    try:
        steps = _steps(json.loads(decoder.__getstate__()))
    except Exception:  # one in Python: nobody knows
        return False
    fused = next((place for place, step in enumerate(steps) if step in FUSING), len(steps))
    return set(steps[fused + 1 :]) <= {"Fuse", "Strip"}


def _steps(decoder: dict) -> list[str]:
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _last(text: str, count: int) -> str:
    return text[max(len(text) - count, 0) :]


def held_back(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop`, short of all of it, that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
