"""Structured outputs: compile grammars over tokens, and mask the logits of tokens that they do not allow.

The grammars are llguidance's. It rejects JSON schema keywords that it does not implement, where xgrammar, the
alternative, ignores some of them; it is small, has no dependencies, reads Lark and GBNF, and limits the cost
of a grammar. Its "date" allows 29 February in any year. Its numbers are float64, so that `json_grammar`
writes those of JSON schemas itself. Its share of a step: `python -m benchmarks.structured_outputs`.

Where the grammar is complete, the request's stop tokens (EOS, stop_token_ids) become possible; where nothing
can follow, they are the only possible ones. A request without stop tokens (ignore_eos, or a model without
EOS) then finishes with "stop". max_tokens and stop strings may end an output before.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.errors import CheckpointError, RequestError
from ..grammars.forced_text import ForcedText
from ..grammars.grammar_jobs import CompiledGrammar, MaskJob, wait_for
from ..grammars.grammar_text import check_grammar, library_limits
from ..grammars.json_grammar import JsonGrammar
from ..grammars.library_grammar import library_grammar
from ..kernels.arguments import WORD_BITS
from ..options.sampling_params import StructuredOutputsParams
from ..options.structural_tag import NAME, exact_json, grammars_of
from ..scheduler.schedule import RowError, StepOutput
from ..text.tokenizer import Tokenizer
from .seats import Sampled

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

Answer = TypeVar("Answer")
MAX_CACHED = 64  # compiled grammars
MAX_CACHED_CHARACTERS = 2**20  # of their texts together; a compiled text takes up to 1,000 times its size
COMPILE_TIMEOUT_S = 10.0
ASKED_S = 0.001  # how long a step waits for a mask before it asks a grammar about guessed tokens
MAX_EXAMINED = 256  # parts of a refused structural tag in which the error is looked for
# The library follows chains of rules by recursion, where a stack overflow would end the process. All rules
# that fit MAX_CHARACTERS need less than this; stack that is not touched takes no memory.
COMPILE_STACK_BYTES = 512 * 2**20
# The library asks once for all tokens of such a text whether they are allowed, and walks through the others.
# A string of JSON that may have n more characters allows the tokens of up to n.
_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = (r"[\x20\x0A\x0D\x09]+", *(f"{_STRING}{{1,{n}}}" for n in (*range(1, 16), 30)), f"{_STRING}+")
_EXCERPT = re.compile(r"^ *(\d+ \|.*|\^) *$", re.MULTILINE)


class Grammars:
    """Compiles grammars for one model, and caches the most recently used ones. Thread-safe.

    vocab_size: the number of logits. A token is allowed only if it has a logit and the tokenizer knows it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, params: StructuredOutputsParams) -> GrammarState:
        """Compile a grammar, or find it in the cache. Return its state before the first token.

        Raises RequestError if the grammar is wrong or cannot be compiled within bounds, or if the library or
        the tokenizer is missing.
        """
        kind = params.kind
        value = getattr(params, params.kind)
        text = value if isinstance(value, str) else json.dumps(value)
        if self._tokenizer is None:
            raise RequestError(
                f"structured_outputs {kind} needs the tokenizer, which skip_tokenizer_init=True left out",
                param="structured_outputs",
            )
        check_grammar(kind, text)
        with self._lock:
            vocabulary = self._vocabulary = self._vocabulary or _Vocabulary(
                self._tokenizer, self._vocab_size, self._eos_token_ids
            )
            grammar = self._compiled.get((kind, text))
            if grammar is not None:
                self._compiled.move_to_end((kind, text))
                return GrammarState(grammar, vocabulary)

        def compile_it() -> CompiledGrammar:
            matcher = _compile(kind, text, vocabulary)
            return CompiledGrammar(matcher, vocabulary.allowed(matcher))

        # Outside the lock, so that threads which need another grammar do not wait.
        grammar = _in_thread(kind, compile_it)
        with self._lock:
            self._keep((kind, text), grammar)
            return GrammarState(grammar, vocabulary)

    def _keep(self, key: tuple[str, str], grammar: CompiledGrammar) -> None:
        self._compiled[key] = grammar
        num_characters = sum(len(text) for _, text in self._compiled)
        while len(self._compiled) > MAX_CACHED or num_characters > MAX_CACHED_CHARACTERS:
            (_, text), _ = self._compiled.popitem(last=False)
            num_characters -= len(text)


