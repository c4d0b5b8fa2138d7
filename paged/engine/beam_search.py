"""Beam search: approximately the most likely continuations of a prompt.

Each live beam is a request in the scheduler that takes its most likely token and reports the top candidates.
Once all beams of a prompt have theirs, the best candidates overall become the next beams. A beam's first
child continues the beam's request with the newest token replaced, whose KV is not computed yet. The other
children are forked from it and share its blocks; the last block is copied on write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ..base.errors import QueueFullError, RequestError
from ..options.other_calls import BeamSearchParams
from ..options.sampling_params import MAX_LOGPROBS, SamplingParams
from ..requests.request import FinishReason, Prompt, Request, RequestStatus
from ..scheduler.scheduler import Scheduler
from ..text.tokenizer import Tokenizer
from .core import EngineCore
from .forks import new_fork
from .generation import Progress, call_with_error_prefix, progress_bar
from .request_factory import RequestFactory
from .request_spec import RequestSpec

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A continuation that a beam search found.

    tokens: the prompt and the generated tokens, including a final EOS.
    cum_logprob: sum of the log-probabilities of the generated tokens.
    score: cum_logprob with the length penalty.
    text: the text of all tokens.
    finish_reason: "stop" (EOS) or "length".
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The continuations of a prompt, best score first; if there are none, `error` gives the reason."""

    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    error: str | None = None


class Candidate(NamedTuple):
    """A beam extended by one token."""

    beam: Beam
    token_id: int
    cum_logprob: float


@dataclass(slots=True, eq=False)
class Beam:
    """An unfinished continuation.

    request: the request that computes the beam's next token.
    children: its most likely extensions, once the next token is computed.
    """

    request: Request
    cum_logprob: float = 0.0
    num_tokens: int = field(init=False)
    children: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.request.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the beam's tokens so far, without the token that `request` drew by itself."""
        return self.request.token_ids[: self.num_tokens]

    def collect(self) -> bool:
        """Read the candidates from the request. Return whether there are new candidates."""
        if self.children or self.request.num_tokens == self.num_tokens:
            return False
        # The request's own token comes first.
        ids, logprobs, _ = self.request.sampling.logprobs.pop()
        likeliest = zip(ids[1:], logprobs[1:], strict=True)
        self.children = [Candidate(self, token_id, self.cum_logprob + lp) for token_id, lp in likeliest]
        return True


