"""SamplingParams: how one request samples its tokens and when it stops, validated once."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self

from ..base.arguments import strict
from ..base.errors import RequestError, about
from ..base.kinds import Boolean, Integer, Number, check_fields, of_kind
from ..base.missing_names import ExplainsMissing
from ..base.validation import check_bool, check_int, plain, shown

DEFAULT_MAX_TOKENS = 16  # as in vLLM and OpenAI's completions
MAX_LOGPROBS = 1024  # most candidates reported for a token
MAX_SEED = 2**63 - 1
# Of all stop strings together, and of all bad words: the automaton takes memory and time for each.
MAX_STOP_CHARACTERS = 2**18
MAX_BAD_WORDS = 10_000
MAX_TAG = 1024  # characters of a tag of no_stop_within
MAX_TOKEN_IDS = 2**20  # in one list: a range() may not fit in memory
_SHARE = Number(0.0, 1.0, above=True)
_CANDIDATES = Integer(-1, MAX_LOGPROBS)
# (output tokens so far, logits f32[vocab_size]) or (prompt tokens, output tokens, logits) -> new logits
LogitsProcessor = Callable[..., Any]


class RequestOutputKind(enum.Enum):
    """What each RequestOutput of an unfinished request holds."""

    CUMULATIVE = "cumulative"  # everything so far
    DELTA = "delta"  # what is new since the last one
    FINAL_ONLY = "final_only"  # there is none before the end


@partial(strict, vllm="StructuredOutputsParams")
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The language that an output must belong to; exactly one field is given.

    json_object: True allows any JSON object, and is stored as json={"type": "object"}.
    json: a JSON schema, as text or a dict; {} allows any JSON value. Unsupported keywords are refused,
        unknown formats ignored. Numbers are compared exactly; without bounds they have at most 17 digits and
        an exponent, integers 19. Between JSON tokens there may be nothing, a space, or a line break with
        indentation.
    regex: a regular expression for the whole output, in Rust's syntax: no lookaround, no backreferences.
    choice: a list of strings, one of which is the output.
    grammar: a context-free grammar, in llama.cpp's GBNF (start symbol root) or Lark's EBNF (start).
    structural_tag: text with parts that belong to grammars, as JSON text or a dict in the form of vLLM and
        xgrammar, {"type": "structural_tag", "format": ...} or the older one with "structures" and "triggers";
        stored as JSON text in the newer form. Where it has the text of a special token, the token is meant.

    EOS and stop_token_ids are allowed once the output is complete. If nothing can follow, only they are
    allowed; if there are none, the output ends with "stop". max_tokens (with "length"), stop strings and
    stop_token_ids that are also text may cut it short. An output that is complete before min_tokens and
    cannot continue ends with an error.

    Raises RequestError naming the value and what is allowed.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not check_bool(RequestError, "json_object", self.json_object):
            object.__setattr__(self, "json_object", None)
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise RequestError(
                "structured_outputs takes exactly one of json, regex, choice, grammar, structural_tag and "
                f"json_object, got {given}"
            )
        if self.json_object:
            object.__setattr__(self, "json_object", None)
            object.__setattr__(self, "json", {"type": "object"})
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise RequestError(f"{name} must be a string, got {shown(getattr(self, name))}", param=name)
        if self.json is not None:
            from .structural_tag import schema_text

            object.__setattr__(self, "json", schema_text(self.json))
        if self.structural_tag is not None:
            from .structural_tag import structural_tag_text

            object.__setattr__(self, "structural_tag", structural_tag_text(self.structural_tag))
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("choice", self.choice))
            if not self.choice:
                raise RequestError("choice must name at least one string, got []", param="choice")

    @property
    def kind(self) -> str:
        """The name of the field that was given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)


