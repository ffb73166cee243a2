"""`Engine`: continuous batching over a hybrid model, with chunked prefill and speculative decoding."""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional, Union

import torch

from ..graphs.packing import pack_parameters
from ..models import HybridModel
from ..models.memory import STATE_KINDS, MemoryConfig, ModelMemory
from ..progress import shown
from ..states.model_state import DefaultModelState, ReplayModelState
from ..states.request_state import RequestState
from ..states.token_history import HostPrefetch
from ..states.warmup import warm_up_kernels
from .config import EngineConfig
from .decode_step import NO_TOKEN, SAME_TOKEN, DecodeStep, Flight
from .drafter import Drafter, NoDraft, PromptLookup
from .measure import measure_back_ends
from .output import RequestOutput, Stream
from .prefill_step import PrefillStep, prefill, warm_up_prefill
from .request import Request, SamplingParams, check_token_ids
from .scheduler import Plan, Scheduler
from .startup_cache import cache_file, reused
from .stats import CompileCounts, Stats

if TYPE_CHECKING:
    from .parallel import Agreed, StepAgreement


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
    runs, on chunking, on preemption or on drafts: sampling draws from (seed, position) alone. A prefix hit under a
    sliding window is an approximation, though, so that text depends on the hit; a request that is preempted takes the
    same hit again, or none if that is gone by then.

    Weights may be changed in place between steps (`parameter.copy_`, `load_state_dict`): steps derive all they need
    from the parameters each time. Call `reset_prefix_cache` then, for what was computed before is of the old weights.

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
        state_block_size = config.state_block_size or config.block_size
        num_snapshots = self._num_snapshots(model, config)
        self.memory = ModelMemory(model, MemoryConfig(
            config.max_num_seqs, tokens, config.block_size, dict.fromkeys(kinds, blocks), config.window,
            config.ring_len, config.replay, num_snapshots or 0, state_block_size, length, config.state_dtype,
            config.dtype, config.ring_dtype, config.stochastic_rounding), model.embedding.weight.device)
        self.scheduler = Scheduler(
            self.memory.groups, max_num_seqs=config.max_num_seqs, max_model_len=length, block_size=config.block_size,
            prefill_budget=config.prefill_budget, chunk_size=config.chunk_size, prefill_rows=config.prefill_rows,
            num_spec=config.num_spec, drafter=drafter or (PromptLookup() if config.num_spec else NoDraft()),
            prefix_cache=config.prefix_cache, num_snapshots=num_snapshots, state_block_size=state_block_size)
        requests = RequestState(self.memory, length)
        tail_windows = model.config.decoder_replay_windows
        if config.prefix_cache or tail_windows:
            self.state = ReplayModelState(self.memory, requests, None, tail_windows, config.exact_decoder_replay)
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
        self._failure: Optional[Exception] = None  # of a step, for the next call to raise
        self._callback_errors: list[Exception] = []
        self._outputs: list[tuple[Stream, RequestOutput]] = []  # for `step` to hand out
        self._torn = False  # something was interrupted, or is under way
        self._landed = 0.0  # when the last decode step's results came
        self.stats = Stats(self.memory, self.scheduler.prefix)
        self._live: dict[str, Stream] = {}
        self._placed: dict[int, tuple[Request, int]] = {}  # by index, as the model state knows them, and the admission
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
        return min(self.config.chunk_size, self.config.prefill_budget, self.config.max_model_len)

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
        if self._failure is not None or self._outputs:
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

        A request whose logits turn NaN or infinite ends with finish_reason "error" and leaves nothing for others.

        on_output is called with each output of the request but that of an abort; it may abort requests. If it raises,
        the request ends with finish_reason "error", the others go on, and `step` raises the exception once they are all
        dealt with; the next call hands the outputs out. Only requests of the same cache_salt take prefixes over from
        one another.

        Raises:
            ValueError: empty prompt, ids outside the vocabulary, a prompt that leaves no room for a token, an id in
                use, a salt that is no UTF-8, stop texts without a tokenizer. TypeError: text without a tokenizer, a
                prompt that is neither text nor token ids, a callback that cannot be called.
        """
        stream = self._checked(prompt, params, request_id, on_output, cache_salt)
        self._queue([stream])
        return stream.request.id

    def _checked(self, prompt, params, request_id=None, on_output=None, cache_salt="") -> Stream:
        """A request that can be queued."""
        ids = self._encode(prompt)
        if request_id is None:
            request_id = next(name for name in map("request-{}".format, self._ids) if name not in self._live)
        if request_id in self._live:
            raise ValueError(f"request_id is {request_id!r}, expected one that is not in use")
        if on_output is not None and not callable(on_output):
            raise TypeError(f"on_output is {on_output!r}, expected something that can be called")
        request = Request(request_id, ids, params, cache_salt=cache_salt)
        if request.params.stop and self.tokenizer is None:
            raise ValueError(f"stop is {request.params.stop!r}, expected none: the engine has no tokenizer")
        for token in request.params.stop_token_ids:
            if token >= self.model.config.vocab_size:
                raise ValueError(f"stop_token_ids holds {token}, expected ids in [0, {self.model.config.vocab_size})")
        self.scheduler.check(request)
        return Stream(request, self.tokenizer, on_output)

    def _queue(self, streams: list[Stream]) -> None:
        """All of them or, if interrupted, none."""
        try:
            for stream in streams:
                self._live[stream.request.id] = stream
                self.scheduler.add(stream.request)
        except BaseException:
            self._withdraw(streams)
            raise

    def _withdraw(self, streams: list[Stream]) -> None:
        """Ends requests of which nobody knows any more, without outputs."""
        for stream in streams:
            if self._live.get(stream.request.id) is stream:
                self._finish(stream.request, "abort")
        gone = set(streams)
        self._outputs = [pair for pair in self._outputs if pair[0] not in gone]

    def reset_prefix_cache(self) -> None:
        """Forgets all prefixes, as is right once the model's weights have changed: no later request takes over what was
        computed before. Requests that are running go on from their present memory, and publish nothing more. Waits for
        nothing; without a prefix cache there is nothing to do. Ranks call it each for themselves.
        """
        self.scheduler.reset_prefix_cache()

    def abort(self, request_id: str) -> bool:
        """Ends a request; False if there is none of that id. The next outputs have its tokens and text so far, with
        finish_reason "abort"."""
        stream = self._live.get(request_id)
        if stream is None:
            return False
        torn, self._torn = self._torn, True
        stream.end("abort", self._outputs)
        self._finish(stream.request, "abort")
        self._torn = torn
        return True

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        self._forget(request.id)

    def _forget(self, request_id: str) -> None:
        self.stats.forget(request_id)
        self._live.pop(request_id, None)  # last: as long as it is there, an interrupted end is made up for

    def step(self) -> list[RequestOutput]:
        """One scheduling step: chunks of prompts, then one token or more for every request that decodes.

        If anything fails or interrupts it, every request of the step is put back to be computed anew from its tokens,
        the others keep all they have, and the exception is raised again; `step` may be called again. Outputs that were
        there before an error come first, and the next call raises; after an interrupt the next call hands them out.
        Where ranks agree on steps, the others are told and stop with a RankFailure, and there is no further step on
        any.
        """
        self._run()
        try:
            return [output for _, output in self._outputs]
        finally:
            self._outputs = []

    def _run(self) -> None:
        """A step that hands nothing out yet."""
        with self._reporting():
            if self._failure is not None:
                error, self._failure = self._failure, None
                raise error
            try:
                if self._torn:
                    self._recover()
                if self.scheduler.has_work or (self.agreement is not None and not self.agreement.done):
                    self._torn = True
                    self._step()
                    self._torn = False
            except BaseException as error:
                self._recover()
                if not (isinstance(error, Exception) and self._outputs and self.agreement is None):
                    raise
                self._failure = error
        if self._callback_errors:
            errors, self._callback_errors = self._callback_errors, []
            raise errors[0]

    def _recover(self) -> None:
        """After a step, or an abort, that was interrupted: all objects are as if it had not begun, but for outputs that
        were made. May be called again where it was interrupted itself."""
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device)  # copies that nobody waits for any more read pinned memory
        self._launched = None
        self.state.abandon_step()
        for stream, output in self._outputs:
            stream.settle(output)
            if output.finish_reason is not None and not stream.request.finished:
                stream.request.finish_reason = output.finish_reason  # what that means, the scheduler sees to
        self.scheduler.recover()
        for stream in list(self._live.values()):
            if stream.request.finished:
                self._forget(stream.request.id)
            else:
                stream.rewind()
        self._torn = False

    @contextlib.contextmanager
    def _reporting(self):
        """An exception in the body, or an interrupt, is told to the other ranks, which wait for this one's message."""
        try:
            yield
        except BaseException as error:
            if self.agreement is not None:
                self.agreement.report(error)
            raise

    def _step(self) -> None:
        launched, self._launched = self._launched, None
        if launched is None:
            plan = self.scheduler.schedule()
            self._place(plan)
            agreed = self._agree(plan) if self.agreement is not None else None
            if plan.prefills:
                self._prefill(plan, agreed)
            elif agreed is not None and agreed.prefills and self.state.joins_prefills:
                prefill(self.model, self.state, [], [], agreed)
            self._drop_finished(plan)
            if not plan.decodes:
                return
            launched = self._launch(plan)
        if self._may_run_ahead(launched.plan):
            try:
                self._run_ahead(launched.plan)
            except Exception as error:  # that step is given up; what is under way still counts
                self.scheduler.recover()
                self._failure = error
        self._land(launched)
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
        self._place(plan)
        self._launched = self._launch(plan)

    def _agree(self, plan: Plan) -> "Agreed":
        rows = [(chunk.request.index, chunk.length, True) for chunk in plan.prefills]
        kept = self.state.kept_counts(rows)
        trims = kept != [length for _, length, _ in rows]
        return self.agreement.agree(bool(plan.requests), bool(rows), trims, sum(kept))

    def generate(self, prompts: Union[str, Sequence], params: Union[SamplingParams, Sequence[SamplingParams]] =
                 SamplingParams()) -> list[RequestOutput]:
        """Runs prompts, of which a str is one, to their end and returns their final outputs in order.

        params: for all of them, or one for each. If a prompt is refused or a step fails, none of them remains. Outputs
        of other requests are kept for `step`.

        Raises what `add_request` and `step` raise; ValueError for another number of params than of prompts.
        """
        if self.agreement is not None:
            self.agreement.open()
        with self._reporting():
            prompts = [prompts] if isinstance(prompts, str) else list(prompts)
            each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
            if len(each) != len(prompts):
                raise ValueError(f"params: expected {len(prompts)} SamplingParams, one a prompt, got {len(each)}")
            streams = [self._checked(prompt, own) for prompt, own in zip(prompts, each)]
        mine = set(streams)
        try:
            self._queue(streams)
            while not all(stream.request.finished for stream in streams) or (
                    self.agreement is not None and not self.agreement.done):
                self._run()
                self._merge_outputs(mine)
            final = dict(self._outputs)
            return [final[stream] for stream in streams]
        finally:
            self._withdraw(streams)

    def _merge_outputs(self, mine: set[Stream]) -> None:
        """Keeps one output of each request, and none of unfinished ones in `mine`."""
        kept: dict[Stream, RequestOutput] = {}
        for stream, output in self._outputs:
            if stream in kept:
                output = replace(output, new_text=kept[stream].new_text + output.new_text)
            if stream not in mine or output.finish_reason is not None:
                kept[stream] = output
        self._outputs = list(kept.items())

    def _encode(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("prompt is str, expected token ids: the engine has no tokenizer")
            ids = self.tokenizer.encode(prompt).ids
        else:
            ids = check_token_ids("prompt", prompt)
        size = self.model.config.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise ValueError(f"prompt holds token {token}, expected ids in [0, {size})")
        return ids

    def _place(self, plan: Plan) -> None:
        """Tells the model state which request is at which index now, and what the step reads of them."""
        for index, (request, admission) in list(self._placed.items()):
            if (request.index, request.admission) != (index, admission):
                self.state.remove_request(index)
                del self._placed[index]
        for request in plan.requests:
            if request.index not in self._placed:
                self.state.add_request(request)
                self._placed[request.index] = request, request.admission
        self.state.update_requests(plan.requests)

    def _prefill(self, plan: Plan, agreed: Optional["Agreed"]) -> None:
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
            if token == NO_TOKEN:
                self._commit(chunk.request, [token])
                continue
            self.scheduler.advance(chunk.request, chunk.length)
            if chunk.last:
                self._commit(chunk.request, [token] if chunk.request.params.max_tokens else [])

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

    def _land(self, launched: _Launched) -> None:
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
            tokens = result.samples[row][:accepted]
            if request.index >= 0 and tokens[-1] != NO_TOKEN:
                self.scheduler.advance(request, accepted, plan.drafts[row][: accepted - 1])
            request.decode_steps += 1
            kept = self._commit(request, tokens)
            drafts, arrived = len(plan.drafts[row]), max(0, min(accepted - 1, kept))
            request.drafted, request.accepted = request.drafted + drafts, request.accepted + arrived
            self.stats.record_tokens(kept, drafts, arrived)
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

    def _commit(self, request: Request, tokens: list[int]) -> int:
        """Appends a step's tokens up to the first that ends the request, as NO_TOKEN does; returns how many were kept.

        A step that gave NO_TOKEN must not be made known to the scheduler before: it would publish what came of it.
        """
        if request.finished:  # by another's callback
            return 0
        stream, before, error = self._live[request.id], len(request.output_ids), None
        if tokens and tokens[-1] == NO_TOKEN:
            tokens = tokens[:-1]
            place = len(request.prompt_ids) + before + len(tokens)
            error = f"the logits for token {place} hold NaN or +Inf, or are all -Inf"
        output = stream.commit(tokens, self.model.config.eos_token_ids, self._longest(request),
                               self._outputs, error)
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)
        if stream.on_output is not None:
            try:
                stream.on_output(output)
            except Exception as error:
                self._callback_errors.append(error)
                output.finish_reason, output.error = "error", f"on_output raised {type(error).__name__}: {error}"
                output.token_ids = list(output.token_ids)
                if not request.finished:
                    self._finish(request, "error")
        return len(request.output_ids) - before
