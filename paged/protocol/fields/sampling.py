"""The fields of request bodies that say how to sample, in every body that generates."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base.docstrings import field_texts
from ...base.errors import PagedError, RequestError
from ...base.fields import Field, FieldTable, ObjectOf, Tagged, ignored, refused
from ...base.from_vllm import Neutral, neutral_of
from ...base.json_kinds import Choice, JSONObject, ListOf, OneOf, Text, TokenIds
from ...base.kinds import Boolean, Integer, Kind, Schema, kinds_of
from ...base.validation import shown
from ...options.logits import BIAS, biases_of
from ...options.sampling_params import (
    MAX_BAD_WORDS,
    MAX_TOKEN_IDS,
    SamplingParams,
    StructuredOutputsParams,
)
from ...options.structural_tag import FORM_FIELDS, TAG_FORMS, StructuralTag
from ..limits import MAX_LOGIT_BIASES, MAX_N, MAX_NAME_LENGTH, MAX_STOP_STRINGS
from .common import PriorityKind


@dataclass(frozen=True, slots=True)
class LogitBias(Kind):
    """An object with at most `most` entries: token ids written as strings, and their biases."""

    types = (dict,)
    most: int

    def parse(self, name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise RequestError(f'{name} must be an object such as {{"50": -100}}, got {shown(value)}')
        if len(value) > self.most:
            raise RequestError(f"{name} has {len(value):,} entries; {self.most:,} is the most")
        return biases_of(value.items())

    def schema(self) -> Schema:
        return {
            "type": "object",
            "patternProperties": {"^[0-9]{1,19}$": BIAS.schema()},
            "additionalProperties": False,
            "maxProperties": self.most,
        }

    def __str__(self) -> str:
        return f"object of at most {self.most:,} token ids and numbers {BIAS.limits}"


_TEXT = Text(1)
_WORDS = ListOf(_TEXT, longest=MAX_BAD_WORDS)
# What bodies take otherwise than `SamplingParams`: lists, and less than an engine.
_OWN_KINDS: dict[str, Kind] = {
    "n": Integer(1, MAX_N),
    "best_of": Integer(1, MAX_N),
    "dry_sequence_breakers": _WORDS,
    "logit_bias": LogitBias(MAX_LOGIT_BIASES),
    "allowed_token_ids": TokenIds(1, MAX_TOKEN_IDS),
    "bad_words": _WORDS,
    "stop": OneOf((_TEXT, ListOf(_TEXT, longest=MAX_STOP_STRINGS))),
    "stop_token_ids": TokenIds(0, MAX_TOKEN_IDS),
    "priority": PriorityKind(),
    "cache_salt": Text(1, MAX_NAME_LENGTH),
}
_KINDS = {**kinds_of(SamplingParams), **_OWN_KINDS}
SAMPLING_KINDS = {name: _KINDS[name] for name in SamplingParams.__dataclass_fields__ if name in _KINDS}


def _texts(owner: type[Any]) -> dict[str, str]:
    """Return a dataclass's texts on its fields, with JSON's names of constants."""
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


def sampling_field(name: str, meaning: str = "") -> Field:
    """Return the field of a sampling parameter. Its meaning is by default that in `SamplingParams`."""
    return Field(name, SAMPLING_KINDS[name], meaning or _TEXTS[name])


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
# Of these, bodies have their own forms, or none.
_OF_SOME = ("n", "best_of", "max_tokens", "stop", "prompt_logprobs", "logprobs", "detokenize")
# In every body that generates.
TOKEN_FIELDS = [
    *(sampling_field(name) for name in SAMPLING_KINDS if name not in _OF_SOME),
    Field("structured_outputs", ObjectOf(CONSTRAINTS), _TEXTS["structured_outputs"]),
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
TOKEN_FIELDS += _refused_by_vllm(
    neutral_of("SamplingParams"), {*_OF_SOME, *(field.name for field in TOKEN_FIELDS)}
)
# In the bodies with choices or results.
CHOICE_FIELDS = [
    *(sampling_field(name, _MEANINGS.get(name, "")) for name in _OF_SOME[:-2]),
    Field(
        "response_format",
        RESPONSE_FORMAT,
        'the form of the answer: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", '
        '"json_schema": {"schema": ...}} or {"type": "structural_tag", ...}; a constraint on '
        "the output, which is translated to structured_outputs",
    ),
]
SAMPLING_FIELDS = [*CHOICE_FIELDS, *TOKEN_FIELDS]


def constraint_of(values: dict[str, Any]) -> StructuredOutputsParams | None:
    """Remove structured_outputs and response_format from parsed fields. Return the constraint that they
    describe.

    Raises RequestError. The error's `param` is the wrong field.
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
    """Return the path of a constraint's part within a request body.

    name: the name of the field that the constraint comes from.
    part: the part's path in StructuredOutputsParams, such as structural_tag.format; None if unknown.
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
