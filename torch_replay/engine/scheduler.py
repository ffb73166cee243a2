"""Which requests run in the next step, with which drafts, and who owns which block. Pure Python: no tensors.

One rule shapes this file: a block or request index freed while a step is scheduled is handed out in the next step at
the earliest. So preempting somebody helps only the step after. A decoding request therefore asks for the block of the
next step's first token as well, and blocks run out one step before they are missed. Free blocks are spoken for in two
ways: `reserved` for the window groups of requests that still prefill, and `owed` to requests that decode.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import Optional

from ..states.groups import KVGroup, by_name
from .block_pool import BlockPool
from .drafter import Drafter
from .prefix_cache import Hit, PrefixCache
from .request import FINISH_REASONS, Request, check_int


@dataclass(frozen=True)
class Prefill:
    """Tokens start .. start + length - 1 of a request. last: they end its tokens, so the last row is sampled."""

    request: Request
    start: int
    length: int
    last: bool


@dataclass
class Plan:
    """One step. drafts[i] belong to decodes[i]. admitted: got an index in the making of this plan, and prefill in it.
    preempted: lost their blocks and index."""

    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        """Every request that runs in this step."""
        return self.decodes + [prefill.request for prefill in self.prefills]


class Scheduler:
    """Continuous batching: all decoding requests and a few prompt chunks in each step.

    groups: KV groups, all with blocks of block_size tokens. max_num_seqs: most requests admitted at a time; their
    indices are 0 .. max_num_seqs - 1. max_model_len: most tokens of a request, prompt and output. A step prefills at
    most prefill_budget tokens in at most prefill_rows chunks of at most chunk_size. num_spec: most drafts of a row.
    drafter: see `drafter.Drafter`; what it raises comes out of `schedule`, which can be called again.

    prefix_cache: requests take over what earlier ones with the same first tokens left behind, see `prefix_cache`. The
    model then has num_snapshots snapshots of its states at multiples of state_block_size tokens (None: it has no
    state-space layers).

    Requests are admitted in order of arrival, and those admitted first have the first claim on blocks: the oldest
    admitted request is never preempted and advances in every step, so every request finishes. The engine calls, in
    turn, `schedule`, then `advance` for each request that a forward has run, and `finish` for those that ended, or
    `recover` if the step failed. A plan is empty only if nothing is left to do.

    Each method may raise anywhere, an interrupt included, and nothing is lost: which requests there are (`_live` and
    their finish_reason), which are admitted (index) and what those hold (tables, source, snapshots) is written down in
    one place each. The lists and the pools follow from it, and `recover` makes them anew.

    Raises TypeError or ValueError for sizes that are no positive integers (num_spec may be 0), fewer than two blocks,
    and groups of the same name; for a prefix cache also as `PrefixCache` says.
    """

    def __init__(
        self,
        groups: list[KVGroup],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        prefill_budget: int,
        chunk_size: int,
        prefill_rows: int,
        num_spec: int,
        drafter: Drafter,
        prefix_cache: bool = False,
        num_snapshots: Optional[int] = None,
        state_block_size: Optional[int] = None,
    ):
        self.max_num_seqs = check_int("max_num_seqs", max_num_seqs, 1)
        self.max_model_len = check_int("max_model_len", max_model_len, 2)
        self.block_size = check_int("block_size", block_size, 1)
        self.prefill_budget = check_int("prefill_budget", prefill_budget, 1)
        self.chunk_size = check_int("chunk_size", chunk_size, 1)
        self.prefill_rows = check_int("prefill_rows", prefill_rows, 1)
        self.num_spec = check_int("num_spec", num_spec, 0)
        self.drafter = drafter
        self.groups = list(by_name(groups).values())
        self.full_groups = [group for group in groups if group.prefix_cacheable]
        self.window_groups = [group for group in groups if not group.prefix_cacheable]
        self.pools = {group.name: BlockPool(group.num_blocks) for group in groups}
        self.prefix: Optional[PrefixCache] = None
        if prefix_cache:
            self.prefix = PrefixCache(
                {group.name: self.pools[group.name] for group in self.full_groups}, block_size,
                max((group.prefix_replay_tokens for group in groups), default=0),
                None if num_snapshots is None else BlockPool(1 + check_int("num_snapshots", num_snapshots, 1)),
                block_size if state_block_size is None else state_block_size)
        snapshots = [self.prefix.snapshots] if self.prefix and self.prefix.snapshots else []
        self.indices = BlockPool(max_num_seqs + 1)  # index i is its block i + 1: the same rule on reuse
        self._all_pools = [*self.pools.values(), *snapshots, self.indices]
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by admission
        self.plan = Plan()  # the last one
        self._live: dict[str, Request] = {}
        self._torn = False  # something was interrupted, or is under way
        self._arrivals = self._admissions = 0
        self._reserved: dict[str, int] = {}  # by group; brought up to date by `_reserve`
        self._owed = 0  # decoding requests that get one block in each group at the next step

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def check(self, request: Request) -> None:
        """Raises ValueError if a request has run before, if its id belongs to an unfinished request, if its prompt is
        empty or, with a token to follow, longer than max_model_len, or if it could not even run alone in the pools."""
        if request.id in self._live:
            raise ValueError(f"id: expected one that no unfinished request has, got {request.id!r}")
        if request.finished or request.arrival >= 0:
            raise ValueError(f"request {request.id!r}: expected a new one, got one that was added before")
        length = len(request.prompt_ids)
        longest = self.max_model_len - (request.params.max_tokens > 0)
        if not 1 <= length <= longest:
            raise ValueError(f"prompt_ids: expected 1 to {longest} tokens, got {length}")
        most = self._last_cover(request)  # after a preemption, prompt and outputs are prefilled
        needs = {group.name: self._blocks_held(group, most, most) for group in self.groups}
        for name, need in needs.items():
            if need > self.pools[name].num_blocks - 1:
                raise ValueError(
                    f"request {request.id!r}: expected a need of at most {self.pools[name].num_blocks - 1} blocks in "
                    f"group {name!r}, got {need} for {length} prompt tokens and max_tokens={request.params.max_tokens}"
                )

    def add(self, request: Request) -> None:
        """Queues a new request. Raises ValueError as `check` does."""
        self.check(request)
        self._begin()
        request.arrival, self._arrivals, self._live[request.id] = self._arrivals, self._arrivals + 1, request
        self.waiting.append(request)
        self._torn = False

    def finish(self, request: Request, reason: str) -> None:
        """Ends a waiting or admitted request and frees what it holds. Raises ValueError for any other request, and for
        a reason that is not one of request.FINISH_REASONS."""
        if reason not in FINISH_REASONS:
            raise ValueError(f"reason: expected one of {FINISH_REASONS}, got {reason!r}")
        if self._live.get(request.id) is not request:
            raise ValueError(f"request: expected an unfinished one of this scheduler, got {request.id!r}")
        self._begin()
        request.finish_reason = reason
        del self._live[request.id]
        if request.index >= 0:
            self._release(request)
        else:
            self.waiting.remove(request)
        self._torn = False

    def abort(self, request_id: str) -> bool:
        """Finishes the request with this id, if it is unfinished; says whether it was."""
        request = self._live.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request is not None

    def advance(self, request: Request, count: int, drafts: Optional[list[int]] = None) -> None:
        """After a forward of this step: `count` more tokens of the request are computed, and what it filled is
        published. drafts: accepted ones among them, which the request does not list yet."""
        ahead, request.pending = request.pending, 0
        request.num_computed += count - ahead
        if self.prefix is not None and request.index >= 0:  # a callback may have aborted it meanwhile
            self.prefix.settle(request, request.num_computed - count, drafts or [], under_way=bool(ahead))

    def reset_prefix_cache(self) -> None:
        """Forgets every published block and snapshot. Requests that are running keep what they hold and go on, but as
        that stays part of all they compute from now on, they publish nothing more, unless they are put back to wait
        and computed anew."""
        if self.prefix is not None:
            for request in self.running:
                request.private = True
            self.prefix.forget()

    def expect(self, request: Request) -> None:
        """Counts the one token of a decode step that is under way, so that the step after it can be scheduled. The call
        of `advance` that follows does not count it again."""
        request.num_computed, request.pending = request.num_computed + 1, 1

    def recover(self) -> None:
        """After a step that failed: its requests lose their caches and wait, in order of arrival, to be computed again.

        These are the requests of the last plan, or, where `schedule` itself failed, none but those that have a step
        under way. All others keep what they have. May be called again, also where it raised.
        """
        self._torn = True
        self._live = {name: request for name, request in self._live.items() if not request.finished}
        live, failed = list(self._live.values()), set(self.plan.requests)
        for request in {*live, *failed}:
            if request.index < 0 or request.pending or request in failed:
                self._clear(request)
        self.running = sorted((r for r in live if r.index >= 0), key=lambda request: request.admission)
        self.waiting = sorted((r for r in live if r.index < 0), key=lambda request: request.arrival)
        for name, pool in self.pools.items():
            pool.restore(block for request in self.running for block in request.tables[name])
        self.indices.restore(request.index + 1 for request in self.running)
        if self.prefix is not None and self.prefix.snapshots is not None:
            self.prefix.snapshots.restore(
                snapshot for r in self.running for snapshot in (r.source, *r.snapshots.values()))
        self._torn = False

    def _begin(self) -> None:
        """Before a change of several objects, which sets `_torn` back to False when it is complete."""
        if self._torn:
            self.recover()
        self._torn = True

    def release_window(self, request: Request) -> None:
        """Frees the blocks that no later query of the request sees: wholly below num_computed - sliding_window + 1."""
        for group in self.window_groups if request.index >= 0 else ():
            table = request.tables[group.name]
            dead = self._dead_blocks(request, group)
            while dead > 0 and table[dead - 1] != 0:  # what lies below a freed block is freed
                dead -= 1
                self.pools[group.name].free([table[dead]])
                table[dead] = 0

    def schedule(self) -> Plan:
        """The next step. Its blocks are in the tables of its requests when this returns."""
        self._begin()
        self.plan = Plan()
        for request in self.running:
            self.release_window(request)
        for pool in self._all_pools:
            pool.begin_step()
        self._owed = 0
        self._reserve()
        plan = Plan()
        self._secure_decodes(plan)
        for request in self.running:
            if request.is_decoding:
                self._plan_decode(request, plan)
        self._plan_prefills(plan)
        self.plan, self._torn = plan, False
        return plan

    def _secure_decodes(self, plan: Plan) -> None:
        """Blocks for this step's first token of every decoding request and, as far as there are any, for the next
        step's. Preempts the youngest until what is missing for the next step will be free then."""
        for request in [request for request in self.running if request.is_decoding]:
            # Only the youngest can lack this block: the last step saw to the others.
            if not self._cover(request, request.num_tokens):
                self._preempt(request, plan)
        for request in [request for request in self.running if request.is_decoding]:
            if request.index < 0:
                continue  # preempted just now
            while not self._cover(request, request.num_tokens + 1):
                if all(self._room(group.name, next_step=True) > 0 for group in self.groups):
                    self._owed += 1
                    break
                if self.running[-1] is request:
                    break  # it can decode once more, and others may finish meanwhile
                self._preempt(self.running[-1], plan)

    def _plan_decode(self, request: Request, plan: Plan) -> None:
        """Adds a decode row with as many drafts as the limits and the free blocks allow."""
        # A step yields one token more than it has drafts.
        limit = min(self.num_spec, self._final_length(request) - request.num_tokens - 1)
        drafts = list(self.drafter.propose(request.view, limit))[:limit] if limit > 0 else []
        while drafts and not self._cover(request, request.num_tokens + len(drafts) + 1):
            drafts.pop()
        if self.prefix is not None:
            self.prefix.claim(request, request.num_computed, request.num_tokens + len(drafts), prefilling=False)
        plan.decodes.append(request)
        plan.drafts.append(drafts)

    def _plan_prefills(self, plan: Plan) -> None:
        """Adds chunks of admitted requests, then of waiting ones in their order, until rows or tokens are used up."""
        budget = self.prefill_budget
        admitted = [request for request in self.running if not request.is_decoding]
        while budget > 0 and len(plan.prefills) < self.prefill_rows:
            if admitted:
                request = admitted.pop(0)
            elif self.waiting and not plan.preempted and self._admit(self.waiting[0]):
                request = self.waiting.pop(0)
                self.running.append(request)
                plan.admitted.append(request)
            else:
                break
            start = request.num_computed
            length = min(self.chunk_size, budget, request.num_tokens - start)
            if self.prefix is not None:
                self.prefix.claim(request, start, start + length, prefilling=True)
            self._take(request, self._missing(request, self.window_groups, start + length))
            self._reserve()
            plan.prefills.append(Prefill(request, start, length, start + length == request.num_tokens))
            budget -= length

    def _admit(self, request: Request) -> bool:
        """Gives a request an index and its blocks in the full groups, if those and a reserve in the window groups, for
        all its present tokens and one more, are there. What a prefix hit covers is shared, or will be replayed."""
        if not self.indices.num_free:
            return False
        hit, keys = Hit(), []
        if self.prefix is not None:
            hit = self.prefix.lookup(request)
            keys = self.prefix.block_keys(request, hit.boundary)
        tokens, fresh = self._cap(request, request.num_tokens + 1), {}
        for group in self.groups:
            fresh[group.name] = need = self._blocks_held(group, request.num_tokens - hit.start, tokens)
            if group.prefix_cacheable:
                fresh[group.name] -= len(keys)
                need -= sum(self.pools[group.name].holds(key) for key in keys)
            if self._room(group.name) < need:
                return False
        for group in self.full_groups:
            request.tables[group.name] = [self.pools[group.name].share(key) for key in keys]
        for group in self.window_groups:
            request.tables[group.name] = [0] * (hit.start // self.block_size)
        if self.prefix is not None:
            self.prefix.adopt(request, hit)
        self._take(request, {group.name: fresh[group.name] for group in self.full_groups})
        request.admission, self._admissions = self._admissions, self._admissions + 1
        request.index = self.indices.allocate(1)[0] - 1  # now it is admitted, with all that it needs
        return True

    def _preempt(self, request: Request, plan: Plan) -> None:
        self._release(request)
        self._clear(request)
        insort(self.waiting, request, key=lambda other: other.arrival)
        self._reserve()
        request.preemptions += 1
        plan.preempted.append(request)

    def _clear(self, request: Request) -> None:
        """Nothing of the request is computed, and it holds nothing."""
        request.index, request.tables, request.source, request.snapshots = -1, {name: [] for name in self.pools}, 0, {}
        request.num_computed = request.replay_start = request.hit_tokens = request.pending = 0
        request.private = False
        request.prompt_logprobs.clear()
        request.prefix_keys.clear()  # a failed step may have named tokens that the request never got

    def _release(self, request: Request) -> None:
        """Takes an admitted request's blocks and index."""
        index, request.index = request.index, -1  # from here on it is not admitted
        self.running.remove(request)
        for name, table in request.tables.items():
            self.pools[name].free(reversed(table))  # a prefix is evicted from its end
        if self.prefix is not None:
            self.prefix.drop(request)
        self.indices.free([index + 1])
        request.tables = {name: [] for name in self.pools}

    def _reserve(self) -> None:
        """Counts the free blocks that admitted requests will still take in window groups to complete their prefill."""
        self._reserved = dict.fromkeys(self.pools, 0)
        for request in self.running:
            if request.is_decoding:
                continue
            for group in self.window_groups:
                uncomputed = request.num_tokens - request.num_computed
                most = self._blocks_held(group, uncomputed, self._cap(request, request.num_tokens + 1))
                held = request.tables[group.name][self._dead_blocks(request, group) :]
                self._reserved[group.name] += most - sum(block != 0 for block in held)

    def _room(self, name: str, next_step: bool = False) -> int:
        """Free blocks that nobody has a claim on, now or at the next step."""
        pool = self.pools[name]
        unclaimed = pool.num_free - self._reserved[name]
        if next_step:
            return unclaimed + pool.num_pending - self._owed
        return unclaimed - max(self._owed - pool.num_pending, 0)

    def _cover(self, request: Request, tokens: int) -> bool:
        """Extends all tables to the first `tokens` tokens. False, and nothing done, if there is no room."""
        missing = self._missing(request, self.groups, tokens)
        if any(count > self._room(name) for name, count in missing.items()):
            return False
        self._take(request, missing)
        return True

    def _missing(self, request: Request, groups: list[KVGroup], tokens: int) -> dict[str, int]:
        """By group, the blocks that the tables lack for the first `tokens` tokens; groups that lack none left out."""
        blocks = self._blocks(self._cap(request, tokens))
        missing = {group.name: blocks - len(request.tables[group.name]) for group in groups}
        return {name: count for name, count in missing.items() if count > 0}

    def _take(self, request: Request, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            ids = self.pools[name].allocate(count)
            if ids is None:
                raise RuntimeError(f"group {name!r}: expected {count} free blocks, got {self.pools[name].num_free}")
            request.tables[name].extend(ids)

    def _final_length(self, request: Request) -> int:
        """Most tokens the request can ever have."""
        return min(len(request.prompt_ids) + request.params.max_tokens, self.max_model_len)

    def _last_cover(self, request: Request) -> int:
        """Most tokens that ever need room in a cache: all but a final one of the output, which nothing reads."""
        return max(self._final_length(request) - 1, len(request.prompt_ids))

    def _cap(self, request: Request, tokens: int) -> int:
        return min(tokens, self._last_cover(request))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _blocks_held(self, group: KVGroup, uncomputed: int, tokens: int) -> int:
        """Most blocks that a request of `tokens` tokens holds in a group while it prefills its last `uncomputed`.

        Never grows as the prefill proceeds, so that what is reserved at admission lasts.
        """
        if group.sliding_window is None:
            return self._blocks(tokens)
        # In view of a chunk's queries, and one token more, as it may decode next; at the worst alignment to blocks.
        seen = group.sliding_window + min(self.chunk_size, uncomputed)
        return min((seen - 2) // self.block_size + 2, self._blocks(tokens))

    def _dead_blocks(self, request: Request, group: KVGroup) -> int:
        """Leading blocks that hold nothing a later query sees."""
        return max(request.num_computed - group.sliding_window + 1, 0) // self.block_size