class BeamGroup:
    """The beam search for one prompt: live beams, finished beams, and the rule for stopping."""

    def __init__(self, params: BeamSearchParams, root: Request, eos_token_ids: frozenset[int]) -> None:
        self.params = params
        self.eos_token_ids = eos_token_ids
        self.num_prompt_tokens = root.num_prompt_tokens
        self.max_tokens = root.inputs.max_total_tokens - root.num_prompt_tokens
        self.prompt_token_ids = root.inputs.prompt_token_ids
        self.beams = [Beam(root)]
        self.ended: list[BeamSearchSequence] = []  # by score, at most beam_width; texts are added at the end
        self.error: str | None = None

    def choose(self) -> list[Candidate]:
        """Choose the next beams among the children of all live beams. Return none if the search is over.

        As in transformers, a candidate may end with EOS only if it is among the best beam_width. The best
        candidates that do not end become the next beams.
        """
        params = self.params
        width = self.params.beam_width
        length = self.beams[0].num_tokens + 1 - self.num_prompt_tokens
        candidates = [child for beam in self.beams for child in beam.children]
        candidates.sort(key=lambda child: -child.cum_logprob)
        at_end = length == self.max_tokens
        ends = [at_end or child.token_id in self.eos_token_ids for child in candidates]
        for child, end in zip(candidates[:width], ends, strict=False):
            if end:
                self._end(child, child.cum_logprob / length**params.length_penalty)
        best = [child for child, end in zip(candidates, ends, strict=True) if not end][:width]
        if not best or (len(self.ended) == width and self._is_good_enough(best[0], length)):
            return []
        return best

    def _end(self, child: Candidate, score: float) -> None:
        reason: FinishReason = "stop" if child.token_id in self.eos_token_ids else "length"
        tokens = [*child.beam.token_ids, child.token_id]
        self.ended.append(BeamSearchSequence(tokens, child.cum_logprob, score, "", reason))
        self.ended.sort(key=lambda sequence: -sequence.score)
        del self.ended[self.params.beam_width :]

    def _is_good_enough(self, best: Candidate, length: int) -> bool:
        """Return whether to stop, given that beam_width sequences have ended."""
        params = self.params
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.max_tokens
        attainable: float = best.cum_logprob / length**params.length_penalty
        return attainable <= self.ended[-1].score

    def output(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """Return the continuations that were found."""
        if self.error is not None:
            return BeamSearchOutput(self.prompt_token_ids, [], self.error)
        sequences = self.ended
        if tokenizer is not None:
            sequences = [replace(sequence, text=tokenizer.decode(sequence.tokens)) for sequence in sequences]
        return BeamSearchOutput(self.prompt_token_ids, sequences)


class BeamSearch:
    """The beam searches for several prompts. Other requests may run at the same time.

    As many searches run at once as have room for all their beams within max_num_seqs.
    """

    def __init__(self, factory: RequestFactory, scheduler: Scheduler, params: BeamSearchParams) -> None:
        self.factory = factory
        self.scheduler = scheduler
        self.params = params
        self.eos_token_ids = frozenset[int]() if params.ignore_eos else factory.eos_token_ids
        self.groups: list[BeamGroup] = []
        self._unstarted: deque[BeamGroup] = deque()
        self._active: list[BeamGroup] = []
        self._pending: deque[Request] = deque()  # beams that the queue had no room for
        # Candidates per beam: even if all EOS tokens are among them, beam_width others are left.
        self._num_children = max(2, 1 + len(self.eos_token_ids)) * params.beam_width
        self._most_active = factory.max_num_seqs // params.beam_width
        self._check()

    def _check(self) -> None:
        width = self.params.beam_width
        most = self.factory.max_num_seqs
        if width > most:
            raise RequestError(f"beam_width {width} cannot run at once; max_num_seqs is {most}")
        most = min(MAX_LOGPROBS, self.factory.model_config.vocab_size)
        if self._num_children > most:
            raise RequestError(
                f"beam_width {width} looks at {self._num_children} tokens in each place; at most {most} can "
                f"be looked at: lower it to {most * width // self._num_children}"
            )

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        priority: float,
        tenant: str,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Add the search for one more prompt. Raises RequestError if the prompt is wrong."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.params.max_tokens,
            ignore_eos=True,  # EOS ends a beam, not the request: other children continue it
            logprobs=self._num_children,
            detokenize=False,
            priority=priority,
            num_speculative_tokens=0,  # each token is chosen among those of other beams
        )
        spec = RequestSpec(prompt, params, tenant=tenant, lora_request=lora_request)
        root = self.factory.new_group(request_id, spec, self.scheduler.clock()).samples[0]
        root.is_beam = True
        self.groups.append(BeamGroup(self.params, root, self.eos_token_ids))
        self._unstarted.append(self.groups[-1])

    def run(self, step: Callable[[], object]) -> Iterator[BeamGroup]:
        """Run steps until all searches are over. Yield each search as soon as it is over."""
        while self._active or self._unstarted:
            while self._unstarted and len(self._active) < self._most_active:
                group = self._unstarted.popleft()
                self._active.append(group)
                self._pending.append(group.beams[0].request)
            self._queue_pending()
            step()
            over = [group for group in self._active if self._advance(group)]
            self._active = [group for group in self._active if group not in over]
            yield from over

    def abort(self) -> None:
        """End the unfinished searches and free their blocks."""
        for group in self._active:
            self._abort(beam.request for beam in group.beams)
        self._active.clear()
        self._unstarted.clear()
        self._pending.clear()

    def _advance(self, group: BeamGroup) -> bool:
        """Replace the beams once all have children. Return whether the search is over."""
        advanced = [beam.request for beam in group.beams if beam.collect()]
        waited_for = [beam.request for beam in group.beams if not beam.children]
        failed = [request for request in waited_for if request.finish_reason is not None]
        if failed:
            group.error = str(failed[0].stop_reason or failed[0].finish_reason)
            self._abort(beam.request for beam in group.beams)
            return True
        if waited_for:
            # Some beams were preempted. The others would run on with tokens that may not be chosen. They end
            # to make room, and their children start anew from what the prefix cache still has.
            manager = self.scheduler.block_manager
            for request in advanced:
                manager.register(request.blocks, request.token_ids, request.num_computed_tokens)
            self._abort(advanced)
            return False
        group.beams = self._next_beams(group)
        return not group.beams

    def _next_beams(self, group: BeamGroup) -> list[Beam]:
        chosen = group.choose()
        # Beams without chosen children end first, which frees places and blocks for the forks.
        parents = {child.beam for child in chosen}
        self._abort(beam.request for beam in group.beams if beam not in parents)
        beams = []
        for child in chosen:
            request = child.beam.request
            if child.beam in parents and request.status is RequestStatus.RUNNING:
                self.scheduler.replace_last_token(request, child.token_id)
            else:
                request = self._fork(request, child.token_id)
            parents.discard(child.beam)
            beams.append(Beam(request, child.cum_logprob))
        return beams

    def _fork(self, parent: Request, token_id: int) -> Request:
        """Fork a request with another newest token. The fork runs and shares blocks, or waits."""
        now = self.scheduler.clock()
        child = new_fork(self.factory, parent.request_id, parent, None, now).samples[0]
        child.is_beam = True
        child.token_ids[-1] = token_id
        try:
            if parent.status is RequestStatus.RUNNING:
                self.scheduler.fork(parent, child)
                return child
        except QueueFullError:
            pass
        self._pending.append(child)
        return child

    def _queue_pending(self) -> None:
        while self._pending:
            try:
                self.scheduler.add(self._pending[0])
            except QueueFullError:
                return
            self._pending.popleft()

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.arrival < 0:
                self._pending.remove(request)
            elif request.status is not RequestStatus.FINISHED:
                self.scheduler.abort(request)


def search_beams(
    core: EngineCore,
    prompts: list[Prompt],
    params: BeamSearchParams,
    lora_request: LoRARequest | None,
    priority: float,
    tenant: str,
    *,
    use_tqdm: Progress,
) -> list[BeamSearchOutput]:
    """Search the continuations of all prompts at once; see `LLMEngine.beam_search`."""
    search = BeamSearch(core.factory, core.scheduler, params)
    for i, prompt in enumerate(prompts):
        terms = (core.next_id(), prompt, priority, tenant, lora_request)
        call_with_error_prefix(f"prompts[{i}]", search.add, *terms)
    try:
        with progress_bar(use_tqdm, len(prompts), "Searching", "prompt") as bar:
            for _ in search.run(core.step):
                bar.update()
    finally:
        search.abort()
    return [group.output(core.factory.tokenizer) for group in search.groups]