class _Vocabulary:
    """The tokens as bytes. At least one token ends an output."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        try:
            from llguidance import LLTokenizer
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs the package llguidance: pip install 'paged[structured]'",
                param="structured_outputs",
            ) from error
        try:
            num_tokens = len(tokenizer.hf)
        except CheckpointError as error:
            raise RequestError(
                f"structured_outputs needs the tokenizer in this process: {error}", param="structured_outputs"
            ) from error
        ends = [i for i in sorted(eos_token_ids) if i < num_tokens]
        if not ends:  # The library needs one. Any special token will do: it is masked.
            special = (tokenizer.hf.eos_token_id, *tokenizer.hf.all_special_ids)
            ends = [i for i in special if i is not None][:1]
        if not ends:
            raise RequestError(
                "structured_outputs needs a tokenizer with at least one special token",
                param="structured_outputs",
            )
        try:
            library = from_tokenizer(tokenizer.hf, max(num_tokens, vocab_size), ends, slices=[])
            forced = ForcedText(library, tokenizer.hf.backend_tokenizer, ends)
            self.tokens = LLTokenizer(forced, eos_token=ends, slices=[*SLICES])
        except (ValueError, TypeError) as error:
            raise RequestError(
                f"structured_outputs cannot read this checkpoint's tokenizer: {error}",
                param="structured_outputs",
            ) from error
        self.ends = frozenset(ends)
        added = tokenizer.hf.added_tokens_decoder
        self.special = {str(added[i]): i for i in added if self.tokens.is_special_token(i)}
        self.num_words = -(-self.tokens.vocab_size // WORD_BITS)
        # i32[num_words]: the bits of tokens that have a logit
        self.in_logits = _bits(range(vocab_size), self.num_words)
        self.not_ends = ~_bits(ends, self.num_words)  # i32[num_words]: the bits of all tokens but `ends`

    def allowed(self, matcher: Any) -> NDArray[np.int32]:
        """Return the bits of tokens that may follow, i32[num_words]."""
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)  # it may end with a word of padding
        return words[: self.num_words] & self.in_logits


class _NamedPartError(RequestError):
    """An error of a part that has a name of its own, which says where in the request it is."""


def _compile(kind: str, text: str, vocabulary: _Vocabulary) -> Any:
    """Compile a grammar, within the library's limits on time and memory. Return a matcher at its start."""
    return _matcher(kind, text if kind in ("regex", "grammar") else exact_json(text), vocabulary)


def _matcher(kind: str, value: Any, vocabulary: _Vocabulary) -> Any:
    """Compile a constraint. Raises RequestError with the path of the wrong part, or ValueError.

    value: as `library_grammar` takes it.
    """
    try:
        return _matcher_of(library_grammar(kind, value, vocabulary.special), vocabulary, kind == "grammar")
    except (RequestError, ValueError):
        if kind == NAME:
            _check_parts(value["format"], vocabulary)
        if kind == "json":
            _check_leaves(value, vocabulary)
        raise


def _matcher_of(grammar: str, vocabulary: _Vocabulary, with_excerpt: bool = False) -> Any:
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=library_limits(grammar))
    # Compute the first mask here too, as it may be slow.
    possible = not matcher.is_error() and vocabulary.allowed(matcher).any()
    if matcher.is_error() or not possible:
        error = _error(matcher, with_excerpt=with_excerpt)
        nothing = not error or error.startswith("NoExtension")
        raise ValueError("nothing in this model's vocabulary matches it" if nothing else error)
    return matcher