@partial(strict, vllm="SamplingParams", assignable=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(metaclass=ExplainsMissing):
    """Sampling and stopping of one request, with vLLM's names and meanings.

    A field may be assigned to; its value is checked as by the constructor. A request copies its parameters
    when it is made, so a later assignment does not affect it.

    Logits are changed in this order: structured_outputs and allowed_token_ids, bad_words, min_tokens,
    logit_bias, repetition, frequency and presence penalty, DRY, logits_processors, temperature, min_p,
    top_n_sigma, typical_p, top_k, top_p. Log-probabilities are computed from the unchanged logits.

    n: number of samples; the prompt is computed once for all.
    best_of: number of samples to generate, of which the n with the highest cumulative log-probability are
        returned once all have ended; None takes n.
    temperature: logits are divided by it; 0 is greedy.
    top_p: keep the smallest set of most likely tokens that holds this probability; 1 keeps all.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    min_p: keep tokens at least this likely relative to the most likely one; 0 keeps all.
    typical_p: keep the smallest set of tokens with surprisal nearest to the entropy that holds this
        probability (Meister et al., 2022), which may exclude the most likely token; 1 keeps all.
    top_n_sigma: keep tokens whose logit is within this many standard deviations of the highest one (Tang et
        al., 2024); 0 keeps all.
    seed: the same seed gives the same tokens in any batch; None, or -1, derives one from the engine's seed
        and the request id.
    presence_penalty: subtracted from the logit of every token generated before.
    frequency_penalty: subtracted once for every time the token was generated.
    repetition_penalty: positive logits of tokens in the prompt or the output are divided by it, negative ones
        multiplied (Keskar et al., 2019); 1 changes nothing.
    repetition_penalty_last_n: number of last tokens at which repetition_penalty looks; -1 takes all, 0 none.
    dry_multiplier: DRY subtracts dry_multiplier * dry_base ** (n - dry_allowed_length) from the logit of a
        token that would extend a repetition of n tokens; 0 turns it off.
    dry_base: see dry_multiplier.
    dry_allowed_length: shorter repetitions are not penalized.
    dry_sequence_breakers: strings that end a repetition.
    dry_penalty_last_n: number of last tokens in which repetitions are searched; -1 takes all, 0 none.
    logit_bias: numbers from -100 to 100 added to the logits of token ids; None sets no bias.
    allowed_token_ids: token ids that may be generated; None allows all.
    bad_words: texts whose token sequences, at the beginning of a text and after a space, are not generated;
        other tokens may still form the same text.
    min_tokens: EOS, stop_token_ids and stop strings do not end the output before this many tokens.
    max_tokens: maximum number of tokens to generate; None continues to EOS, a stop or the end of the context.
    stop: strings before which the output ends; the first one completed counts, and the longest of those
        completed at once.
    stop_token_ids: token ids that end the output like EOS.
    no_stop_within: two tags at the beginning of the output, such as ("<think>", "</think>"), between which
        stop strings are not searched; the first is "" if the output begins there. None searches all text.
    include_stop_str_in_output: keep the stop string, or the token that ended the output, in the text.
    ignore_eos: treat EOS as any other token.
    logprobs: report the log-probability of every output token and of this many most likely ones at its
        position; -1 reports the whole vocabulary; None reports nothing.
    prompt_logprobs: report log-probabilities of the prompt's tokens in the same way, which computes them even
        if they are cached; None reports nothing.
    detokenize: produce text; False allows no stop strings.
    skip_special_tokens: leave special tokens out of the text.
    spaces_between_special_tokens: put spaces between adjacent special tokens in the text.
    output_kind: what the outputs of an unfinished request hold; see RequestOutputKind.
    priority: the lowest number goes first; only for scheduling_policy "priority".
    timeout_s: seconds from its arrival after which the request is aborted; None sets no limit.
    cache_salt: only requests with the same salt share cached blocks; None sets no salt.
    logits_processors: functions that take (output tokens so far, logits f32[vocab_size]) or (prompt tokens,
        output tokens, logits) and return new logits. Called for every token, they delay the whole batch.
    structured_outputs: the language that the output must belong to.
    num_speculative_tokens: maximum number of tokens that a step guesses for this request, at most the number
        of the engine's speculative_config; 0 guesses none. None takes the engine's number.

    Raises RequestError naming the value and what is allowed.
    """

    n: int = of_kind(Integer(1), 1)
    best_of: int | None = of_kind(Integer(1), None)
    temperature: float = of_kind(Number(0.0), 1.0)
    top_p: float = of_kind(_SHARE, 1.0)
    top_k: int = of_kind(Integer(-1), 0)
    min_p: float = of_kind(Number(0.0, 1.0), 0.0)
    typical_p: float = of_kind(_SHARE, 1.0)
    top_n_sigma: float = of_kind(Number(0.0), 0.0)
    seed: int | None = of_kind(Integer(-MAX_SEED - 1, MAX_SEED), None)
    presence_penalty: float = of_kind(Number(-2.0, 2.0), 0.0)
    frequency_penalty: float = of_kind(Number(-2.0, 2.0), 0.0)
    # Beyond these, ordinary float32 logits become 0 or inf.
    repetition_penalty: float = of_kind(Number(1e-6, 1e6), 1.0)
    repetition_penalty_last_n: int = of_kind(Integer(-1), -1)
    dry_multiplier: float = of_kind(Number(0.0), 0.0)
    dry_base: float = of_kind(Number(1.0), 1.75)
    dry_allowed_length: int = of_kind(Integer(1), 2)
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    dry_penalty_last_n: int = of_kind(Integer(-1), -1)
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = of_kind(Integer(0), 0)
    max_tokens: int | None = of_kind(Integer(1), DEFAULT_MAX_TOKENS)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    no_stop_within: tuple[str, str] | None = None
    include_stop_str_in_output: bool = of_kind(Boolean(), False)
    ignore_eos: bool = of_kind(Boolean(), False)
    logprobs: int | None = of_kind(_CANDIDATES, None)
    prompt_logprobs: int | None = of_kind(_CANDIDATES, None)
    detokenize: bool = of_kind(Boolean(), True)
    skip_special_tokens: bool = of_kind(Boolean(), True)
    spaces_between_special_tokens: bool = of_kind(Boolean(), True)
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    priority: float = of_kind(Number(), 0)
    timeout_s: float | None = of_kind(Number(0.0, above=True), None)
    cache_salt: str | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    structured_outputs: StructuredOutputsParams | None = None
    num_speculative_tokens: int | None = of_kind(Integer(0), None)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        for name in ("stop", "stop_token_ids", "bad_words", "logits_processors"):
            if getattr(self, name) is None:  # other libraries' default
                object.__setattr__(self, name, ())
        self._check_outputs()
        self._freeze_strings()
        self._freeze_tokens()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", param="min_tokens"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of {self.best_of} is less than n {self.n}", param="best_of")
        if self.temperature == 0.0 and self.num_samples > 1:
            name = "n" if self.best_of is None else "best_of"
            raise RequestError(
                f"{name} {self.num_samples} with temperature 0 would give the same output "
                f"{self.num_samples} times; raise temperature, or leave {name} out",
                param=name,
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop {shown(self.stop)} needs text, which detokenize=False leaves out", param="stop"
            )

    def clone(self) -> Self:
        """Return a copy, which later assignments to these parameters do not change."""
        own = object.__new__(type(self))
        for name in self.__slots__:  # three times as fast as copy.copy; each request needs one
            object.__setattr__(own, name, getattr(self, name))
        if self.logit_bias is not None:
            object.__setattr__(own, "logit_bias", dict(self.logit_bias))
        return own

    @property
    def num_samples(self) -> int:
        """Number of outputs to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def penalizes(self) -> bool:
        """Whether a penalty on all earlier tokens changes the logits."""
        of_all = self.repetition_penalty != 1.0 and self.repetition_penalty_last_n < 0
        return of_all or bool(self.frequency_penalty or self.presence_penalty)

    @property
    def penalizes_last(self) -> bool:
        """Whether a penalty on the last tokens changes the logits."""
        return self.repetition_penalty != 1.0 and self.repetition_penalty_last_n > 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed in a way that greedy sampling must see."""
        return self.edits_beside_grammar or self.structured_outputs is not None

    @property
    def edits_beside_grammar(self) -> bool:
        """Whether anything besides a grammar's masks changes the logits."""
        return (
            self.penalizes
            or self.penalizes_last
            or self.dry_multiplier > 0.0
            or self.min_tokens > 0
            or self.allowed_token_ids is not None
            or bool(self.bad_words or self.logit_bias or self.logits_processors)
        )

    def _check_outputs(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(
                f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}", param="output_kind"
            )
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise RequestError(
                f"cache_salt must be a non-empty string, got {shown(self.cache_salt)}", param="cache_salt"
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {shown(self.structured_outputs)}",
                param="structured_outputs",
            )

    def _freeze_strings(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _strings("stop", stop))
        for name in ("bad_words", "dry_sequence_breakers"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if self.no_stop_within is not None:
            object.__setattr__(self, "no_stop_within", _tags("no_stop_within", self.no_stop_within))
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            if (length := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"{name} has {len(strings)} strings of {length} characters together; "
                    f"{MAX_STOP_CHARACTERS} is the most",
                    param=name,
                )
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(self.bad_words)} strings; {MAX_BAD_WORDS} is the most", param="bad_words"
            )

    def _freeze_tokens(self) -> None:
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids must name at least one token, got []", param="allowed_token_ids"
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias must be a dict of token ids and numbers, got {shown(self.logit_bias)}",
                    param="logit_bias",
                )
            from .logits import biases_of

            with about("logit_bias"):
                object.__setattr__(self, "logit_bias", biases_of(self.logit_bias.items()))
        processors = self.logits_processors
        if not isinstance(processors, Sequence) or not all(map(callable, processors)):
            raise RequestError(
                f"logits_processors must be a list of functions, got {shown(processors)}",
                param="logits_processors",
            )
        if processors:
            from .logits import num_arguments
        for i, processor in enumerate(processors):
            if not num_arguments(processor):
                raise RequestError(
                    f"logits_processors[{i}] must take two arguments, the tokens generated so far and the "
                    f"logits, or three, the prompt's tokens before them; got {shown(processor)}",
                    param="logits_processors",
                )
        object.__setattr__(self, "logits_processors", tuple(processors))


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str | bytes)
        or not all(isinstance(s, str) and s for s in value)
    ):
        raise RequestError(f"{name} must be a list of non-empty strings, got {shown(value)}", param=name)
    return tuple(value)


def _tags(name: str, value: Any) -> tuple[str, str]:
    is_pair = isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == 2
    if not is_pair or not all(isinstance(tag, str) and len(tag) <= MAX_TAG for tag in value) or not value[1]:
        raise RequestError(
            f"{name} must be two tags of at most {MAX_TAG} characters, of which the first may be empty; got "
            f"{shown(value)}",
            param=name,
        )
    return value[0], value[1]


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{name} must be a list of ints, got {shown(value)}", param=name)
    if len(value) > MAX_TOKEN_IDS:
        raise RequestError(f"{name} has {len(value)} token ids; {MAX_TOKEN_IDS} is the most", param=name)
    # Without duplicates, of which a client may send a million.
    return tuple(dict.fromkeys(check_int(RequestError, name, plain(token_id), 0) for token_id in value))


def __getattr__(name: str) -> Any:
    """Find the other classes that vLLM has in this module."""
    if name in ("BeamSearchParams", "PoolingParams"):
        from . import other_calls

        return getattr(other_calls, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
