"""Files with one prompt per line, results as JSON, and sampling parameters from JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import FileError, RequestError, reject_unknown
from ..base.strict_json import parse_json
from ..base.validation import shown
from ..options.sampling_params import SamplingParams, StructuredOutputsParams
from ..requests.request import CompletionOutput, Logprob, RequestOutput

TEXT_LINES = ("", ".txt")
JSON_LINES = (".jsonl", ".ndjson")
LOWEST_LOGPROB = -9999.0  # of an impossible token, as in OpenAI's API and vLLM's
# Sampling parameters that JSON input cannot give, and why.
NOT_IN_JSON = {
    "logits_processors": "they are Python functions",
    "output_kind": "the whole output is written once",
    "no_stop_within": "it follows from the reasoning parser; stop strings of completions end any text",
}
SAMPLING_NAMES = [field.name for field in fields(SamplingParams) if field.name not in NOT_IN_JSON]


class Job(NamedTuple):
    """A prompt with its tenant and its arguments of SamplingParams."""

    prompt: dict[str, Any]  # {"prompt": text} or {"prompt_token_ids": ids}
    sampling: dict[str, Any]
    tenant: str
    given_id: dict[str, Any]  # {"id": ...} if the line has one

    def result(self, index: int, outcome: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line of the results file: the prompt, its id if it has one, and its outcome.

        index: the number of the prompt in its file, from 0 on.
        """
        return {"index": index, **self.given_id, **self.prompt, **outcome}


def read_jobs(file: Path, sampling: dict[str, Any]) -> list[Job]:
    """Return the prompts of a file: one text per line or, in a .jsonl or .ndjson file, one object per line.

    sampling: the parameters for lines that do not set them. Blank lines are skipped.

    Raises FileError, naming file and line, for a wrong line or a wrong type of file; OSError if the file
    cannot be read.
    """
    suffix = file.suffix.lower()
    if suffix not in TEXT_LINES + JSON_LINES:
        raise FileError(
            f"{file}: prompts come from .txt files or files without a suffix, one per line, or from .jsonl "
            f"and .ndjson files, one object per line; {suffix} is neither"
        )
    parse = _parse_object if suffix in JSON_LINES else _parse_text
    jobs = []
    # Bytes are split at newlines alone; text also at U+2028, which JSON may contain.
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            if line.strip():
                jobs.append(parse(line.decode("utf-8-sig"), sampling))
        except (ValueError, RecursionError) as error:  # from the decoder, json, and our own
            raise FileError(f"{file}:{number}: {error}") from error
    return jobs


def check_writable(output: Path, *inputs: Path) -> None:
    """Raise FileError, naming the file, if results cannot be written to it.

    inputs: files that must not be overwritten.
    """
    if not output.parent.is_dir():
        raise FileError(f"{output}: no such directory: {output.parent}")
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise FileError(f"{output}: not a file that can be written")
    if output.exists() and any(output.samefile(file) for file in inputs):
        raise FileError(f"{output}: this would overwrite the input; name another file")


def sampling_from_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of SamplingParams from a JSON object.

    Raises RequestError or UnknownArgumentError naming the field.
    """
    for name, reason in NOT_IN_JSON.items():
        if name in given:
            raise RequestError(f"{name} cannot be given here: {reason}")
    reject_unknown("SamplingParams", given, SAMPLING_NAMES)
    result = dict(given)
    if (structured := result.get("structured_outputs")) is not None:
        if not isinstance(structured, dict):
            raise RequestError(
                f'structured_outputs must be an object such as {{"regex": ...}}, got {shown(structured)}'
            )
        result["structured_outputs"] = StructuredOutputsParams(**structured)
    return result


def outcome_of(output: RequestOutput) -> dict[str, Any]:
    """Return a finished request as JSON: the fields of its sample, or a list of the samples' fields."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            return {"error": str(completion.stop_reason)}
    samples = [_sample(completion) for completion in output.outputs]
    outcome: dict[str, Any] = samples[0] if len(samples) == 1 else {"outputs": samples}
    if output.prompt_logprobs is not None:
        outcome["prompt_logprobs"] = [place and candidates_of(place) for place in output.prompt_logprobs]
    return outcome


def _sample(completion: CompletionOutput) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.cumulative_logprob is not None:
        sample["cumulative_logprob"] = finite(completion.cumulative_logprob)
    if completion.logprobs is not None:
        sample["logprobs"] = [candidates_of(place) for place in completion.logprobs]
    return sample


def candidates_of(place: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """Return the candidates at one position, the chosen token first."""
    return [
        {"token_id": i, "token": c.decoded_token, "logprob": finite(c.logprob), "rank": c.rank}
        for i, c in place.items()
    ]


def finite(logprob: float) -> float:
    """Return a log-probability as JSON can store it: -inf becomes the lowest finite number."""
    return max(logprob, LOWEST_LOGPROB)


def _parse_text(line: str, sampling: dict[str, Any]) -> Job:
    return Job({"prompt": line}, _checked(sampling), "", {})


def _parse_object(line: str, sampling: dict[str, Any]) -> Job:
    value = parse_json(line)
    if not isinstance(value, dict):
        raise RequestError('a line must be an object such as {"prompt": "..."}')
    prompt = {key: value.pop(key) for key in ("prompt", "prompt_token_ids") if key in value}
    if len(prompt) != 1:
        raise RequestError("a line must have either prompt or prompt_token_ids")
    if not isinstance(prompt.get("prompt", ""), str):
        raise RequestError(f"prompt must be a string, got {shown(prompt['prompt'])}")
    if not isinstance(prompt.get("prompt_token_ids", []), list):
        raise RequestError(
            f"prompt_token_ids must be a list of ints, got {shown(prompt['prompt_token_ids'])}"
        )
    tenant = value.pop("tenant", "")
    given_id = {"id": value.pop("id")} if "id" in value else {}
    if given_id and (isinstance(given_id["id"], bool) or not isinstance(given_id["id"], str | int)):
        raise RequestError(f"id must be a string or an int, got {shown(given_id['id'])}")
    return Job(prompt, _checked({**sampling, **sampling_from_json(value)}), tenant, given_id)


def _checked(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of SamplingParams, to which an engine adds its defaults. Raises RequestError."""
    SamplingParams(**{"max_tokens": None, **sampling})
    return sampling
