"""`Engine`: continuous batching over a hybrid model, with chunked prefill and speculative decoding."""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional

import torch

from .detokenizer import Detokenizer
from .drafter import Drafter, NoDraft, PromptLookup
from .engine_config import EngineConfig
from .graphs.engram import HostPrefetch
from .graphs.measure import measure_back_ends
from .graphs.packing import pack_parameters
from .graphs.prefill import PrefillStep, prefill
from .graphs.step import SAME_TOKEN, DecodeStep, Flight
from .memory import STATE_KINDS, MemoryConfig, ModelMemory
from .model_state import DefaultModelState, ReplayModelState
from .models import HybridModel
from .progress import shown
from .request import Request, SamplingParams
from .request_state import RequestState
from .scheduler import KVGroup, Plan, Scheduler
from .startup_cache import cache_file, reused
from .stats import CompileCounts, Stats
from .warmup import warm_up_kernels, warm_up_prefill

if TYPE_CHECKING:
    from .parallel import Agreed, StepAgreement


@dataclass
class RequestOutput:
    """What a step did for one request. `text` and `token_ids` are all of the output so far."""

    id: str
    token_ids: list[int]
    text: str
    new_text: str
    finish_reason: Optional[str]
    prompt_logprobs: Optional[list[Optional[float]]] = None  # if asked for: by prompt token, None for the first


@dataclass
class _Launched:
    """A decode step under way, with the plan that it carries out. begin: when it was launched."""

    plan: Plan
    flight: Flight
    begin: float


