"""Log-probabilities in the forms of OpenAI's API: at each place of a text, the token and other candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...requests.request import Logprob
from ..jobs import finite

Place = Mapping[int, Logprob]  # by token id, the token at the place first


def token_name(token_id: int, candidate: Logprob, *, as_ids: bool) -> str:
    """Return how a response names a token: its text or, for programs, its id."""
    return f"token_id:{token_id}" if as_ids else candidate.decoded_token or ""


def chat_places(places: Sequence[Place], num_top: int, *, as_ids: bool = False) -> dict[str, Any]:
    """Return the log-probabilities of a chat: of each token and the num_top most likely ones."""
    content = []
    for place in places:
        chosen, *_ = candidates = [*place.items()]
        # The chosen token need not be among the most likely ones.
        top = sorted(candidates, key=lambda item: item[1].rank)[:num_top]
        top_logprobs = [_candidate(*item, as_ids=as_ids) for item in top]
        content.append({**_candidate(*chosen, as_ids=as_ids), "top_logprobs": top_logprobs})
    return {"content": content}


def _candidate(token_id: int, candidate: Logprob, *, as_ids: bool) -> dict[str, Any]:
    token = candidate.decoded_token or ""
    # The token may be a part of a character, whose bytes its text does not give.
    bytes_ = None if "\ufffd" in token else list(token.encode("utf-8", "surrogatepass"))
    name = token_name(token_id, candidate, as_ids=as_ids)
    return {"token": name, "logprob": finite(candidate.logprob), "bytes": bytes_}


class CompletionPlaces:
    """The log-probabilities of a completion, whose offsets count on from one delta to the next.

    as_ids: name tokens by their ids.
    """

    def __init__(self, *, as_ids: bool = False) -> None:
        self._as_ids, self._offset = as_ids, 0

    def of(
        self, places: Sequence[Place | None], first_token: str = "", first_length: int = 0
    ) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens.

        places: None for the first token of a prompt, which has no log-probability.
        first_token: the name of that token.
        first_length: how many characters of the text are its own.
        """
        tokens, logprobs, offsets = list[str](), list[float | None](), list[int]()
        tops = list[dict[str, float] | None]()
        for place in places:
            if place is None:
                token, length, logprob, top = first_token, first_length, None, None
            else:
                token_id, chosen = next(iter(place.items()))
                token, length = self._name(token_id, chosen), len(chosen.decoded_token or "")
                logprob, top = finite(chosen.logprob), self._top(place)
            tokens.append(token)
            logprobs.append(logprob)
            tops.append(top)
            offsets.append(self._offset)
            self._offset += length
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token_id: int, candidate: Logprob) -> str:
        return token_name(token_id, candidate, as_ids=self._as_ids)

    def _top(self, place: Place) -> dict[str, float]:
        """Return the candidates by name. Of those with the same text, the most likely one counts."""
        top = dict[str, float]()
        for token_id, candidate in place.items():
            name, logprob = self._name(token_id, candidate), finite(candidate.logprob)
            top[name] = max(logprob, top.get(name, logprob))
        return top


def prompt_places(places: Sequence[Place | None]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's form: candidates by token id at each place."""
    return [
        None
        if place is None
        else {
            str(token_id): {
                "logprob": finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token_id, candidate in place.items()
        }
        for place in places
    ]
