"""Text of a growing output: whole characters only, and never a part of a stop string."""


class Detokenizer:
    """Turns tokens into text as they come. `append` a token, then `take` what may be shown.

    A byte-level token can end inside a character, and the text so far can end in the beginning of a stop string; both
    are held back until later tokens decide. With no tokenizer the text stays empty.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.text = ""
        self._ids: list[int] = []
        self._settled = 0  # tokens whose text is final
        self._prefix = ""  # their text
        self._shown = 0

    def append(self, token: int) -> bool:
        """Adds a token; True if the text now holds a stop string, which then ends just before it."""
        if self.tokenizer is None:
            return False
        self._ids.append(token)
        tail = self.tokenizer.decode(self._ids[self._settled :], skip_special_tokens=False)
        self.text = self._prefix + tail
        if not tail.endswith("\ufffd"):
            self._settled, self._prefix = len(self._ids), self.text
        found = [at for at in (self.text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def take(self) -> str:
        """New text that no later token can change."""
        end = len(self.text)
        while end and self.text[end - 1] == "\ufffd":
            end -= 1
        end -= max((held_back(self.text[:end], stop) for stop in self.stop), default=0)
        return self._advance(end)

    def flush(self) -> str:
        """All text not taken yet; for the end of a request."""
        return self._advance(len(self.text))

    def _advance(self, end: int) -> str:
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def held_back(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop`, short of all of it, that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
