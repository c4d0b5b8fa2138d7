"""Usage: how many tokens a response took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...chat.parts import Part, ReasoningDelta
from ...requests.request import RequestOutput


class Usage:
    """Counts the tokens of a response.

    tells_cached: whether to report how many prompt tokens were in the prefix cache.
    counts_output: False if the response does not include the generated tokens.
    """

    def __init__(self, *, tells_cached: bool, counts_output: bool = True) -> None:
        self._tells_cached = tells_cached
        self._counts_output = counts_output
        self._num_prompt = self._num_cached = self._num_new = 0
        self._seen: set[int] = set()
        self._reasoning: dict[int, list[str]] = {}  # of each choice that is parsed

    def add_prompt(self, index: int, output: RequestOutput) -> None:
        """Count the prompt number `index`, unless it was counted before."""
        if index not in self._seen:
            self._seen.add(index)
            self._num_prompt += len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens or 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of the prompt number `index`: its only output, or one of several deltas."""
        self.add_prompt(index, output)
        if self._counts_output:
            for completion in output.outputs:
                self._num_new += len(completion.token_ids)

    def add_parts(self, choice: int, parts: Iterable[Part]) -> None:
        """Count the reasoning tokens among the parts of a choice."""
        texts = self._reasoning.get(choice)
        if texts is None:
            texts = self._reasoning[choice] = []
        for part in parts:
            if isinstance(part, ReasoningDelta):
                texts.append(part.text)

    def num_reasoning(self, count_tokens: Callable[[str], int]) -> int:
        """Return the number of reasoning tokens, whether the response includes them or not."""
        return sum(count_tokens("".join(texts)) for texts in self._reasoning.values() if texts)

    @property
    def num_prompt(self) -> int:
        """The number of prompt tokens."""
        return self._num_prompt

    @property
    def num_cached(self) -> int | None:
        """The number of prompt tokens that were in the prefix cache; None if it is not reported."""
        return self._num_cached if self._tells_cached else None

    @property
    def num_new(self) -> int:
        """The number of generated tokens."""
        return self._num_new

    def as_json(self, count_tokens: Callable[[str], int] | None = None) -> dict[str, Any]:
        """Return the counts so far.

        count_tokens: returns the number of tokens in a text; used to count reasoning tokens.
        """
        counts = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_new,
            "total_tokens": self._num_prompt + self._num_new,
            "prompt_tokens_details": {"cached_tokens": self._num_cached} if self._tells_cached else None,
        }
        if self._reasoning and count_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning(count_tokens)}
        return counts


def usage_of(
    outputs: Sequence[RequestOutput], *, tells_cached: bool, counts_output: bool = True
) -> dict[str, Any]:
    """Return the usage of a whole response; see `Usage`."""
    usage = Usage(tells_cached=tells_cached, counts_output=counts_output)
    for index, output in enumerate(outputs):
        usage.add(index, output)
    return usage.as_json()