def _check_parts(tag: Mapping[str, Any], vocabulary: _Vocabulary) -> None:
    """Raise RequestError for a part of a refused tag that is refused also by itself, and name the part."""
    for path, part in itertools.islice(grammars_of(tag), MAX_EXAMINED):
        kind = {"json_schema": "json", "regex": "regex"}.get(part["type"], "grammar")
        value = part[{"json": "json_schema", "regex": "pattern"}.get(kind, "grammar")]
        try:
            _matcher(kind, value, vocabulary)
        except (RequestError, ValueError) as error:
            inside = f"{error.param}" if isinstance(error, RequestError) and error.param else ""
            # The message of an error begins with its path.
            message = f"{path.removeprefix(NAME + '.')}{f'.{error}' if inside else f': {error}'}"
            kind_of_error = _NamedPartError if part.get("name") else RequestError
            raise kind_of_error(message, param=f"{path}.{inside}" if inside else path) from error


def _check_leaves(schema: Any, vocabulary: _Vocabulary) -> None:
    """Raise RequestError for a part of a refused schema that is refused also by itself, and name the part."""
    from llguidance import LLMatcher

    for leaf, place in itertools.islice(JsonGrammar(schema).leaves.items(), MAX_EXAMINED):
        try:
            _matcher_of(LLMatcher.grammar_from_json_schema(leaf), vocabulary)
        except ValueError as error:
            raise place.error(str(error)) from error


def _error(matcher: Any, *, with_excerpt: bool = True) -> str:
    """Return the library's error. Its excerpt may show a grammar that the request did not write."""
    text: str = matcher.get_error().replace("<non-verbose/>", "")
    if text.startswith("panic"):
        return f"it is too large or too deep for the grammar library ({text.splitlines()[0]})"
    return _one_line(text if with_excerpt else _EXCERPT.sub("", text))


def _one_line(message: str) -> str:
    return " ".join(message.split())[:500]


