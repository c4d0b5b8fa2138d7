"""Log-probabilities in the forms of OpenAI's API: at each place of a text, the token and other candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...requests.request import Logprob
from ...text.detokenizer import Detokenizer
from ...text.tokenizer import REPLACEMENT
from ..jobs import finite

if TYPE_CHECKING:
    from ...text.tokenizer import Tokenizer

Place = Mapping[int, Logprob]  # by token id, the token at the place first


def token_name(token_id: int, candidate: Logprob, *, as_ids: bool) -> str:
    """Return a token as a response names it: by its text or, with as_ids, by its id."""
    return f"token_id:{token_id}" if as_ids else candidate.decoded_token or ""


def chat_places(
    places: Sequence[Place], num_top: int, decoding: Decoding, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return a chat's log-probabilities: per position, of the token and the num_top most likely tokens."""

    def described(token_id: int, candidate: Logprob) -> dict[str, Any]:
        name = token_name(token_id, candidate, as_ids=as_ids)
        bytes_ = decoding.bytes_of(token_id, candidate)
        return {"token": name, "logprob": finite(candidate.logprob), "bytes": bytes_}

    content = []
    for place in places:
        chosen, *_ = candidates = [*place.items()]
        # The chosen token need not be among the most likely ones.
        top = sorted(candidates, key=lambda item: item[1].rank)[:num_top]
        content.append({**described(*chosen), "top_logprobs": [described(*item) for item in top]})
    return {"content": content}


@dataclass(frozen=True, slots=True)
class Decoding:
    """Converts the tokens of an answer to its text.

    tokenizer: None if no text is made.
    """

    tokenizer: Tokenizer | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer | None:
        """Return a detokenizer for an answer to a prompt."""
        if self.tokenizer is None:
            return None
        return Detokenizer(
            self.tokenizer,
            prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
        )

    def bytes_of(self, token_id: int, candidate: Logprob) -> list[int] | None:
        """Return the bytes that a token adds to the text; None if they are unknown.

        The bytes of all tokens of an answer, joined, are its text in UTF-8. Special tokens that are left out
        of the text have no bytes.
        """
        tokenizer = self.tokenizer
        text = candidate.decoded_token or ""
        if tokenizer is not None:
            if self.skip_special_tokens and token_id in tokenizer.special_token_ids:
                return []
            if tokenizer.token_bytes is not None:
                return [*tokenizer.token_bytes[token_id]]
        # The token may be a part of a character, whose bytes its text does not give.
        return None if REPLACEMENT in text else [*text.encode("utf-8", "surrogatepass")]


class CompletionPlaces:
    """Makes the log-probabilities of a completion, with text offsets that continue from delta to delta.

    An offset is the number of characters before a token in the returned text. Incomplete characters, and
    special tokens that are left out, do not count.

    prompt_token_ids: the token ids of the prompt that is completed.
    as_ids: whether tokens are named by their ids.
    """

    def __init__(self, decoding: Decoding, prompt_token_ids: Sequence[int], *, as_ids: bool = False) -> None:
        self._as_ids = as_ids
        self._offset = 0
        self._prompt_token_ids = prompt_token_ids
        self._detokenizer = decoding.detokenizer(prompt_token_ids)

    def of_prompt(
        self, places: Sequence[Place | None], text: str, tokenizer: Tokenizer, *, is_text: bool
    ) -> dict[str, Any]:
        """Return the log-probabilities of the prompt's tokens. Later offsets continue from the prompt's end.

        places: the log-probabilities at each position; None for the first token.
        text: the prompt as the response repeats it.
        is_text: whether the prompt was given as text. Special tokens that were added are then not in `text`.
        """
        offsets = prompt_offsets(text, self._prompt_token_ids, tokenizer, is_text=is_text)
        found = _Lists()
        for token_id, place, offset in zip(self._prompt_token_ids, places, offsets, strict=False):
            if place is None:
                candidate = Logprob(0.0, 0, tokenizer.token_text(token_id, first=True))
                found.add(self._name(token_id, candidate), None, None, offset)
                continue
            # At the beginning of a text, some tokenizers drop a space.
            is_first = is_text and not offset
            self._add(found, _as_first(place, tokenizer) if is_first else place, offset)
        self._offset = len(text)
        return found.as_json()

    def of(self, places: Sequence[Place]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens."""
        found = _Lists()
        for place in places:
            token_id, chosen = next(iter(place.items()))
            piece = "" if self._detokenizer is None else self._detokenizer.append(token_id)
            self._add(found, place, self._offset + _num_before(piece, chosen.decoded_token))
            self._offset += len(piece)
        return found.as_json()

    def _add(self, found: _Lists, place: Place, offset: int) -> None:
        token_id, chosen = next(iter(place.items()))
        found.add(self._name(token_id, chosen), finite(chosen.logprob), self._top(place), offset)

    def _name(self, token_id: int, candidate: Logprob) -> str:
        return token_name(token_id, candidate, as_ids=self._as_ids)

    def _top(self, place: Place) -> dict[str, float]:
        """Return the candidates by name. Of those with the same text, the most likely one counts."""
        top = dict[str, float]()
        for token_id, candidate in place.items():
            name = self._name(token_id, candidate)
            logprob = finite(candidate.logprob)
            top[name] = max(logprob, top.get(name, logprob))
        return top


@dataclass(slots=True)
class _Lists:
    """The parallel lists of a completion's log-probabilities: each has an entry for each token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def _as_first(place: Place, tokenizer: Tokenizer) -> Place:
    """Return a place with the texts of its candidates at the beginning of a text, unless they have none."""
    return {
        i: replace(c, decoded_token=c.decoded_token and tokenizer.token_text(i, first=True))
        for i, c in place.items()
    }


def prompt_text(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a prompt that was given as token ids, with its special tokens."""
    detokenizer = _prompt_detokenizer(tokenizer)
    return detokenizer.extend(token_ids) + detokenizer.finish()


def _prompt_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    return Detokenizer(tokenizer, [], skip_special_tokens=False, spaces_between_special_tokens=False)


def prompt_offsets(
    text: str, token_ids: Sequence[int], tokenizer: Tokenizer, *, is_text: bool
) -> Iterator[int]:
    """Yield how many characters of a prompt precede each of its tokens.

    is_text: whether the prompt was given as text. Special tokens that were added are then not in `text`.
    """
    detokenizer = _prompt_detokenizer(tokenizer)
    offset = 0
    for token_id in token_ids:
        token = tokenizer.token_text(token_id)
        may_be_added = is_text and token_id in tokenizer.special_token_ids
        if may_be_added and not text.startswith(token, offset):
            yield offset
            continue
        piece = detokenizer.append(token_id)
        if is_text and not text.startswith(piece, offset):
            piece = piece.removeprefix(" ")  # which some tokenizers put before a text
        yield min(offset + _num_before(piece, token), len(text))
        offset = min(offset + len(piece), len(text))


def _num_before(piece: str, token: str | None) -> int:
    """Return how many characters of a piece of text belong to the tokens before the one that completes it.

    Such characters replace parts of a character that the token does not complete, or are a space.
    """
    return len(piece) - len(token) if token and piece.endswith(token) else 0


def prompt_places(places: Sequence[Place | None]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's format: at each position, a dict by token id."""
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
