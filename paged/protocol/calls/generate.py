"""GenerateCall: a body of /generate or /generate/batch, in which each prompt has a result of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import PagedError
from ...base.fields import Field, FieldTable
from ...base.json_kinds import AnyJSON, Choice, ListOf, OneOf
from ...base.kinds import Boolean
from ...options.sampling_params import SamplingParams
from ...requests.request import CompletionOutput, Prompt, RequestOutput
from ..answers.errors import error_body, failure_of, status_of
from ..fields.common import ADD_SPECIAL_TOKENS, BASE_FIELDS
from ..fields.sampling import SAMPLING_FIELDS, check_most_logprobs, sampling_field
from ..jobs import candidates_of, finite
from ..limits import MAX_PROMPTS, Limits
from .call import GenerationCall

if TYPE_CHECKING:
    from ...engine.model_text import ModelText

GENERATE_TABLE = FieldTable(
    "/generate",
    [
        Field(
            "prompts",
            ListOf(AnyJSON(), 1, MAX_PROMPTS),
            "texts or lists of token ids to complete; a wrong one is an error in its own result",
        ),
        Field("prompt", AnyJSON(), "a single prompt; either it or prompts is given"),
        *BASE_FIELDS,
        *SAMPLING_FIELDS,
        sampling_field("logprobs"),
        Field(
            "stream",
            OneOf((Boolean(), Choice(("results", "deltas")))),
            'send JSON lines: with true or "results" one for each result, with "deltas" one for each '
            "piece of text",
        ),
        ADD_SPECIAL_TOKENS,
        sampling_field("detokenize"),
    ],
    one_of=("prompts", "prompt"),
)


class GenerateCall(GenerationCall):
    """A body of /generate or /generate/batch.

    streams_deltas: whether a line is sent for each delta, not only for each result.
    """

    table = GENERATE_TABLE
    DEFAULT_MAX_TOKENS = 16

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        values = self.values
        self.listed: list[Any] = values["prompts"] if "prompts" in values else [values["prompt"]]
        self.check_choices(len(self.listed))
        check_most_logprobs("logprobs", values.get("logprobs"), limits.max_logprobs)
        self.streams_deltas = values.get("stream") == "deltas"
        self._begun: set[int] = set()  # prompts with a line of deltas
        self._failed: set[int] = set()  # prompts whose error was returned
        self._ended: set[tuple[int, int]] = set()  # samples whose last delta was returned

    def prompts(self, text: ModelText) -> Sequence[Prompt]:  # noqa: ARG002
        """Return the prompts. The engine refuses wrong prompts individually."""
        add = self.values.get("add_special_tokens", True)
        return [_prompt_of(prompt, add) for prompt in self.listed]

    def params(self, text: ModelText, *, stream: bool | None = None) -> SamplingParams:
        """Return the sampling parameters with the model's defaults. Raises RequestError."""
        return super().params(text, stream=self.streams_deltas if stream is None else stream)

    def results(self, index: int, outcome: RequestOutput | PagedError) -> list[dict[str, Any]]:
        """Return the results of the prompt number `index`: one for each sample, or its error.

        outcome: the finished output, or the error that refused the prompt.
        """
        if isinstance(outcome, PagedError):
            failure = status_of(outcome), str(outcome)
        elif (failed := failure_of([outcome])) is not None:
            failure = failed
        else:
            return [self._result(index, outcome, completion) for completion in outcome.outputs]
        return [{"index": index, **error_body(*failure)}]

    def deltas(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return a line for each sample of a prompt that has new text or is finished.

        The first line of a prompt contains the log-probabilities of the prompt's tokens.
        """
        if index in self._failed:  # its other samples go on
            return []
        if failure := failure_of([output]):
            self._failed.add(index)
            return [{"index": index, **error_body(*failure)}]
        lines = []
        for completion in output.outputs:
            sample = index, completion.index
            has_ended = completion.finish_reason is not None
            # An output has all samples of its prompt, also those that ended before.
            if sample in self._ended or not (completion.token_ids or completion.text or has_ended):
                continue
            if has_ended:
                self._ended.add(sample)
            lines.append(
                {
                    "index": index,
                    **self._sample(completion),
                    "text": completion.text,
                    "token_ids": [*completion.token_ids],
                    **self._end(completion),
                    **self._logprobs(completion),
                }
            )
        if lines and index not in self._begun:
            self._begun.add(index)
            lines[0] |= self._prompt_logprobs(output)
        return lines

    def body(self, outcomes: Sequence[RequestOutput | PagedError], seconds: float) -> dict[str, Any]:
        """Return the whole response body.

        outcomes: the outcome of each prompt; see `results`.
        seconds: the time from the arrival of the request to its last token.
        """
        num_prompts = len(outcomes)
        return {
            "results": [result for i, outcome in enumerate(outcomes) for result in self.results(i, outcome)],
            "total_prompts": num_prompts,
            "total_time_seconds": seconds,
            "avg_time_per_prompt": seconds / num_prompts,
        }

    def _result(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        times = output.metrics
        finished = times.arrival_time if times.finished_time is None else times.finished_time
        return {
            "index": index,
            **self._sample(completion),
            "generated_text": completion.text,
            "token_ids": [*completion.token_ids],
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_tokens": len(completion.token_ids),
            **self._end(completion),
            "seconds": finished - times.arrival_time,
            **self._logprobs(completion),
            **self._prompt_logprobs(output),
        }

    @staticmethod
    def _logprobs(completion: CompletionOutput) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if completion.logprobs is not None:
            fields["logprobs"] = [candidates_of(place) for place in completion.logprobs]
        if completion.cumulative_logprob is not None:
            fields["cumulative_logprob"] = finite(completion.cumulative_logprob)
        return fields

    @staticmethod
    def _prompt_logprobs(output: RequestOutput) -> dict[str, Any]:
        if output.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": [place and candidates_of(place) for place in output.prompt_logprobs]}

    def _sample(self, completion: CompletionOutput) -> dict[str, int]:
        return {"sample": completion.index} if self.n > 1 else {}

    @staticmethod
    def _end(completion: CompletionOutput) -> dict[str, Any]:
        return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def _prompt_of(value: Any, add_special_tokens: bool) -> Prompt:
    """Return a prompt of a body for the engine, which refuses what is neither text nor token ids."""
    if isinstance(value, str):
        return {"prompt": value, "add_special_tokens": add_special_tokens}
    # The engine also takes objects, which are no part of this API.
    return {"prompt_token_ids": value} if isinstance(value, Mapping) else value