def _in_thread(kind: str, compile_it: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    """Run a compilation in a thread with a deep stack, and wait COMPILE_TIMEOUT_S for it at most.

    One that takes longer cannot be stopped: it continues in its thread until the library's limits end it.
    """
    result: Future[CompiledGrammar] = Future()

    def run() -> None:
        try:
            result.set_result(compile_it())
        except BaseException as error:  # a Rust panic is not an Exception
            result.set_exception(error)

    _start_thread(run)
    try:
        return result.result(COMPILE_TIMEOUT_S)
    except TimeoutError as error:
        raise RequestError(
            f"structured_outputs {kind} was not compiled within {COMPILE_TIMEOUT_S:g} s; make it smaller",
            param="structured_outputs",
        ) from error
    except BaseException as error:  # of the library; a Rust panic is not an Exception
        if result.done():
            if isinstance(error, _NamedPartError):
                raise RequestError(_one_line(str(error)), param=error.param) from error
            param = error.param if isinstance(error, RequestError) else None
            if param is not None and not param.startswith(kind):
                param = f"{kind}.{param}"
            raise RequestError(
                f"structured_outputs {kind} is refused: {_one_line(str(error))}",
                param=f"structured_outputs.{param}" if param else "structured_outputs",
            ) from error
        raise  # an interrupt of the caller


_stack_size_lock = threading.Lock()


def _start_thread(run: Callable[[], None]) -> None:
    with _stack_size_lock:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            threading.Thread(target=run, name="paged-compile-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)


class GrammarState:
    """The position of an output in its grammar: a matcher that has consumed num_taken tokens.

    The state consumes new tokens when it is asked, so preemption and failed steps do not affect it. While a
    worker computes the next mask, nothing else uses the matcher.

    grammar: the compiled grammar, which all of its outputs share.
    job, row: the job that computes the mask after num_taken tokens, and the row of that mask. job is None if
        the next mask is the first mask of the grammar.
    """

    __slots__ = ("_matcher", "grammar", "job", "num_taken", "row", "vocabulary")

    def __init__(self, grammar: CompiledGrammar, vocabulary: _Vocabulary) -> None:
        self.grammar = grammar
        self.vocabulary = vocabulary
        self.num_taken = 0
        self._matcher = grammar.matcher.deep_copy()
        self.job: MaskJob | None = None
        self.row = 0

    @property
    def matcher(self) -> Any:
        """The matcher. Waits until no worker uses it."""
        if (job := self.pending) is not None:
            wait((job.done,))
        return self._matcher

    @property
    def pending(self) -> MaskJob | None:
        """The job that computes the next mask; None if the mask is finished or not begun."""
        return None if self.job is None or self.job.done.done() else self.job

    def copy(self) -> GrammarState:
        """Return an independent copy. If a worker uses the matcher, the copy starts from the beginning."""
        copy = GrammarState(self.grammar, self.vocabulary)
        if self.pending is None:
            copy._matcher = self._matcher.deep_copy()
            copy.num_taken = self.num_taken
        return copy

    def missing(self, request: Sampled) -> list[int]:
        """Return the tokens that the matcher has not consumed yet, and count them as consumed."""
        start = request.num_prompt_tokens + self.num_taken
        self.num_taken = request.num_output_tokens
        self.job = None
        return request.token_ids[start:]

    def follow(self, request: Sampled) -> bool:
        """Consume the rest of the output. Return whether the grammar allows the output."""
        if self.num_taken == request.num_output_tokens:
            return True
        matcher = self.matcher
        return bool(matcher.consume_tokens(self.missing(request)))

    def has_mask(self, request: Sampled) -> bool:
        """Return whether the request's next mask is computed or being computed."""
        return self.num_taken == request.num_output_tokens and (self.job is not None or not self.num_taken)

    def begin(self, job: MaskJob, row: int) -> None:
        """Assign the next mask to a row of a job, whose worker will compute it."""
        self.job = job
        self.row = row

    def mask(self) -> NDArray[np.int32]:
        """Wait for the next mask. Return it, i32[num_words]. Raises the error of the library."""
        return self.grammar.first if self.job is None else self.job.mask(self.row)

    def possible(self, stop_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that may come next, given the stop tokens that end an output."""
        vocabulary = self.vocabulary
        row = vocabulary.allowed(self.matcher) & vocabulary.not_ends
        if self.matcher.is_accepting():
            row |= _bits(stop_ids, vocabulary.num_words)
        flags = np.unpackbits(row.view(np.uint8), bitorder="little")
        return frozenset(np.flatnonzero(flags).tolist())

    def is_complete(self, request: Sampled) -> bool:
        """Return whether the output is complete and nothing can follow it.

        Return False if the library fails; `GrammarMasks` will report its error with the next mask.
        """
        try:
            return self._is_complete(request)
        except BaseException:  # a Rust panic is not an Exception; a step holds interrupts back
            return False

    def _is_complete(self, request: Sampled) -> bool:
        if not self.follow(request) or not self.matcher.is_accepting():
            return False
        vocabulary = self.vocabulary
        # A mask that a worker has made says it at once.
        row = self.mask() if self.has_mask(request) else vocabulary.allowed(self.matcher)
        return not (row & vocabulary.not_ends).any()

    def num_allowed(self, request: Sampled, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow the output; 0 if the library is slow or fails.

        Tokens that end an output do not count, since nothing may follow them.
        """
        ends = self.vocabulary.ends | request.stop_ids
        num = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return self._ask(request, lambda matcher: int(matcher.validate_tokens([*tokens[:num]])), 0)

    def forced(self, request: Sampled) -> list[int]:
        """Return the next tokens that the grammar forces; none if the library is slow or fails."""
        return self._ask(request, lambda matcher: [*matcher.compute_ff_tokens()], [])

    def _ask(self, request: Sampled, question: Callable[[Any], Answer], otherwise: Answer) -> Answer:
        """Ask a copy of the matcher about the end of the output; `otherwise` where that would delay a step.

        A copy, as whatever a guess does to a matcher must not reach the request's own.
        """
        if self.grammar.is_slow or not self.has_mask(request):
            return otherwise
        if (job := self.pending) is not None and wait((job.done,), ASKED_S).not_done:
            return otherwise
        try:
            return question(self._matcher.deep_copy())
        except BaseException:  # a Rust panic is not an Exception; a step holds interrupts back
            return otherwise


def begin_masks(requests: Iterable[Sampled]) -> None:
    """Have workers compute the next masks of requests with a grammar, unless they already do.

    The masks of one grammar are computed in one job; each mask of a slow grammar has a job of its own.
    """
    groups: dict[Any, list[tuple[GrammarState, Sampled]]] = {}
    for request in requests:
        state: GrammarState | None = request.sampling.grammar  # type: ignore[assignment]
        if state is not None and not state.has_mask(request):
            groups.setdefault(state if state.grammar.is_slow else state.grammar, []).append((state, request))
    for group in groups.values():
        first = group[0][0]
        advances = [(state.matcher, state.missing(request)) for state, request in group]
        job = MaskJob(first.grammar, advances, first.vocabulary.in_logits)
        for row, (state, _) in enumerate(group):
            state.begin(job, row)


def pending_mask(request: Sampled) -> MaskJob | None:
    """Return the job that computes the request's next mask; None if the mask is finished or not begun."""
    state: GrammarState = request.sampling.grammar  # type: ignore[assignment]
    return state.pending


class GrammarMasks:
    """The masks of a step: for each row with a grammar, the tokens that it allows.

    Workers compute the masks during the forward pass. Make this object before the forward pass, and call
    `apply` or `choose` after it; they wait at most SLOW_S. `check` reports errors. Rows whose masks were late
    are sampled in a later step.
    """

    def __init__(self, rows: list[int], requests: list[Sampled]) -> None:
        self.rows = rows
        self.errors = dict[int, RowError]()
        self._requests = requests
        self._states: list[GrammarState] = [request.sampling.grammar for request in requests]  # type: ignore[misc]
        # i32[len(rows), num_words], once they are gathered: bit b of word w is token 32 w + b
        self._bits: NDArray[np.int32] | None = None
        self._late: list[int] = []  # indices of `rows`
        begin_masks(requests)

    def apply(
        self,
        kernels: Kernels,
        logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    ) -> None:
        """Set the logits of tokens that are not allowed to -inf. NaN stays NaN, for the sampler to report."""
        kernels.mask_logits(logits, *self._on(logits.device))

    def choose(
        self, kernels: Kernels, logits: Tensor, best: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return each row's most likely allowed token and its logit; None if the logits must be masked first.

        best: the result of `Kernels.greedy`: each row's most likely token and its logit.
        """
        if kernels.greedy_of_allowed is None:
            return None
        tokens, highest = (numbers.clone() for numbers in best)
        kernels.greedy_of_allowed(logits, *self._on(logits.device), tokens, highest)
        return tokens, highest

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows and the bits on a device."""
        bits = torch.from_numpy(self.wait())
        return torch.tensor(self.rows).to(device, non_blocking=True), bits.to(device, non_blocking=True)

    def check(self, output: StepOutput) -> None:
        """Replace the tokens of failed rows by errors. Remove the tokens of rows with late masks."""
        bits = self.wait()
        for row in (self.rows[i] for i in self._late):
            if row not in output.errors:
                output.tokens[row] = None
                output.runs[row] = []
                output.logprobs.pop(row, None)
        for i, row in enumerate(self.rows):
            token = output.tokens[row]
            if token is not None and not bits[i, token // WORD_BITS] >> (token % WORD_BITS) & 1:
                message = f"token {token} is not in the language of structured_outputs"
                self.errors.setdefault(row, RowError(message, "engine"))
            if row in self.errors:
                output.tokens[row] = None
                output.logprobs.pop(row, None)
        output.errors |= self.errors

    def wait(self) -> NDArray[np.int32]:
        """Wait for the workers, at most SLOW_S. Return all masks as bits."""
        if self._bits is None:
            jobs = {state.job for state in self._states}
            if pending := [job for job in jobs if job is not None and not job.done.done()]:
                wait_for(pending)
            (job, *others) = jobs
            whole = None if others or job is None else self._whole(job)
            self._bits = self._gathered() if whole is None else whole
        return self._bits

    def _whole(self, job: MaskJob) -> NDArray[np.int32] | None:
        """Return the masks of a job as they are; None if any row takes more than that."""
        if not job.is_clean or [state.row for state in self._states] != [*range(len(job.bits))]:
            return None
        ends = self._states[0].vocabulary.ends
        return None if any(_has_own_ends(request, ends) for request in self._requests) else job.bits

    def _gathered(self) -> NDArray[np.int32]:
        """Return the masks with the requests' end tokens in place of the library's, and note errors.

        All tokens are allowed in rows that are late or have an error, as their tokens are discarded.
        """
        vocabulary = self._states[0].vocabulary
        bits = np.empty((len(self.rows), vocabulary.num_words), np.int32)
        of_jobs: dict[MaskJob, tuple[list[int], list[int]]] = {}  # which rows of `bits` are which of a job
        for i, state in enumerate(self._states):
            job = state.job
            if job is None:
                bits[i] = state.grammar.first
            elif not job.done.done():
                self._late.append(i)
            elif job.has_failed:
                self._take(state, i, bits)
            else:
                own, of_job = of_jobs.setdefault(job, ([], []))
                own.append(i)
                of_job.append(state.row)
        for job, (own, of_job) in of_jobs.items():
            bits[own] = job.bits[of_job]
        for row, request, state in zip(bits, self._requests, self._states, strict=True):
            if _has_own_ends(request, vocabulary.ends):
                _set_ends(row, request, state)
        bits[self._late] = -1
        for i in np.flatnonzero(~bits.any(1)).tolist():
            self.errors.setdefault(self.rows[i], _dead_end(self._requests[i]))
        bits[[i for i, row in enumerate(self.rows) if row in self.errors]] = -1
        return bits

    def _take(self, state: GrammarState, i: int, bits: NDArray[np.int32]) -> None:
        """Copy a mask of a job in which some failed, or note the error."""
        bits[i] = 0
        try:
            bits[i] = state.mask()
        except BaseException as error:  # a Rust panic is not an Exception
            self.errors[self.rows[i]] = _of_language(f": {_one_line(str(error))}")
            return
        if state.matcher.is_error():
            self.errors[self.rows[i]] = _of_language(f": {_error(state.matcher)}")


def _has_own_ends(request: Sampled, ends: frozenset[int]) -> bool:
    """Return whether other tokens than the vocabulary's may end the request's output, or not yet."""
    return request.stop_ids != ends or request.inputs.params.min_tokens > 0


def _set_ends(row: NDArray[np.int32], request: Sampled, state: GrammarState) -> None:
    if state.pending is not None:
        return  # the row is late
    ends = _bits(request.stop_ids, len(row)) & state.vocabulary.in_logits
    row &= state.vocabulary.not_ends
    if request.num_output_tokens < request.inputs.params.min_tokens:
        row &= ~ends
    elif state.matcher.is_accepting():
        row |= ends


def _of_language(message: str) -> RowError:
    """Return the error of a language that was found too large, or has no next token."""
    return RowError(f"structured_outputs{message}", "request")


def _dead_end(request: Sampled) -> RowError:
    num = request.num_output_tokens
    least = request.inputs.params.min_tokens
    if num < least:
        return _of_language(f" allows nothing more after {num} tokens, and min_tokens is {least}")
    return _of_language(f" allows no token of the vocabulary after {num} tokens")


def _bits(token_ids: Any, num_words: int) -> NDArray[np.int32]:
    """Return i32[num_words] with the bits of these tokens set."""
    flags = np.zeros(num_words * WORD_BITS, np.uint8)
    flags[[*token_ids]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
