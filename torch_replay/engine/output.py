"""What a step hands out of a request: its tokens, their text, and why it ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

from .detokenizer import Detokenizer
from .request import Request


class Beginning(Sequence):
    """The first `count` items of a list that others only append to, read in place: it costs the same at any length."""

    def __init__(self, items: list, count: int):
        self._items, self._count = items, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place):
        if isinstance(place, slice):
            begin, end, step = place.indices(self._count)
            return [self._items[at] for at in range(begin, end, step)]
        if not -self._count <= place < self._count:
            raise IndexError(f"item {place} of {self._count}")
        return self._items[place % self._count]

    def __eq__(self, other) -> bool:
        """Equal to a list, tuple or other beginning of the same items."""
        return isinstance(other, (list, tuple, Beginning)) and self[:] == list(other)

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self[:])


@dataclass
class RequestOutput:
    """What a step did for one request. `token_ids` are all of the output so far: a list when the request has ended,
    before that a view, which reads like a list and which later steps do not change. `text` is their text, as far as no
    later token can change it; `new_text` is what it gained. When the request has ended, `text` is what
    `tokenizer.decode` makes of all tokens but one that ended it, up to a stop text. `seed` draws the same text again.
    """

    id: str
    token_ids: Sequence[int]
    text: str
    new_text: str
    finish_reason: Optional[str]
    prompt_logprobs: Optional[list[Optional[float]]] = None  # if asked for: by prompt token, None for the first
    error: Optional[str] = None  # what went wrong, where finish_reason is "error"
    seed: Optional[int] = None


class Stream:
    """An unfinished request of an engine, with the text of its tokens and the callback that wants them.

    An output counts once it is in the engine's list of outputs. Tokens and text that a step added before it was
    interrupted, `rewind` takes back; they will be computed again.
    """

    def __init__(self, request: Request, tokenizer, on_output: Optional[Callable[[RequestOutput], None]] = None):
        self.request, self.on_output = request, on_output
        self._tokenizer = tokenizer
        self._text = self._begin_text()
        self._told = 0  # tokens of the last output
        self._logprobs: Optional[list[Optional[float]]] = None  # of the prompt, which all outputs share
        self._torn = False  # an output was being made

    def _begin_text(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self.request.params.stop, self.request.params.skip_special_tokens)

    def commit(self, tokens: list[int], eos: tuple[int, ...], longest: int, outputs: list, error: Optional[str] = None
               ) -> RequestOutput:
        """Appends a step's tokens up to the first that ends the request, and an output to `outputs`.

        eos: the model's end-of-text tokens. longest: tokens, prompt and output, at which the request ends. error: what
        went wrong after these tokens.
        """
        self._torn = True
        request, params, reason = self.request, self.request.params, None
        for token in tokens:
            request.output_ids.append(token)
            ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
            if ends or self._text.append(token):
                reason = "stop"
            elif len(request.output_ids) >= params.max_tokens or request.num_tokens >= longest:
                reason = "length"
            if reason:
                break
        else:
            if error is not None:
                reason = "error"
            elif not params.max_tokens:
                reason = "length"
        return self._tell(reason, outputs, error if reason == "error" else None)

    def end(self, reason: str, outputs: list) -> RequestOutput:
        """Appends a last output of the tokens so far to `outputs`."""
        self._torn = True
        return self._tell(reason, outputs)

    def _tell(self, reason: Optional[str], outputs: list, error: Optional[str] = None) -> RequestOutput:
        request, text = self.request, self._text
        new_text = text.flush() if reason else text.take()
        # tokens that an output told are never taken back, so that views of them stand
        ids = list(request.output_ids) if reason else Beginning(request.output_ids, len(request.output_ids))
        logprobs = self._logprobs
        if request.params.prompt_logprobs and logprobs is None:
            logprobs = [None, *request.prompt_logprobs]
            self._logprobs = None if reason else logprobs  # an end in the middle of the prompt may be taken back
        output = RequestOutput(request.id, ids, text.text, new_text, reason, logprobs, error, request.params.seed)
        outputs.append((self, output))
        self.settle(output)
        return output

    def settle(self, output: RequestOutput) -> None:
        """Notes an output that stands."""
        self._told, self._torn = len(output.token_ids), False

    def rewind(self) -> None:
        """Takes back what no output told of."""
        if not self._torn:
            return
        del self.request.output_ids[self._told :]
        self._text = self._begin_text()
        for token in self.request.output_ids:
            self._text.append(token)
        self._text.take()  # what the last output told
        self._torn = False
