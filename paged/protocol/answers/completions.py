"""Responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...requests.request import CompletionOutput, RequestOutput
from .chunks import Chunks, Form, Head
from .places import CompletionPlaces, prompt_places
from .usage import Usage, usage_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """How prompts are repeated before their completions.

    decode: makes the text of a prompt that was given as token ids.
    token_text: makes the text of the first token.
    only: whether nothing but the prompt is returned.
    """

    decode: Callable[[Sequence[int]], str]
    token_text: Callable[[int], str]
    only: bool = False

    def text(self, output: RequestOutput) -> str:
        """Return the text of a prompt."""
        return self.decode(output.prompt_token_ids) if output.prompt is None else output.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm(Form):
    """The form of a completion.

    echo: None if prompts are not repeated.
    logprobs: whether the tokens' log-probabilities are returned.
    prompt_logprobs: whether those of the prompts are returned by themselves.
    """

    echo: Echo | None = None
    logprobs: bool = False
    prompt_logprobs: bool = False

    def first_token(self, output: RequestOutput) -> tuple[str, int]:
        """Return the name of a prompt's first token, and how many characters of the echo are its own."""
        assert self.echo is not None
        token_id = output.prompt_token_ids[0]
        text = self.echo.token_text(token_id)
        # The text of a prompt has no token that was added before it.
        length = len(text) if self.echo.text(output).startswith(text) else 0
        return f"token_id:{token_id}" if self.as_ids else text, length

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields of a choice about its prompt."""
        fields: dict[str, Any] = {}
        if self.prompt_logprobs and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_places(output.prompt_logprobs)
        if self.token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    @property
    def echo_only(self) -> bool:
        """Whether nothing but the prompt is returned."""
        return self.echo is not None and self.echo.only


def completion_body(outputs: Sequence[RequestOutput], head: Head, form: CompletionForm) -> dict[str, Any]:
    """Return a text_completion with the choices in the order of the prompts."""
    choices = [
        _choice(index * form.n + completion.index, completion, output, form)
        for index, output in enumerate(outputs)
        for completion in output.outputs
    ]
    usage = usage_of(outputs, tells_cached=form.cached_tokens, counts_output=not form.echo_only)
    return {**head.as_json(), "choices": choices, "usage": usage}


def _choice(
    index: int, completion: CompletionOutput, output: RequestOutput, form: CompletionForm
) -> dict[str, Any]:
    echo_only = form.echo_only
    text = "" if echo_only else completion.text
    places = CompletionPlaces(as_ids=form.as_ids)
    listed = [*(completion.logprobs or ())] if not echo_only else []
    logprobs = None
    if form.logprobs:
        if form.echo is not None:
            logprobs = places.of([*(output.prompt_logprobs or ()), *listed], *form.first_token(output))
        else:
            logprobs = places.of(listed)
    choice = {
        "index": index,
        "text": text if form.echo is None else form.echo.text(output) + text,
        "logprobs": logprobs,
        "finish_reason": "length" if echo_only else completion.finish_reason,
        "stop_reason": None if echo_only else completion.stop_reason,
    }
    choice |= form.prompt_fields(output)
    if form.token_ids:
        choice["token_ids"] = [] if echo_only else [*completion.token_ids]
    return choice


class CompletionChunks(Chunks):
    """The chunks of a streamed text_completion."""

    form: CompletionForm

    def __init__(self, head: Head, form: CompletionForm) -> None:
        usage = Usage(tells_cached=form.cached_tokens, counts_output=not form.echo_only)
        super().__init__(head, form, usage)
        self._begun: set[int] = set()  # prompts
        self._places: dict[int, CompletionPlaces] = {}

    def before(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the repeated prompt and what belongs to it, for each of its choices."""
        form = self.form
        if index in self._begun:
            return []
        self._begun.add(index)
        fields = form.prompt_fields(output)
        if not fields and form.echo is None:
            return []
        chunks = []
        for choice in range(index * form.n, (index + 1) * form.n):
            logprobs, text = None, ""
            if form.echo is not None:
                text = form.echo.text(output)
                if form.logprobs:
                    prompt_logprobs = output.prompt_logprobs or ()
                    logprobs = self._places_of(choice).of(prompt_logprobs, *form.first_token(output))
            chunks.append(self.chunk(self._choice(choice, text, logprobs) | fields))
        return chunks

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the chunk of a delta, or none while its text is held back."""
        form, reason = self.form, completion.finish_reason
        if form.echo_only:
            return [self.chunk(self._choice(choice, "", None, "length"))] if reason is not None else []
        logprobs = None
        if form.logprobs and completion.logprobs:
            logprobs = self._places_of(choice).of(completion.logprobs)
        if not (completion.text or reason is not None or logprobs or form.token_ids):
            return []
        made = self._choice(choice, completion.text, logprobs, reason, completion.stop_reason)
        if form.token_ids:
            made["token_ids"] = [*completion.token_ids]
        return [self.chunk(made)]

    def _places_of(self, choice: int) -> CompletionPlaces:
        if choice not in self._places:
            self._places[choice] = CompletionPlaces(as_ids=self.form.as_ids)
        return self._places[choice]

    @staticmethod
    def _choice(
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
