"""Structured outputs: compile grammars over tokens, and mask the logits of tokens that they do not allow.

The grammars are llguidance's. It rejects JSON schema keywords that it does not implement, where xgrammar, the
alternative, ignores some of them (`python -m benchmarks.grammar_libraries`); it is small, has no
dependencies, reads Lark and GBNF, and limits the cost of a grammar. Its "date" allows 29 February in any
year. Its numbers are float64, so that `json_grammar` writes those of JSON schemas itself. Its share of a
step: `python -m benchmarks.structured_outputs`.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import CheckpointError, RequestError
from ..requests.request import Request
from ..sampling_params import StructuredOutputsParams
from ..scheduler.schedule import StepOutput
from ..structural_tag import NAME, exact_json, grammars_of
from ..text.tokenizer import Tokenizer
from .forced_text import ForcedText
from .grammar_limits import check_grammar, library_limits
from .json_grammar import JsonGrammar
from .json_schema import SchemaPath
from .library_grammar import library_grammar

MAX_CACHED = 64  # compiled grammars
MAX_CACHED_CHARACTERS = 2**20  # of their texts together; a compiled text takes up to 1,000 times its size
COMPILE_TIMEOUT_S = 10.0
MAX_EXAMINED = 256  # parts of a refused structural tag in which the error is looked for
# The library follows chains of rules by recursion, where a stack overflow would end the process. All rules
# that fit MAX_CHARACTERS need less than this; stack that is not touched takes no memory.
COMPILE_STACK_BYTES = 512 * 2**20
WORD_BITS = 32
_EXCERPT = re.compile(r"^ *(\d+ \|.*|\^) *$", re.MULTILINE)


class Grammars:
    """Compiles grammars for one model, and caches the most recently used ones. Thread-safe.

    vocab_size: of the logits. Only tokens that both the logits and the tokenizer have are ever allowed.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, params: StructuredOutputsParams) -> GrammarState:
        """Return the state before the first token of an output.

        Raises RequestError if the grammar is wrong or cannot be compiled within bounds, or if the library or
        the tokenizer is missing.
        """
        kind, value = params.kind, getattr(params, params.kind)
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
            matcher = self._compiled.get((kind, text))
            if matcher is not None:
                self._compiled.move_to_end((kind, text))
                return GrammarState(matcher.deep_copy(), vocabulary)
        # Outside the lock, so that threads which need another grammar do not wait.
        matcher = _in_thread(kind, lambda: _compile(kind, text, vocabulary))
        with self._lock:
            self._keep((kind, text), matcher)
            return GrammarState(matcher.deep_copy(), vocabulary)

    def _keep(self, key: tuple[str, str], matcher: Any) -> None:
        self._compiled[key] = matcher
        num_characters = sum(len(text) for _, text in self._compiled)
        while len(self._compiled) > MAX_CACHED or num_characters > MAX_CACHED_CHARACTERS:
            (_, text), _ = self._compiled.popitem(last=False)
            num_characters -= len(text)


class _Vocabulary:
    """The tokens as bytes, of which at least one ends an output."""

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
            library = from_tokenizer(tokenizer.hf, max(num_tokens, vocab_size), ends)
            forced = ForcedText(library, tokenizer.hf.backend_tokenizer, ends)
            self.tokens = LLTokenizer(forced, eos_token=ends)
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

    for path, leaf in itertools.islice(JsonGrammar(schema).leaves.items(), MAX_EXAMINED):
        try:
            _matcher_of(LLMatcher.grammar_from_json_schema(leaf), vocabulary)
        except ValueError as error:
            raise SchemaPath(path).error(str(error)) from error


def _error(matcher: Any, *, with_excerpt: bool = True) -> str:
    """Return the library's error. Its excerpt may show a grammar that the request did not write."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    return _one_line(text if with_excerpt else _EXCERPT.sub("", text))


def _one_line(message: str) -> str:
    return " ".join(message.split())[:500]


def _in_thread(kind: str, compile_it: Callable[[], Any]) -> Any:
    """Run a compilation in a thread with a deep stack, and wait COMPILE_TIMEOUT_S for it at most.

    One that takes longer cannot be stopped: it continues in its thread until the library's limits end it.
    """
    result: Future[Any] = Future()

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
    except BaseException as error:
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
    """The position of one output in its grammar: a matcher that has consumed num_taken of its tokens.

    It catches up with the request's tokens when asked, so preemption and failed steps do not affect it.
    """

    __slots__ = ("matcher", "num_taken", "vocabulary")

    def __init__(self, matcher: Any, vocabulary: _Vocabulary, num_taken: int = 0) -> None:
        self.matcher, self.vocabulary, self.num_taken = matcher, vocabulary, num_taken

    def copy(self) -> GrammarState:
        """Return an independent state at the same position."""
        return GrammarState(self.matcher.deep_copy(), self.vocabulary, self.num_taken)

    def missing(self, request: Request) -> list[int]:
        """Return the tokens that the matcher has not consumed yet, and count them as consumed."""
        start, self.num_taken = request.num_prompt_tokens + self.num_taken, request.num_output_tokens
        return request.token_ids[start:]

    def follow(self, request: Request) -> bool:
        """Consume all of the output. Return whether the grammar allows it."""
        tokens = self.missing(request)
        return not tokens or bool(self.matcher.consume_tokens(tokens))

    def possible(self, stop_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that may come next, if these stop tokens end an output."""
        vocabulary = self.vocabulary
        row = vocabulary.allowed(self.matcher) & vocabulary.not_ends
        if self.matcher.is_accepting():
            row |= _bits(stop_ids, vocabulary.num_words)
        flags = np.unpackbits(row.view(np.uint8), bitorder="little")
        return frozenset(np.flatnonzero(flags).tolist())

    def is_complete(self, request: Request) -> bool:
        """Return whether the output is complete and nothing can follow it."""
        if not self.follow(request) or not self.matcher.is_accepting():
            return False
        return not (self.vocabulary.allowed(self.matcher) & self.vocabulary.not_ends).any()


