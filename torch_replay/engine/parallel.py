"""Data parallel serving: every rank runs requests of its own, and all agree once a step on what the step does.

A step may trim prompts to their last tokens (decoder-side replay), which changes how many tokens each rank brings to
the model's tail; layers that exchange tokens between ranks have to know. So, before a step's kind is chosen, each rank
puts three numbers into one all-reduce on the CPU, a rank without work zeros. The same message ends the run, when
nobody had anything to say, and carries the news that a rank failed.
"""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist

# bits of a rank's first number
PREFILLS, WORKS, FAILED = 1, 2, 4

TIMEOUT_SECONDS = 30.0
START_SECONDS = 600.0  # loading and compiling take ranks unequally long
ROLL_CALL_SECONDS = 2.0


class RankFailure(RuntimeError):
    """Another rank failed, died or stopped answering. `ranks` lists those known to have."""

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = list(ranks)


def launched_by_torchrun() -> bool:
    return dist.is_available() and dist.is_torchelastic_launched()


@dataclass(frozen=True)
class Agreed:
    """What a step does on every rank."""

    prefills: bool  # some rank prefills: all take the route that may trim
    trims: bool  # some rank trims: all run the replay batch
    kept_tokens: tuple[int, ...]  # by rank, prompt tokens of this step that the model's tail runs on if trims


class StepAgreement:
    """One message a step between ranks, a CPU all-reduce of int32 `[3, world_size]`: flags, trims, kept tokens.

    torch.distributed must be initialised. store: one that every rank reaches, for what goes wrong (a
    `torch.distributed.Store`; prefix it if others use it). timeout: seconds that a rank waits for the others' message.

    Every rank calls `agree` for each step until `done`. If one fails, the others get a RankFailure: from the next
    message if it calls `report`; as soon as its connection closes if it dies, for whoever notices closes its own; after
    `timeout` if it hangs. In the last two cases finding out who it was takes up to two seconds more. The group is gone
    afterwards.

    Raises ValueError for a timeout that is not above 0, RuntimeError without an initialised torch.distributed.
    """

    def __init__(self, store: "dist.Store", timeout: float = TIMEOUT_SECONDS):
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}, expected seconds above 0")
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised, expected init_process_group before this")
        self.store, self.timeout = store, timeout
        # of its own even where the default group is gloo: its timeout is short
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.done = False
        self.failure: Optional[str] = None

    @classmethod
    def from_torchrun(cls, cuda: bool, timeout: float = TIMEOUT_SECONDS) -> "StepAgreement":
        """Joins the ranks that `torchrun` started. cuda: tensors on GPUs can be exchanged too, through NCCL."""
        store, rank, world_size = next(dist.rendezvous("env://"))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.PrefixStore("default", store),
                                rank=rank, world_size=world_size, timeout=timedelta(seconds=START_SECONDS))
        return cls(dist.PrefixStore("agreement", store), timeout)

    def open(self) -> None:
        """Begins a new round of steps. Every rank does, whether it has requests or not."""
        self.done = False

    def meet(self, timeout: float = START_SECONDS) -> None:
        """Waits until every rank is here, for at most `timeout` seconds. Raises RankFailure."""
        self._refuse_if_failed()
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise self._lost(error) from error

    def agree(self, works: bool, prefills: bool, trims: bool, kept_tokens: int) -> Agreed:
        """Sends this rank's part of a step and returns everybody's. Sets `done` if no rank has work.

        works: the rank has requests to run. Raises RankFailure.
        """
        message = self._exchange(WORKS * works | PREFILLS * prefills, int(trims), kept_tokens)
        flags, trimming, kept = message
        failed = [rank for rank, flag in enumerate(flags) if flag & FAILED]
        if failed:
            self.failure = "; ".join(f"rank {rank} failed: {self._reason(rank)}" for rank in failed)
            raise RankFailure(self.failure, failed)
        self.done = not any(flags)
        return Agreed(any(flag & PREFILLS for flag in flags), any(trimming), tuple(kept))

    def report(self, error: BaseException) -> None:
        """Tells the others that this rank stops because of `error`, which may be an interrupt, in place of its next
        message.

        Waits for them, at most `timeout` seconds. Does nothing once the group has failed. If they cannot be told, that
        is added to the error's notes.
        """
        if self.failure is not None:
            return
        reason = ": ".join(filter(None, [type(error).__name__, str(error)]))
        try:
            self.store.set(f"reason/{self.rank}", reason)
            self._exchange(FAILED, 0, 0)
        except RuntimeError as failure:
            error.add_note(f"rank {self.rank} could not tell the other ranks: {failure}")
        self.failure = f"rank {self.rank} failed: {reason}"

    def gather(self, value: Any) -> Optional[list]:
        """What each rank gave, by rank, on rank 0; None elsewhere. Pickled. Raises RankFailure."""
        self._refuse_if_failed()
        values = [None] * self.world_size if self.rank == 0 else None
        try:
            dist.gather_object(value, values, dst=0, group=self.group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return values

    def close(self) -> None:
        """Leaves torch.distributed."""
        dist.destroy_process_group()

    def _exchange(self, flags: int, trims: int, kept_tokens: int) -> list[list[int]]:
        self._refuse_if_failed()
        message = torch.zeros(3, self.world_size, dtype=torch.int32)
        message[:, self.rank] = torch.tensor([flags, trims, kept_tokens], dtype=torch.int32)
        try:
            dist.all_reduce(message, group=self.group)
        except RuntimeError as error:
            raise self._lost(error) from error
        return message.tolist()

    def _refuse_if_failed(self) -> None:
        if self.failure is not None:
            raise RankFailure(f"the ranks have stopped: {self.failure}")

    def _reason(self, rank: int) -> str:
        try:
            return self.store.get(f"reason/{rank}").decode()
        except RuntimeError:  # whoever kept the store is gone
            return "reason unknown"

    def _lost(self, error: RuntimeError) -> RankFailure:
        """Finds out which ranks do not come to the store although this one did, because a message failed.

        Closes its connections first, for a rank that waits for this one's part of the message notices only then.
        """
        traceback.clear_frames(error.__traceback__)  # which hold the group, and with it the connections
        dist.destroy_process_group(self.group)
        self.group = None
        silent, known = [rank for rank in range(self.world_size) if rank != self.rank], True
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        try:
            self.store.set(f"here/{self.rank}", "")
            while silent and time.monotonic() < deadline:
                time.sleep(0.02)
                silent = [rank for rank in silent if not self.store.check([f"here/{rank}"])]
        except RuntimeError:
            known = False
        if not known:
            who = "a rank died or hangs, and the store that would tell which is gone"
        elif silent:
            who = f"rank {', '.join(map(str, silent))} died or hangs"
        else:
            who = "the connection between ranks broke"
        self.failure = f"{who} ({str(error).splitlines()[0]})"
        return RankFailure(self.failure, silent if known else [])
