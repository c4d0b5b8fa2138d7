"""The fields of request bodies that say how to sample, in every body that generates."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ...base.arguments import field_texts
from ...base.from_vllm import Neutral, neutral_of
from ...base.validation import shown
from ...errors import PagedError, RequestError
from ...sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
    StructuredOutputsParams,
)
from ..limits import MAX_LOGIT_BIASES, MAX_N, MAX_NAME_LENGTH, MAX_STOP_STRINGS
from .kinds import (
    Boolean,
    Choice,
    Integer,
    JSONObject,
    Kind,
    ListOf,
    LogitBias,
    Number,
    OneOf,
    Text,
    TokenIds,
)
from .structural_tags import FORM_FIELDS, TAG_FORMS, StructuralTag
from .table import Field, FieldTable, ObjectOf, Tagged, ignored, refused

_TEXT = Text(1)
_CANDIDATES = Integer(-1, MAX_LOGPROBS)
SAMPLING_KINDS: dict[str, Kind] = {
    "n": Integer(1, MAX_N),
    "best_of": Integer(1, MAX_N),
    "temperature": Number(0.0),
    "top_p": Number(0.0, 1.0, above=True),
    "top_k": Integer(-1),
    "min_p": Number(0.0, 1.0),
    "typical_p": Number(0.0, 1.0, above=True),
    "top_n_sigma": Number(0.0),
    "seed": Integer(-MAX_SEED - 1, MAX_SEED),
    "presence_penalty": Number(-2.0, 2.0),
    "frequency_penalty": Number(-2.0, 2.0),
    "repetition_penalty": Number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "dry_multiplier": Number(0.0),
    "dry_base": Number(1.0),
    "dry_allowed_length": Integer(1),
    "dry_sequence_breakers": ListOf(_TEXT, longest=MAX_BAD_WORDS),
    "dry_penalty_last_n": Integer(-1),
    "logit_bias": LogitBias(MAX_LOGIT_BIASES),
    "allowed_token_ids": TokenIds(1, MAX_TOKEN_IDS),
    "bad_words": ListOf(_TEXT, longest=MAX_BAD_WORDS),
    "min_tokens": Integer(0),
    "max_tokens": Integer(1),
    "stop": OneOf((_TEXT, ListOf(_TEXT, longest=MAX_STOP_STRINGS))),
    "stop_token_ids": TokenIds(0, MAX_TOKEN_IDS),
    "include_stop_str_in_output": Boolean(),
    "ignore_eos": Boolean(),
    "logprobs": _CANDIDATES,
    "prompt_logprobs": _CANDIDATES,
    "detokenize": Boolean(),
    "skip_special_tokens": Boolean(),
    "spaces_between_special_tokens": Boolean(),
    "priority": Number(),
    "timeout_s": Number(0.0, above=True),
    "cache_salt": Text(1, MAX_NAME_LENGTH),
}


def _texts(owner: type[Any]) -> dict[str, str]:
    """Return what a dataclass says of its fields, with JSON's names of constants."""
    words = {"None": "null", "True": "true", "False": "false"}
    return {
        name: re.sub(r"\b(None|True|False)\b", lambda match: words[match[0]], text).rstrip(".")
        for name, text in field_texts(owner).items()
    }


_TEXTS = _texts(SamplingParams)
_CONSTRAINT_TEXTS = _texts(StructuredOutputsParams)
_CONSTRAINT_KINDS: dict[str, Kind] = {
    "json": OneOf((_TEXT, JSONObject('{"type": "object"}'))),
    "regex": _TEXT,
    "choice": ListOf(_TEXT, 1),
    "grammar": _TEXT,
    "json_object": Boolean(),
    "structural_tag": StructuralTag(),
}


def _refused_by_vllm(table: Mapping[str, Neutral], known: Collection[str] = ()) -> Iterator[Field]:
    """Yield vLLM's parameters that are accepted at a neutral value alone."""
    for name, (values, reason) in table.items():
        if name not in known:
            yield from refused(name, reason, *values)


def _sampling(name: str, kind: Kind, meaning: str = "") -> Field:
    return Field(name, kind, meaning or _TEXTS[name])


CONSTRAINTS = FieldTable(
    "structured_outputs",
    [
        *(Field(name, kind, _CONSTRAINT_TEXTS[name]) for name, kind in _CONSTRAINT_KINDS.items()),
        *_refused_by_vllm(neutral_of("StructuredOutputsParams")),
    ],
)
SCHEMA_TABLE = FieldTable(
    "response_format.json_schema",
    [
        *ignored("name description", "they are not shown to the model"),
        Field("schema", JSONObject('{"type": "object"}'), "the JSON schema of the answer", required=True),
        *ignored("strict", "the answer always matches the schema, also with false"),
    ],
)


def _format(tag: str, *fields: Field, one_of: Sequence[str] = ()) -> FieldTable:
    kind = Field("type", Choice((tag,)), "what the answer is", required=True)
    return FieldTable("response_format", [kind, *fields], one_of=one_of)