class GrammarMasks:
    """Masks of the tokens that grammars allow in the rows of one step.

    A worker thread computes them: `start` comes before the forward, and `apply`, which waits for the worker,
    after it. `check` reports errors.
    """

    def __init__(self, rows: list[int], requests: list[Request]) -> None:
        self.rows, self.errors = rows, dict[int, str]()
        self._requests = requests
        self._states: list[GrammarState] = [request.sampling.grammar for request in requests]  # type: ignore[misc]
        vocabulary = self._states[0].vocabulary
        # i32[len(rows), num_words]: bit b of word w is token 32 w + b
        self._bits = np.zeros((len(rows), vocabulary.num_words), np.int32)
        self._filled = False
        self._job: Future[None] = _worker().submit(self._fill, *self._advances())

    @classmethod
    def start(cls, requests: Sequence[Request]) -> GrammarMasks | None:
        """Start the masks of the requests that have a grammar; None if there are none."""
        rows = [row for row, request in enumerate(requests) if request.sampling.grammar is not None]
        return cls(rows, [requests[row] for row in rows]) if rows else None

    def apply(
        self,
        logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    ) -> None:
        """Set the logits of tokens that are not allowed to -inf. NaN stays NaN, as the sampler reports it."""
        device = logits.device
        bits = torch.from_numpy(self.wait().view(np.uint8)).to(device, non_blocking=True)
        # [len(rows), bytes, 8] -> [len(rows), vocab_size]; a table of bytes is far faster than shifts.
        bias = torch.nn.functional.embedding(bits.int(), _byte_table(device, logits.dtype))
        bias = bias.flatten(1)[:, : logits.shape[1]]
        # Add rather than fill, to keep NaN.
        logits.index_add_(0, torch.tensor(self.rows).to(device, non_blocking=True), bias)

    def check(self, output: StepOutput) -> None:
        """Replace the tokens of failed rows by errors."""
        bits = self.wait()
        for i, row in enumerate(self.rows):
            token = output.tokens[row]
            if token is not None and not bits[i, token // WORD_BITS] >> (token % WORD_BITS) & 1:
                self.errors.setdefault(row, f"token {token} is not in the language of structured_outputs")
            if row in self.errors:
                output.tokens[row] = None
                output.logprobs.pop(row, None)
        output.errors |= self.errors

    def wait(self) -> NDArray[np.int32]:
        """Wait for the worker. Return the bits."""
        self._job.result()
        if not self._filled:
            self._filled = True
            self._finish()
        return self._bits

    def _advances(self) -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
        """Return the worker's input: tokens to consume and rows to fill, in calls that release the GIL."""
        single = []
        for request, state in zip(self._requests, self._states, strict=True):
            tokens = state.missing(request)
            if len(tokens) == 1:
                single.append((state.matcher, tokens[0]))
            elif tokens:  # several at once, as after a fork
                state.matcher.consume_tokens(tokens)
        return single, [(state.matcher, i) for i, state in enumerate(self._states)]

    def _fill(self, single: list[tuple[Any, int]], matchers: list[tuple[Any, int]]) -> None:
        executor, bits = _executor(), self._bits
        if single:
            executor.consume_token_par(single)
        executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * bits.itemsize, len(bits))

    def _finish(self) -> None:
        """Replace the library's end tokens by the requests', and note errors."""
        for i, (request, state) in enumerate(zip(self._requests, self._states, strict=True)):
            if request.stop_ids != state.vocabulary.ends or request.inputs.params.min_tokens:
                self._set_ends(i, request, state)
        self._bits &= self._states[0].vocabulary.in_logits
        empty = {*np.flatnonzero(~self._bits.any(1)).tolist()}
        for i, (row, request, state) in enumerate(zip(self.rows, self._requests, self._states, strict=True)):
            if state.matcher.is_error():
                self.errors[row] = f"structured_outputs: {_error(state.matcher)}"
            elif i in empty:
                self.errors[row] = _dead_end(request)
        broken = [i for i, row in enumerate(self.rows) if row in self.errors]
        self._bits[broken] = -1  # their tokens are discarded

    def _set_ends(self, i: int, request: Request, state: GrammarState) -> None:
        row, ends = self._bits[i], _bits(request.stop_ids, self._bits.shape[1])
        row &= state.vocabulary.not_ends
        if request.num_output_tokens < request.inputs.params.min_tokens:
            row &= ~ends
        elif state.matcher.is_accepting():
            row |= ends


def _dead_end(request: Request) -> str:
    num, least = request.num_output_tokens, request.inputs.params.min_tokens
    if num < least:
        return f"structured_outputs allows nothing more after {num} tokens, and min_tokens is {least}"
    return f"structured_outputs allows no token of the vocabulary after {num} tokens"


def _bits(token_ids: Any, num_words: int) -> NDArray[np.int32]:
    """Return i32[num_words] with the bits of these tokens set."""
    flags = np.zeros(num_words * WORD_BITS, np.uint8)
    flags[[*token_ids]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


@lru_cache(maxsize=4)
def _byte_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return [256, 8]: for each byte, 0 where a bit is set and -inf where it is not."""
    flags = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(flags, 0.0, -np.inf)).to(device, dtype)


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "paged-grammar-masks")


@lru_cache(maxsize=1)
def _executor() -> Any:
    """Return the library's thread pool."""
    from llguidance import LLExecutor

    return LLExecutor()
