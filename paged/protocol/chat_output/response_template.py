"""ResponseTemplate: a checkpoint's own description of what its model writes, as transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...errors import CheckpointError

# Fields that a message can have; "role" only as a default.
RESPONSE_FIELDS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")


class EventParser(Protocol):
    """The parser of transformers: text to events "region_open", "region_chunk" and "region_close"."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Take more text. Raises errors of any kind for a region that is not as the template says."""

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """End the text. Return the message and the last events. Raises as `feed` does."""


class ResponseTemplate:
    """The `response_template` of tokenizer_config.json.

    Its regular expressions run in this process, without a limit on time: use it for trusted checkpoints.

    Raises CheckpointError if it is wrong, has fields that a message cannot have, or transformers is too old.
    """

    def __init__(self, template: Mapping[str, Any]) -> None:
        try:
            from transformers.utils.chat_parsing import ResponseParser
        except ImportError as error:
            raise CheckpointError(
                "response_template needs a newer transformers: pip install -U transformers"
            ) from error
        self._template = template
        self._parser_of = ResponseParser
        try:
            self.new_parser("", ())
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise CheckpointError(f"the checkpoint's response_template is wrong: {error}") from error
        for name in template["fields"]:
            if name not in RESPONSE_FIELDS:
                raise CheckpointError(
                    f"the checkpoint's response_template has a field {name!r}; {', '.join(RESPONSE_FIELDS)} "
                    "are supported"
                )

    @classmethod
    def of(cls, directory: Path) -> ResponseTemplate:
        """Read the template of a tokenizer's directory. Raises CheckpointError if it has none."""
        file = directory / "tokenizer_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
        template = config.get("response_template")
        if not isinstance(template, Mapping):
            raise CheckpointError(
                f"{file} has no response_template; name the parser of another family as tool_call_parser"
            )
        return cls(template)

    def new_parser(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> EventParser:
        """Return a parser of one answer.

        prompt: the rendered conversation, which may have begun the answer.
        tools: their schemas give arguments that are written as text their types.
        """
        parser: EventParser = self._parser_of(self._template, prefix=prompt, tools=[*tools])
        return parser

    def reasoning_tags(self, prompt: str) -> tuple[str, str] | None:
        """Return what begins and ends the reasoning of an answer; None if the template has no such texts.

        The first tag is "" if the prompt has begun the reasoning.
        """
        for name in ("reasoning_content", "reasoning", "thinking"):
            field = self._template["fields"].get(name, {})
            begin, end = field.get("open"), field.get("close")
            if isinstance(begin, str) and begin and isinstance(end, str) and end:
                answer = prompt[prompt.rfind(self._template.get("start_anchor") or "") :]
                return ("" if answer.rfind(begin) > answer.rfind(end) else begin), end
        return None
