"""Files of prompts, a job a line, and of their results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from .errors import RequestError
from .sampling_params import SamplingParams

JSON_LINES = (".jsonl", ".ndjson")


class Job(NamedTuple):
    """A prompt, how to sample for it, and on whose account."""

    prompt: dict[str, Any]  # {"prompt": text} or {"prompt_token_ids": ids}
    params: SamplingParams
    tenant: str


def read_jobs(file: Path, sampling: dict[str, Any]) -> list[Job]:
    """The prompts of a file: a text a line or, in a .jsonl file, an object a line.

    sampling: what applies where a line says nothing else. Blank lines are skipped.

    Raises RequestError naming file and line, OSError if the file cannot be read.
    """
    parse = _parse_object if file.suffix in JSON_LINES else _parse_text
    jobs = []
    # As bytes, which end their lines at newlines alone; text would also at U+2028, which JSON may contain.
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            if line.strip():
                jobs.append(parse(line.decode("utf-8-sig"), sampling))
        except (ValueError, RecursionError) as error:  # the decoder's, json's and our own
            raise RequestError(f"{file}:{number}: {error}") from error
    return jobs


def check_writable(output: Path, *inputs: Path) -> None:
    """Find out now, not after everything is computed, that the results cannot be written.

    inputs: files that must not be overwritten.

    Raises RequestError naming the file.
    """
    if not output.parent.is_dir():
        raise RequestError(f"{output}: no such directory: {output.parent}")
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise RequestError(f"{output}: not a file that can be written")
    if output.exists() and any(output.samefile(file) for file in inputs):
        raise RequestError(f"{output}: this would overwrite the input; name another file")


def _parse_text(line: str, sampling: dict[str, Any]) -> Job:
    return Job({"prompt": line}, SamplingParams(**sampling), "")


def _parse_object(line: str, sampling: dict[str, Any]) -> Job:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise RequestError('a line must be an object such as {"prompt": "..."}')
    prompt = {key: value.pop(key) for key in ("prompt", "prompt_token_ids") if key in value}
    if len(prompt) != 1:
        raise RequestError("a line must have either prompt or prompt_token_ids")
    if not isinstance(prompt.get("prompt", ""), str):
        raise RequestError(f"prompt must be a string, got {prompt['prompt']!r}")
    if not isinstance(prompt.get("prompt_token_ids", []), list):
        raise RequestError(f"prompt_token_ids must be a list of ints, got {prompt['prompt_token_ids']!r}")
    tenant = value.pop("tenant", "")
    return Job(prompt, SamplingParams(**{**sampling, **value}), tenant)
