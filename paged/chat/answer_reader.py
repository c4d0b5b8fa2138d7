"""AnswerReader: the parts of one answer, from its text and its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..requests.request import CompletionOutput
from ..text.detokenizer import Detokenizer
from ..text.marked_text import pattern_of
from ..text.tokenizer import Tokenizer
from .parts import OutputParser, Part, ToolCallStart

# Within a marker that other tokens spell, so that a parser does not find it. No text has a lone surrogate.
BREAK = "\udc80"


class AnswerReader:
    """Reads one answer, either in pieces as they arrive or as a whole.

    parser: finds content, reasoning and calls in the text.
    tokens: tells special tokens from ordinary text that looks the same; None if the text has no special
        tokens.
    """

    def __init__(self, parser: OutputParser, tokens: TokenText | None = None) -> None:
        self._parser = parser
        self._tokens = tokens

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has a call, and the arguments of all its calls are complete."""
        return self._parser.has_whole_calls

    def read(self, completion: CompletionOutput) -> list[Part]:
        """Return the parts of the answer that this delta or whole output completes."""
        text = completion.text
        if self._tokens is not None:
            text = self._tokens.take(text, completion.token_ids)
        parts = self._parser.feed(text)
        if completion.finish_reason is not None:
            parts += self._parser.finish()
        if self._tokens is not None and self._tokens.has_breaks:
            return [part for part in map(_unbroken, parts) if part is not None]
        return parts


def _unbroken(part: Part) -> Part | None:
    """Return a part without breaks; None if nothing is left."""
    if isinstance(part, ToolCallStart) or BREAK not in part.text:
        return part
    text = part.text.replace(BREAK, "")
    return replace(part, text=text) if text else None


class TokenText:
    """Tells the special tokens in the text of an answer from other tokens that spell them.

    Text without such a spelling, as most text is, is passed on without looking at its tokens.

    markers: special tokens that the parser reads.
    is_skipping: whether other special tokens are left out of the text.
    has_breaks: whether ordinary tokens have spelled a marker. `take` then broke the marker up in the text.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Collection[str], *, is_skipping: bool) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_token_ids
        self._markers = frozenset(markers)
        self._is_skipping = is_skipping
        self._pattern = pattern_of(markers)
        self._num_overlap = max(map(len, markers)) - 1
        self._detokenizer = Detokenizer(
            tokenizer,
            tokenizer.encode_bare("a"),  # the answer follows a prompt
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )
        self._pending = list[int]()  # tokens that are not decoded here yet
        self._has_pending_special = False
        self._num_decoded = 0  # characters of the decoded tokens
        self._found = deque[tuple[int, str]]()  # special tokens ahead: where they are in the text
        self._num_taken = 0
        self._tail = ""  # the end of the text so far, in which a marker may have begun
        self._is_aligned = True
        self.has_breaks = False

    def take(self, text: str, token_ids: Sequence[int]) -> str:
        """Take the next text of the answer and the tokens that arrived with it. Return the text to parse."""
        if not self._is_aligned:
            return text
        self._pending += token_ids
        if not self._special.isdisjoint(token_ids):
            self._has_pending_special = True
        window = self._tail + text
        if self._has_pending_special or self._found or self._pattern.search(window):
            self._decode()
            taken = self._marked(window, len(self._tail))
        else:
            taken = text
        self._num_taken += len(text)
        self._tail = window[-self._num_overlap :] if self._num_overlap else ""
        return taken

    def _decode(self) -> None:
        """Decode the tokens so far, and note where special tokens are."""
        run = list[int]()
        for token_id in self._pending:
            if token_id not in self._special:
                run.append(token_id)
                continue
            self._num_decoded += len(self._detokenizer.extend(run))
            run.clear()
            self._num_decoded += len(self._detokenizer.append(token_id))
            text = self._tokenizer.token_text(token_id)
            self._found.append((self._num_decoded - len(text), text))
        self._num_decoded += len(self._detokenizer.extend(run))
        self._pending.clear()
        self._has_pending_special = False

    def _marked(self, window: str, start: int) -> str:
        """Return the text of a window from `start` on, with spelled markers broken.

        Other special tokens are cut out.
        """
        base = self._num_taken - start  # where the window begins in the text of the answer
        end = base + len(window)
        real = set[int]()
        cuts = list[tuple[int, int, str]]()  # from, to, and what takes the place
        while self._found and self._found[0][0] + len(self._found[0][1]) <= end:
            at, text = self._found.popleft()
            if not window.startswith(text, at - base):
                self._is_aligned = False  # not decoded here as it was there
                return window[start:]
            if text in self._markers:
                real.add(at - base)
            elif self._is_skipping:
                cuts.append((max(at - base, start), at - base + len(text), ""))
        for match in self._pattern.finditer(window):
            if match.end() > start and match.start() not in real:
                place = max(match.start() + 1, start)
                cuts.append((place, place, BREAK))
                self.has_breaks = True
        pieces = list[str]()
        for first, last, text in sorted(cuts):
            pieces += [window[start:first], text]
            start = last
        return "".join([*pieces, window[start:]])
