"""What of vLLM's offline API exists here: the tables in docs/vllm-names.md, see tests/tables.py."""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import paged
from paged import (
    BeamSearchParams,
    EngineConfig,
    LLMEngine,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from paged.base.from_vllm import Neutral, missing_of, neutral_of

# The names, arguments and defaults of vLLM 0.33; a default that is an object is {}.
VLLM = json.loads((Path(__file__).parents[1] / "vllm_0_33.json").read_text())
# The dataclasses of both, and the arguments that are accepted at their neutral value alone.
CONFIGS = {
    name: (owner, neutral_of(name))
    for name, owner in {
        "EngineArgs": EngineConfig,
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
        "BeamSearchParams": BeamSearchParams,
        "PoolingParams": PoolingParams,
    }.items()
}
OUTPUTS = {"RequestOutput": paged.RequestOutput, "CompletionOutput": paged.CompletionOutput}
# Names that are here too, with another meaning or other values.
OTHER_MEANING = {
    "score": "`score(prompt, continuations)` returns the log-probabilities of continuations, no similarities",
    "encode": "the same as `embed`, for embeddings alone",
    "quantization": "'int8' or 'int4' quantizes a plain checkpoint while it loads; others need no option",
    "attention_backend": "'auto', 'triton', 'numba' or 'torch'",
    "kv_cache_dtype": "without 'fp8_e5m2' and others; see `EngineConfig`",
    "enforce_eager": "captures no CUDA graphs, and records no steps on a CPU",
}


class Row(NamedTuple):
    """One name of vLLM's, and its treatment: "same", "other", "neutral" (at some values) or "refused"."""

    name: str
    treatment: str
    note: str = ""


def default_of(owner: type[Any], name: str) -> Any:
    """Return the default of a dataclass's field, None if there is none."""
    (default,) = (field.default for field in dataclasses.fields(owner) if field.name == name)
    return None if default is dataclasses.MISSING else default


def config_rows(name: str) -> Iterator[Row]:
    """Yield the fields of one of vLLM's dataclasses."""
    owner, neutral = CONFIGS[name]
    ours = {field.name for field in dataclasses.fields(owner)}
    for field, default in VLLM[name].items():
        if field in ours:
            own = default_of(owner, field)
            own = getattr(own, "value", own)
            same = own == default or default is None or default == "required" or own in ((), None)
            if field in OTHER_MEANING:
                yield Row(field, "other", OTHER_MEANING[field])
            else:
                yield Row(field, "same", "" if same else f"by default {own!r}, there {default!r}")
        else:
            yield neutral_row(field, neutral[field])


def neutral_row(name: str, neutral: Neutral) -> Row:
    """Return the row of an argument that is accepted at some values alone."""
    values = [v for v in neutral.values if v not in (None, "", [], {}, set())]
    alternatives = " or ".join(map(repr, values))
    return Row(f"`{name}={alternatives}`" if values else f"`{name}`", "neutral", neutral.reason)


def method_rows() -> Iterator[Row]:
    """Yield the methods of vLLM's LLM."""
    for method, arguments in VLLM["LLM"].items():
        if method in missing_of("LLMEngine"):
            yield Row(method, "refused", missing_of("LLMEngine")[method])
        elif method in OTHER_MEANING:
            yield Row(method, "other", OTHER_MEANING[method])
        else:
            ours = inspect.signature(getattr(LLMEngine, method)).parameters
            neutral = [f"`{a}`" for a in arguments if a not in ours and a in neutral_of("calls")]
            yield Row(method, "same", f"without effect: {', '.join(neutral)}" if neutral else "")


def name_rows() -> Iterator[Row]:
    """Yield what `import vllm` offers, and the fields of outputs."""
    missing = missing_of("paged")
    for name in VLLM["vllm"]:
        yield Row(name, *(("refused", missing[name]) if name in missing else ("same",)))
    for name, reason in missing.items():
        if name not in VLLM["vllm"] and name not in missing_of("LLMEngine"):  # a module
            yield Row(f"vllm.{name}", "refused", reason)
    for owner, cls in OUTPUTS.items():
        for name in VLLM[owner]:
            if not hasattr(cls, name):
                yield Row(f"{owner}.{name}", "refused", missing_of(owner)[name])
    for name in VLLM["SamplingParams methods"]:
        if name not in dir(SamplingParams):
            yield Row(f"SamplingParams.{name}", "refused", missing_of("SamplingParams")[name])


def tables() -> str:
    """Return the tables of the page."""
    parts = [("Methods of `LLM`", [*method_rows()]), ("Names and outputs", [*name_rows()])]
    parts += [(f"`{name}`", [*config_rows(name)]) for name in CONFIGS]
    parts += [("Options of `vllm serve` alone", [neutral_row(*item) for item in neutral_of("serve").items()])]
    lines = list[str]()
    for title, rows in parts:
        same = [f"`{r.name}`" + (f" ({r.note})" if r.note else "") for r in rows if r.treatment == "same"]
        lines += [f"## {title}", ""]
        lines += ["The same: " + ", ".join(same) + ".", ""] if same else []
        for row in rows:
            if row.treatment == "other":
                lines += [f"Here `{row.name}` differs: {row.note}.", ""]
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.treatment in ("neutral", "refused"):
                name = row.name if row.treatment == "neutral" else f"`{row.name}`"
                reasons.setdefault(row.note, []).append(name)
        neutral = any(row.treatment == "neutral" for row in rows)
        if neutral:
            first = "A name without a value in the table is accepted as None or empty."
            lines += [f"{first} Any other value is refused.", ""]
        lines += [
            "| accepted without effect | otherwise |" if neutral else "| not here | instead |",
            "|---|---|",
        ]
        lines += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
        lines.append("")
    return "".join(f"{line}\n" for line in lines)