class Engine:
    """Runs requests on a `HybridModel`: they join and leave between steps, each step decoding all that are ready.

        engine = Engine(model, tokenizer, EngineConfig(num_spec=3))
        for output in engine.generate(["def main("], SamplingParams(max_tokens=64)):
            print(output.text)

    `tokenizer` is a `tokenizers.Tokenizer`; without one, prompts are token ids and text is empty. `drafter` proposes
    drafts when `num_spec` > 0; prompt lookup by default. Greedy text and sampled text alike do not depend on what else
    runs, on chunking, on preemption or on drafts: sampling draws from (seed, position) alone.

    agreement: for one of several ranks, each an engine with requests of its own, over the same model. All call `step`
    for as long as `has_work`, which then is until no rank has any, or `generate`, with prompts or without.
    """

    @torch.inference_mode(False)  # its buffers are written later on, perhaps outside of the caller's inference mode
    def __init__(self, model: HybridModel, tokenizer=None, config: EngineConfig = EngineConfig(),
                 drafter: Optional[Drafter] = None, agreement: Optional["StepAgreement"] = None):
        context = model.config.max_position
        length = context if config.max_model_len is None else config.max_model_len
        if length > context:
            raise ValueError(f"max_model_len is {length}, expected at most the model's context of {context}")
        self.config = replace(config, max_model_len=length)
        self.model, self.tokenizer, self.agreement = model, tokenizer, agreement
        tokens = 1 + config.num_spec
        kinds = [kind for kind in ("full", "swa") if kind in model.config.pattern]
        per_request = -(-length // config.block_size)
        blocks = config.num_blocks or 1 + config.max_num_seqs * per_request
        windows = {"full": None, "swa": model.config.sliding_window}
        groups = [KVGroup(kind, blocks, windows[kind]) for kind in kinds]
        state_block_size = config.state_block_size or config.block_size
        num_snapshots = self._num_snapshots(model, config)
        self.scheduler = Scheduler(
            groups, max_num_seqs=config.max_num_seqs, max_model_len=length, block_size=config.block_size,
            prefill_budget=config.prefill_budget, chunk_size=config.chunk_size, prefill_rows=config.prefill_rows,
            num_spec=config.num_spec, drafter=drafter or (PromptLookup() if config.num_spec else NoDraft()),
            prefix_cache=config.prefix_cache, num_snapshots=num_snapshots, state_block_size=state_block_size)
        self.memory = ModelMemory(model, MemoryConfig(
            config.max_num_seqs, tokens, config.block_size, dict.fromkeys(kinds, blocks), config.window,
            config.ring_len, config.replay, num_snapshots or 0, state_block_size, length, config.state_dtype,
            config.dtype, config.ring_dtype), model.embedding.weight.device)
        requests = RequestState(self.memory, length)
        tail_windows = model.config.decoder_replay_windows
        if config.prefix_cache or tail_windows:
            self.state = ReplayModelState(self.memory, requests, groups, tail_windows, config.exact_decoder_replay)
        else:
            self.state = DefaultModelState(self.memory, requests)
        cuda = self.memory.device.type == "cuda"
        # decode steps write no buffer of the model
        packed = pack_parameters(model, call=lambda: None) if config.compiled and cuda else None
        self.steps = [DecodeStep(model, self.state, rows, width, config.compiled, packed, guarded=not cuda)
                      for rows, width in self._step_sizes(tokens, cuda)]
        self.decode = self.steps[-1]
        self.compile_counts = CompileCounts()
        self.prefill_step = self._make_prefill_step(packed)
        self.runs_ahead = (cuda if config.run_ahead is None else config.run_ahead) and not (
            config.num_spec or agreement is not None or isinstance(requests.history, HostPrefetch))
        self._launched: Optional[_Launched] = None  # ahead of its turn
        self._failure: Optional[Exception] = None  # of a step launched ahead, for the next call to raise
        self._landed = 0.0  # when the last decode step's results came
        self.stats = Stats(self.memory, self.scheduler.prefix)
        self._live: dict[str, tuple[Request, Detokenizer, Optional[Callable]]] = {}
        self._placed: dict[int, Request] = {}  # by index, as the model state knows them
        self._ids = itertools.count()

    def _make_prefill_step(self, packed) -> Optional[PrefillStep]:
        """None where prefill runs eagerly, as it always does with ranks and with n-gram rows that the host fetches."""
        config, wanted = self.config, self.config.compiled_prefill
        if wanted is None:
            wanted = config.compiled and self.memory.device.type == "cuda"
        if not wanted or self.agreement is not None or isinstance(self.state.requests.history, HostPrefetch):
            return None
        return PrefillStep(self.model, self.state, min(config.prefill_rows, config.max_num_seqs), self._longest_chunk,
                           packed, self.compile_counts.watch)

    @property
    def _longest_chunk(self) -> int:
        return min(self.config.chunk_size, self.config.prefill_budget, self.config.max_model_len - 1)

    def _step_sizes(self, tokens: int, cuda: bool) -> list[tuple[int, int]]:
        """Rows and tokens of the decode steps, from the smallest to the largest."""
        most = self.config.max_num_seqs
        rows = self.config.decode_sizes or ([size for size in (1, 4, 16, 64, 256) if size < most] if cuda else [])
        widths = {1, tokens} if cuda else {tokens}
        return [(size, width) for width in sorted(widths) for size in sorted({*rows, most})]

    @staticmethod
    def _num_snapshots(model: HybridModel, config: EngineConfig) -> Optional[int]:
        """Snapshots to keep; None without a prefix cache or state-space layers."""
        if not config.prefix_cache or not any(kind in STATE_KINDS for kind in model.config.pattern):
            return None
        if not config.replay:
            raise ValueError("prefix_cache is True, expected False with replay=False: only the ring context makes "
                             "snapshots of state-space layers")
        window = model.config.sliding_window if "swa" in model.config.pattern else 0
        # while it decodes, a request keeps those of its last window and one more
        each = 4 + window // (config.state_block_size or config.block_size)
        return config.num_snapshots or each * config.max_num_seqs

    @property
    def has_work(self) -> bool:
        if self._failure is not None:
            return True
        return self.scheduler.has_work or (self.agreement is not None and not self.agreement.done)

    def warm_up(self, sampling: bool = True, greedy: bool = True, quiet: bool = False) -> float:
        """Chooses back ends, runs kernels once and compiles the steps; no state changes. Returns the seconds.

        Steps whose requests are all greedy run a graph of their own; leave out the route that will not be used. What
        is not compiled here (prefill, while requests are running) compiles when it is first needed. quiet: no progress
        bar.
        """
        begin = time.perf_counter()
        if self._launched is not None:
            self._launched.flight.result()  # before its place is taken
        measure_back_ends(self.steps)
        warm_up_kernels(self.state, [(step.rows, step.tokens) for step in self.steps], quiet)
        # on a GPU the first call runs in the graphs' memory pool, the second records, the third replays
        repeats = 3 if self.config.compiled and self.memory.device.type == "cuda" else 1
        steps = [(step, route) for step in self.steps for route in ["greedy"] * greedy + ["sampled"] * sampling]
        with self._startup_cache():
            if not self.scheduler.running:
                warm_up_prefill(self.model, self.state, self._longest_chunk, self.prefill_step)
            for step, route in shown(steps, "compiling decode steps", quiet or len(steps) <= 2):
                for _ in range(repeats):
                    with self.compile_counts.watch((step.rows, step.tokens, route)):
                        step([], route)
        return time.perf_counter() - begin

    def _startup_cache(self):
        if not (self.config.compiled and self.config.startup_cache):
            return contextlib.nullcontext()
        return reused(cache_file(self.memory.device, self.model.config, self.config, self.model.embedding.weight.dtype))

    def add_request(self, prompt, params: SamplingParams = SamplingParams(), request_id: Optional[str] = None,
                    on_output: Optional[Callable[[RequestOutput], None]] = None, cache_salt: str = "") -> str:
        """Queues a prompt (text or token ids) and returns the request's id.

        on_output is called after each step that made tokens for the request; it may abort requests. If it raises, the
        request ends with finish_reason "error", the others go on, and `step` raises the exception once they are all
        dealt with. Only requests of the same cache_salt take prefixes over from one another.

        Raises:
            ValueError: empty prompt, ids outside the vocabulary, a prompt that leaves no room for a token, an id in
                use. TypeError: text without a tokenizer.
        """
        ids = self._encode(prompt)
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        if request_id in self._live:
            raise ValueError(f"request_id is {request_id!r}, expected one that is not in use")
        request = Request(request_id, ids, params, cache_salt=cache_salt)
        self.scheduler.add(request)
        self._live[request_id] = (request, Detokenizer(self.tokenizer, params.stop), on_output)
        return request_id

    def abort(self, request_id: str) -> bool:
        """Ends a request with finish_reason "abort"; False if there is none of that id."""
        self._forget(request_id)
        return self.scheduler.abort(request_id)

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.stats.forget(request_id)

    def step(self) -> list[RequestOutput]:
        """One scheduling step: chunks of prompts, then one token or more for every request that decodes.

        If the model fails, every request of the step is put back to be computed anew from its tokens, the others keep
        all they have, and the exception is raised again; `step` may be called again. Outputs that were there before
        come first, and the next call raises. Where ranks agree on steps, the others are told and stop with a
        RankFailure, and there is no further step on any.
        """
        outputs: list[RequestOutput] = []
        failures: list[Exception] = []
        with self._reporting():
            if self._failure is not None:
                error, self._failure = self._failure, None
                raise error
            try:
                self._step(outputs, failures)
            except Exception as error:
                if not outputs or self.agreement is not None:
                    raise
                self._failure = error  # what came before it is handed out first
        if failures:
            raise failures[0]
        return outputs

    @contextlib.contextmanager
    def _reporting(self):
        """An exception in the body is told to the other ranks, which wait for this one's next message."""
        try:
            yield
        except Exception as error:
            if self.agreement is not None:
                self.agreement.report(error)
            raise

    def _step(self, outputs, failures) -> None:
        launched, self._launched = self._launched, None
        if launched is None:
            plan = self.scheduler.schedule()
            try:
                self._place(plan)
                agreed = self._agree(plan) if self.agreement is not None else None
                if plan.prefills:
                    self._prefill(plan, agreed, outputs, failures)
                elif agreed is not None and agreed.prefills and self.state.joins_prefills:
                    prefill(self.model, self.state, [], [], agreed)
                self._drop_finished(plan)
                launched = self._launch(plan) if plan.decodes else None
            except BaseException:
                self.scheduler.recover(plan)
                raise
        if launched is None:
            return
        if self._may_run_ahead(launched.plan):
            try:
                self._run_ahead(launched.plan)
            except Exception as error:  # that step is given up; what is under way still counts
                self._failure = error
        try:
            self._land(launched, outputs, failures)
        except BaseException:
            self._launched = None
            self.scheduler.recover(launched.plan)
            raise
        if self._launched is not None and all(request.finished for request in self._launched.plan.decodes):
            self._launched = None  # nobody waits for it

    def _may_run_ahead(self, plan: Plan) -> bool:
        """Whether the step after `plan` is a decode step whatever `plan` gives, but for requests that end early."""
        return self.runs_ahead and not self.scheduler.waiting and all(
            request.is_decoding and request.num_tokens + 1 < self._longest(request)
            for request in self.scheduler.running)

    def _longest(self, request: Request) -> int:
        """Tokens at which the request ends."""
        return min(len(request.prompt_ids) + request.params.max_tokens, self.config.max_model_len)

    def _run_ahead(self, before: Plan) -> None:
        """Schedules and launches the next step while `before` is under way."""
        for request in before.decodes:
            self.scheduler.expect(request)
        plan = self.scheduler.schedule()
        try:
            self._place(plan)
            self._launched = self._launch(plan)
        except BaseException:
            self.scheduler.recover(plan)
            raise

    def _agree(self, plan: Plan) -> "Agreed":
        rows = [(chunk.request.index, chunk.length, True) for chunk in plan.prefills]
        kept = self.state.kept_counts(rows)
        trims = kept != [length for _, length, _ in rows]
        return self.agreement.agree(bool(plan.requests), bool(rows), trims, sum(kept))

    def generate(self, prompts: Sequence, params: SamplingParams = SamplingParams()) -> list[RequestOutput]:
        """Runs prompts to their end and returns their final outputs in order."""
        final: dict[str, RequestOutput] = {}
        if self.agreement is not None:
            self.agreement.open()
        with self._reporting():
            ids = [self.add_request(prompt, params) for prompt in prompts]
        while self.has_work:
            final.update((output.id, output) for output in self.step())
        return [final[request_id] for request_id in ids]

    def _encode(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("prompt is str, expected token ids: the engine has no tokenizer")
            ids = self.tokenizer.encode(prompt).ids
        else:
            ids = [int(token) for token in prompt]
        size = self.model.config.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise ValueError(f"prompt holds token {token}, expected ids in [0, {size})")
        return ids

    def _place(self, plan: Plan) -> None:
        """Tells the model state which request is at which index now, and what the step reads of them."""
        for index, request in list(self._placed.items()):
            if request.index != index:
                self.state.remove_request(index)
                del self._placed[index]
        for request in plan.admitted:
            self.state.add_request(request)
            self._placed[request.index] = request
        self.state.update_requests(plan.requests, plan.admitted)

    def _prefill(self, plan: Plan, agreed: Optional["Agreed"], outputs, failures) -> None:
        begin = time.perf_counter()
        tokens = [chunk.request.tokens for chunk in plan.prefills]
        chunks = [(chunk.request.index, ids[chunk.start : chunk.start + chunk.length])
                  for chunk, ids in zip(plan.prefills, tokens)]
        following = [chunk.request.prompt_ids[chunk.start + 1 : chunk.start + 1 + chunk.length]
                     if chunk.request.params.prompt_logprobs else [] for chunk in plan.prefills]
        before = [ids[: chunk.start] for chunk, ids in zip(plan.prefills, tokens)]
        if self.prefill_step is not None:
            samples, logprobs = self.prefill_step(chunks, following, before)
        else:
            samples, logprobs = prefill(self.model, self.state, chunks, following, agreed, before)
        names = [chunk.request.id for chunk in plan.prefills]
        self.stats.record_prefill(names, sum(len(ids) for _, ids in chunks), time.perf_counter() - begin)
        for chunk, token, values in zip(plan.prefills, samples, logprobs, strict=True):
            chunk.request.prompt_logprobs += values
            self.scheduler.advance(chunk.request, chunk.length)
            self._commit(chunk.request, [token] if chunk.last else [], outputs, failures)

    def _launch(self, plan: Plan) -> _Launched:
        """Starts the decode rows of a plan, in the smallest step that holds them."""
        begin = time.perf_counter()
        plan.drafts = [self._known(draft) for draft in plan.drafts]
        rows = [(request.index, [SAME_TOKEN if request.pending else request.output_ids[-1], *drafts])
                for request, drafts in zip(plan.decodes, plan.drafts, strict=True)]
        route = "sampled" if any(request.params.temperature for request in plan.decodes) else "greedy"
        longest = max(len(tokens) for _, tokens in rows)
        step = next(step for step in self.steps if step.rows >= len(rows) and step.tokens >= longest)
        with self.compile_counts.watch((step.rows, step.tokens, route)):
            return _Launched(plan, step.launch(rows, route), begin)

    def _land(self, launched: _Launched, outputs, failures) -> None:
        """Waits for a decode step and hands its tokens out. Requests may have ended since it was launched, or have been
        put back to wait: those lose their place, not their token."""
        plan, result = launched.plan, launched.flight.result()
        now = time.perf_counter()
        seconds, self._landed = now - max(launched.begin, self._landed), now
        live = [row for row, request in enumerate(plan.decodes) if not request.finished]
        self.stats.record_decode([plan.decodes[row].id for row in live], [len(plan.drafts[row]) for row in live],
                                 [result.accepted[row] for row in live], seconds)
        for row in live:
            request, accepted = plan.decodes[row], result.accepted[row]
            if request.index >= 0:
                self.scheduler.advance(request, accepted, plan.drafts[row][: accepted - 1])
            request.decode_steps += 1
            request.drafted += len(plan.drafts[row])
            request.accepted += accepted - 1
            self.stats.decode_tokens += self._commit(request, result.samples[row][:accepted], outputs, failures)
            self.stats.flushes += result.flushed[row]

    @staticmethod
    def _drop_finished(plan: Plan) -> None:
        """Callbacks may abort requests that were still to decode in this step."""
        kept = [(r, draft) for r, draft in zip(plan.decodes, plan.drafts, strict=True) if not r.finished]
        plan.decodes, plan.drafts = [r for r, _ in kept], [draft for _, draft in kept]

    def _known(self, draft: list[int]) -> list[int]:
        """A drafter may be anybody's: a token outside the vocabulary ends its draft."""
        size = self.model.config.vocab_size
        return list(itertools.takewhile(lambda token: 0 <= token < size, draft))

    def _commit(self, request: Request, tokens: list[int], outputs, failures) -> int:
        """Appends a step's tokens up to the first that ends the request; returns how many were kept."""
        if not tokens or request.finished:
            return 0
        _, text, on_output = self._live[request.id]
        params, before = request.params, len(request.output_ids)
        reason = None
        for token in tokens:
            request.output_ids.append(token)
            ends = token == self.model.config.eos_token_id and not params.ignore_eos
            if ends or text.append(token):
                reason = "stop"
            elif len(request.output_ids) >= params.max_tokens or request.num_tokens >= self.config.max_model_len:
                reason = "length"
            if reason:
                break
        new_text = text.flush() if reason else text.take()
        logprobs = [None, *request.prompt_logprobs] if params.prompt_logprobs else None
        output = RequestOutput(request.id, list(request.output_ids), text.text, new_text, reason, logprobs)
        if on_output is not None:
            try:
                on_output(output)
            except Exception as error:
                output.finish_reason = reason = "error"
                failures.append(error)
        if request.finished:  # aborted by its own callback
            output.finish_reason = request.finish_reason
        elif reason:
            self.scheduler.finish(request, reason)
            self._forget(request.id)
        outputs.append(output)
        return len(request.output_ids) - before