RESPONSE_FORMAT = Tagged(
    "type",
    {
        "text": _format("text"),
        "json_object": _format("json_object"),
        "json_schema": _format(
            "json_schema",
            Field("json_schema", ObjectOf(SCHEMA_TABLE), "the schema and its name", required=True),
        ),
        "structural_tag": _format("structural_tag", *FORM_FIELDS, one_of=TAG_FORMS),
    },
)
_MEANINGS = {"prompt_logprobs": "log-probabilities of the prompt's tokens and of this many most likely ones"}
GUIDED = "its place is structured_outputs: {{{}}}"
# In every body that generates; of these two each body has its own form.
SAMPLING_FIELDS = [
    *(
        _sampling(name, kind, _MEANINGS.get(name, ""))
        for name, kind in SAMPLING_KINDS.items()
        if name not in ("logprobs", "detokenize")
    ),
    _sampling("structured_outputs", ObjectOf(CONSTRAINTS)),
    Field(
        "response_format",
        RESPONSE_FORMAT,
        'the form of the answer: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", '
        '"json_schema": {"schema": ...}} or {"type": "structural_tag", ...}; a constraint on '
        "the output, which is translated to structured_outputs",
    ),
    *refused("logits_processors", "functions cannot be given in JSON; see logit_bias and bad_words", []),
    *refused("output_kind", "stream says whether there are deltas"),
    *refused("guided_json", GUIDED.format('"json": ...')),
    *refused("guided_regex", GUIDED.format('"regex": ...')),
    *refused("guided_choice", GUIDED.format('"choice": [...]')),
    *refused("guided_grammar", GUIDED.format('"grammar": ...')),
    *refused(
        "guided_decoding_backend guided_whitespace_pattern guided_decoding",
        "constraints are compiled by llguidance; see structured_outputs",
    ),
    *refused("use_beam_search", "beams are offline alone: LLMEngine.beam_search", False),
    *refused("length_penalty early_stopping", "they belong to beam search", 1, 1.0, False),
    *refused("vllm_xargs logits_processor_args", "custom logits processors are not available over HTTP", {}),
    *refused("skip_clone", "it has no effect here: leave it out", True, False),
    *refused("stream_interval", "the server sets how often chunks are sent: --stream-interval-s, in seconds"),
    *refused("extra_args", "custom logits processors are not available over HTTP", {}),
    *refused("truncation_side", "cut the prompt's token ids"),
    *refused("kv_transfer_params ec_transfer_params", "KV is not transferred between engines yet"),
    *refused("extra_body", "its fields belong into the body itself; clients put them there", {}),
]
SAMPLING_FIELDS += _refused_by_vllm(neutral_of("SamplingParams"), {field.name for field in SAMPLING_FIELDS})
CACHE_SALT = _sampling("cache_salt", SAMPLING_KINDS["cache_salt"])
DETOKENIZE = _sampling("detokenize", SAMPLING_KINDS["detokenize"])


def constraint_of(values: dict[str, Any]) -> StructuredOutputsParams | None:
    """Take structured_outputs and response_format out of parsed fields. Return what they say.

    Raises RequestError, whose param is the field.
    """
    constraint = values.pop("structured_outputs", None)
    form = values.pop("response_format", None)
    name = "structured_outputs"
    if form is not None and form["type"] != "text":
        if constraint is not None:
            raise RequestError(
                "response_format and structured_outputs say the same; give one of them", param=name
            )
        name = "response_format"
        constraint = _constraint_of(form)
    if constraint is None:
        return None
    try:
        return StructuredOutputsParams(**constraint)
    except PagedError as error:
        error.param = field_of_part(name, error.param)
        raise


def field_of_part(name: str, part: str | None) -> str:
    """Return the path in a body of a part of a constraint.

    name: of the field that the constraint comes from.
    part: its path in StructuredOutputsParams, such as structural_tag.format; None if it is not known.
    """
    if part is None:
        return name
    if name == "structured_outputs":
        return f"{name}.{part}"
    kind, _, path = part.partition(".")
    # The object response_format is the structural tag itself.
    inside = {"json": ".json_schema.schema"}.get(kind, "")
    return f"{name}{inside}.{path}" if path else name + inside


def _constraint_of(form: Mapping[str, Any]) -> dict[str, Any]:
    if form["type"] == "json_object":
        return {"json_object": True}
    if form["type"] == "json_schema":
        return {"json": form["json_schema"]["schema"]}
    return {"structural_tag": form}


def check_most_logprobs(name: str, value: int | None, most: int) -> None:
    """Raise RequestError if a body asks for more candidates per position than the server allows."""
    if value is None or most < 0 or 0 <= value <= most:
        return
    raise RequestError(
        f"{name} must be from 0 to {most}, got {shown(value)}; the server's --max-logprobs sets the limit",
        param=name,
    )
