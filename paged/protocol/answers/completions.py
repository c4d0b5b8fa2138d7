"""Responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...requests.request import CompletionOutput, RequestOutput
from .chunks import Chunks, Form, Head
from .places import CompletionPlaces, prompt_text
from .usage import Usage, usage_of

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Repeats a prompt before its completions.

    tokenizer: decodes prompts given as token ids.
    only: whether the response contains only the prompt.
    """

    tokenizer: Tokenizer
    only: bool = False

    def text(self, output: RequestOutput) -> str:
        """Return the text of a prompt."""
        if output.prompt is not None:
            return output.prompt
        return prompt_text(output.prompt_token_ids, self.tokenizer)

    def logprobs(self, output: RequestOutput, places: CompletionPlaces) -> dict[str, Any]:
        """Return the log-probabilities of a prompt's tokens."""
        text = self.text(output)
        is_text = output.prompt is not None
        return places.of_prompt(output.prompt_logprobs or (), text, self.tokenizer, is_text=is_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionForm(Form):
    """What the response to a completion request contains.

    echo: repeats prompts before completions; None if they are not repeated.
    logprobs: whether the response includes the tokens' log-probabilities.
    """

    echo: Echo | None = None
    logprobs: bool = False

    def new_places(self, output: RequestOutput) -> CompletionPlaces:
        """Return a new collector for the log-probabilities of a choice."""
        return CompletionPlaces(self.decoding, output.prompt_token_ids, as_ids=self.as_ids)

    @property
    def echo_only(self) -> bool:
        """Whether the response contains only the prompt."""
        return self.echo is not None and self.echo.only


def completion_body(outputs: Sequence[RequestOutput], head: Head, form: CompletionForm) -> dict[str, Any]:
    """Return a text_completion, with the choices in the order of the prompts."""
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
    listed = [*(completion.logprobs or ())] if not echo_only else []
    logprobs = None
    if form.logprobs:
        places = form.new_places(output)
        echoed = {} if form.echo is None else form.echo.logprobs(output, places)
        logprobs = {name: echoed.get(name, []) + values for name, values in places.of(listed).items()}
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
        """Return the chunks that repeat the prompt with its log-probabilities, once for each choice."""
        form = self.form
        if index in self._begun:
            return []
        self._begun.add(index)
        choices = range(index * form.n, (index + 1) * form.n)
        if form.logprobs:
            self._places |= {choice: form.new_places(output) for choice in choices}
        fields = form.prompt_fields(output)
        if not fields and form.echo is None:
            return []
        chunks = []
        for choice in choices:
            logprobs = None
            text = ""
            if form.echo is not None:
                text = form.echo.text(output)
                if form.logprobs:
                    logprobs = form.echo.logprobs(output, self._places[choice])
            chunks.append(self.chunk(self._choice(choice, text, logprobs) | fields))
        return chunks

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the chunk of a delta; an empty list while its text is held back."""
        form = self.form
        reason = completion.finish_reason
        if form.echo_only:
            if reason is None:
                return []
            completion = replace(completion, text="", token_ids=[], logprobs=None, stop_reason=None)
            reason = "length"
        logprobs = None
        if form.logprobs and completion.logprobs:
            logprobs = self._places[choice].of(completion.logprobs)
        if not (completion.text or reason is not None or logprobs or form.token_ids):
            return []
        made = self._choice(choice, completion.text, logprobs, reason, completion.stop_reason)
        if form.token_ids:
            made["token_ids"] = [*completion.token_ids]
        return [self.chunk(made)]

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
