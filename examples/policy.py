"""Write a scheduling policy: the shortest prompt goes first. docs/add-a-policy.md explains the methods."""

import bisect
from collections.abc import Iterable, Iterator

from paged import LLMEngine, SamplingParams
from paged.requests.request import Request
from paged.scheduler.policy import Rank


class ShortestPromptFirst:
    """The waiting request with the shortest prompt runs first; of equals, the one that arrived first."""

    preempts = False

    def __init__(self) -> None:
        self._queue: list[tuple[Rank, Request]] = []  # sorted; no two ranks are equal

    def rank(self, request: Request) -> Rank:
        return (request.num_prompt_tokens, request.arrival)

    def push(self, request: Request) -> None:
        bisect.insort(self._queue, (request.rank, request))

    def peek(self) -> Request | None:
        return self._queue[0][1] if self._queue else None

    def remove(self, request: Request) -> None:
        del self._queue[bisect.bisect_left(self._queue, (request.rank,))]

    pop = remove

    def generated(self, requests: Iterable[Request]) -> None:
        pass

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._queue)


engine = LLMEngine("demo", scheduling_policy=ShortestPromptFirst(), max_num_seqs=1)
for num_tokens in (300, 20, 100, 5):
    prompt = {"prompt_token_ids": [7] * num_tokens}
    engine.add_request(f"prompt of {num_tokens}", prompt, SamplingParams(max_tokens=4))
while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            print(output.request_id, "has ended")
