"""What a terminal shows while things run: a ticking clock for the compiler, text above a bar of tokens."""

import sys
import threading
import time
from collections.abc import Iterable, Sequence

from tqdm import tqdm


class Ticker:
    """Context manager that shows how long a call that cannot report progress has been running.

    On a terminal a clock ticks on stderr; elsewhere one line says what began. `seconds` holds the time afterwards.
    """

    def __init__(self, label: str, quiet: bool = False):
        self.label, self.quiet, self.seconds = label, quiet, 0.0

    def __enter__(self):
        self._begin, self._done = time.perf_counter(), threading.Event()
        self._thread = None
        if self.quiet:
            return self
        if not sys.stderr.isatty():
            print(f"{self.label} ...", file=sys.stderr, flush=True)
            return self
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()
        return self

    def _tick(self) -> None:
        with tqdm(desc=self.label, bar_format="{desc}: {elapsed}", leave=False) as bar:
            while not self._done.wait(0.2):
                bar.refresh()

    def __exit__(self, *failure):
        self.seconds = time.perf_counter() - self._begin
        self._done.set()
        if self._thread is not None:
            self._thread.join()


def shown(items: Sequence, label: str, quiet: bool = False) -> Iterable:
    """`items`, one after the other, with a bar on stderr where that is a terminal."""
    return tqdm(items, desc=label, leave=False, disable=quiet or not sys.stderr.isatty())


class TokenBar:
    """Streams outputs in the order of their prompts, and shows a bar of all tokens on a terminal.

    The first output that is not finished streams line by line above the bar, or piece by piece where there is no bar;
    later ones wait for their turn. The bar is of `running` prompts; outputs of others may be shown once it is closed.
    """

    def __init__(self, prompts: list[str], max_tokens: int, running: int, quiet: bool = False):
        self.prompts = prompts
        self.waiting = [""] * len(prompts)
        self.counts, self.ended = [0] * len(prompts), [False] * len(prompts)
        self.turn, self.begun = 0, False
        self.line = ""  # the beginning of a line, kept until it is whole: above a bar only whole lines have room
        terminal = sys.stderr.isatty() and not quiet
        self.bar = tqdm(total=running * max_tokens, unit="token", leave=False) if terminal else None

    def show(self, index: int, output) -> None:
        """Takes a `RequestOutput` of prompt `index`."""
        self.waiting[index] += output.new_text
        self.ended[index] = output.finish_reason is not None
        if self.bar is not None:
            self.bar.update(len(output.token_ids) - self.counts[index])
        self.counts[index] = len(output.token_ids)
        self._write()

    def _write(self) -> None:
        while self.turn < len(self.prompts):
            if not self.begun:
                self._print(f"--- prompt {self.turn + 1} of {len(self.prompts)}\n{self.prompts[self.turn]}|", end="")
                self.begun = True
            text, ended = self.waiting[self.turn], self.ended[self.turn]
            self.waiting[self.turn] = ""
            self._print(text, end="\n\n" if ended else "")
            if not ended:
                return
            self.turn, self.begun = self.turn + 1, False

    def _print(self, text: str, end: str) -> None:
        if self.bar is None:
            print(text, end=end, flush=True)
            return
        lines, newline, self.line = (self.line + text + end).rpartition("\n")
        if newline:
            tqdm.write(lines, file=sys.stdout)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
