"""KeyUsage: what one key has used, within its limits. Admission: what one HTTP request takes of them.

Window: how much was used in the last minute, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, NewType

from ...base.errors import QueueFullError, RequestError
from ...options.sampling_params import SamplingParams
from .key_file import KeyEntry

WINDOW_S = 60.0
MOST_EXPIRED = 1024  # uses that count no more and are still in the lists
Use = NewType("Use", int)  # the number of an addition to a window


class Window:
    """The usage within the last WINDOW_S seconds. Callers pass the time, which must never go back.

    used: the sum. Call `expire` before reading it.
    """

    def __init__(self) -> None:
        # Plain lists of numbers: a busy key has many, and the garbage collector need not look at them.
        self._untils: list[float] = []  # when each use counts no more, in order
        self._amounts: list[int] = []
        self._first = 0  # the place of the first that counts
        self._num_dropped = 0  # uses that are in the lists no more
        self.used = 0

    def expire(self, now: float) -> None:
        """Forget uses that are WINDOW_S seconds old or older."""
        untils = self._untils
        first = self._first
        while first < len(untils) and untils[first] <= now:
            self.used -= self._amounts[first]
            first += 1
        self._first = first
        if first > MOST_EXPIRED and first > len(untils) // 2:
            del self._untils[:first]
            del self._amounts[:first]
            self._num_dropped += first
            self._first = 0

    def add(self, amount: int, now: float) -> Use:
        """Count an amount from now on. Return the use, which `change` accepts."""
        self._untils.append(now + WINDOW_S)
        self._amounts.append(amount)
        self.used += amount
        return Use(self._num_dropped + len(self._amounts) - 1)

    def change(self, use: Use, amount: int, now: float) -> None:
        """Replace the amount of an earlier use, unless the use has left the window."""
        self.expire(now)
        place = use - self._num_dropped
        if place >= self._first:
            self.used += amount - self._amounts[place]
            self._amounts[place] = amount

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Return the seconds until an amount will fit below a limit. The amount must not exceed the limit."""
        self.expire(now)
        excess = self.used + amount - limit
        place = self._first
        while excess > 0:
            excess -= self._amounts[place]
            place += 1
        return self._untils[place - 1] - now if place > self._first else 0.0

    def reset_s(self, now: float) -> float:
        """Return the seconds until the window will be empty."""
        self.expire(now)
        return self._untils[-1] - now if self._first < len(self._untils) else 0.0

    def check(self) -> None:
        """Check that the sum covers every use in the window, and that the oldest use comes first."""
        assert self.used == sum(self._amounts[self._first :])
        assert self._untils == sorted(self._untils)
        assert len(self._untils) == len(self._amounts)


_LIMIT, _REMAINING, _RESET = (
    {what: b"x-ratelimit-%b-%b" % (name, what) for what in (b"requests", b"tokens")}
    for name in (b"limit", b"remaining", b"reset")
)
Clock = Callable[[], float]
Header = tuple[bytes, bytes]


class RateLimitError(QueueFullError):
    """A limit of the key is reached. The same request will be admitted in retry_after_s seconds."""

    CODE = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


class KeyUsage:
    """The requests and tokens of one key in the last minute, and its requests in progress.

    entry: the key's line in the file; replaced when the file is read again.
    clock: returns the time in seconds, as time.monotonic does.
    """

    def __init__(self, entry: KeyEntry, clock: Clock) -> None:
        self.entry = entry
        self._clock = clock
        self._requests = Window()
        self._tokens = Window()
        self.num_open = 0
        self.num_sequences = 0

    def admit(self) -> Admission:
        """Count an HTTP request as in progress. Raises RateLimitError if a limit is reached."""
        entry = self.entry
        most = entry.concurrent_requests
        if most is not None and self.num_open >= most:
            raise RateLimitError(
                f"{self.num_open} requests of this key are in progress and {most} may be; try again when one "
                "has ended",
                1,
            )
        use = self._take(self._requests, 1, entry.requests_per_minute, "requests")
        self.num_open += 1
        return Admission(self, use)

    def begin_sequences(self, num: int) -> None:
        """Count sequences as in progress.

        Raises RateLimitError, or RequestError for more sequences than the key may ever have at once.
        """
        most = self.entry.concurrent_sequences
        if most is not None and num > most:
            raise RequestError(
                f"this request has {num:,} sequences, prompts times samples, and this key may have {most:,}; "
                "send fewer in a request"
            )
        if most is not None and self.num_sequences + num > most:
            raise RateLimitError(
                f"{self.num_sequences:,} sequences of this key are in progress, {num:,} more are wanted and "
                f"{most:,} may be; try again when some have ended",
                1,
            )
        self.num_sequences += num

    def reserve(self, num_tokens: int) -> Use | None:
        """Count tokens before they are computed. Return None if the key has no limit.

        Raises RateLimitError, or RequestError for more tokens than the key has per minute.
        """
        most = self.entry.tokens_per_minute
        if most is not None and num_tokens > most:
            raise RequestError(
                f"prompt and output may need {num_tokens:,} tokens, and this key has {most:,} a minute; "
                "shorten the prompt, or give a smaller max_tokens"
            )
        return self._take(self._tokens, num_tokens, most, "tokens")

    def _take(self, window: Window, amount: int, limit: int | None, what: str) -> Use | None:
        if limit is None:
            return None
        now = self._clock()
        window.expire(now)
        if window.used + amount > limit:
            wait_s = window.wait_s(amount, limit, now)
            raise RateLimitError(
                f"this key has {limit:,} {what} a minute, {window.used:,} of them are used and {amount:,} "
                f"more are wanted; try again in {max(1, math.ceil(wait_s))} s",
                wait_s,
            )
        return window.add(amount, now)

    def end(self, request: Use | None, num_sequences: int, *, is_counted: bool) -> None:
        """End a request in progress.

        is_counted: whether the request counts towards the limit per minute.
        """
        self.num_open -= 1
        self.num_sequences -= num_sequences
        if request is not None and not is_counted:
            self._requests.change(request, 0, self._clock())

    def settle(self, reserved: Use, num_reserved: int, num_used: int) -> None:
        """Replace reserved tokens by the tokens used. Tokens beyond the reservation count from now on."""
        now = self._clock()
        if num_used > num_reserved:
            self._tokens.add(num_used - num_reserved, now)
        else:
            self._tokens.change(reserved, num_used, now)

    def headers(self) -> list[Header]:
        """Return OpenAI's headers about limits: each limit, the rest, and when it is fully available."""
        entry = self.entry
        return [
            *self._headers_of(b"requests", self._requests, entry.requests_per_minute),
            *self._headers_of(b"tokens", self._tokens, entry.tokens_per_minute),
        ]

    def _headers_of(self, what: bytes, window: Window, limit: int | None) -> tuple[Header, ...]:
        if limit is None:
            return ()
        reset_s = window.reset_s(self._clock())  # what counts no more is forgotten
        return (
            (_LIMIT[what], b"%d" % limit),
            (_REMAINING[what], b"%d" % max(0, limit - window.used)),
            (_RESET[what], b"%.3fs" % reset_s),
        )

    def check(self) -> None:
        """Check that the counts of requests in progress and the windows are consistent."""
        assert self.num_open >= 0
        assert self.num_sequences >= 0
        assert self.num_open or not self.num_sequences, "sequences of no request"
        self._requests.check()
        self._tokens.check()


class _Reserved(NamedTuple):
    num_prompt_tokens: int
    num_tokens: int
    use: Use


class Admission:
    """One HTTP request within the limits of its key, from its body to its end."""

    def __init__(self, usage: KeyUsage, request: Use | None) -> None:
        self._usage = usage
        self._request = request
        self._reserved: dict[str, _Reserved] = {}  # by the id of the engine's request
        self._num_sequences = 0
        self._is_open = True

    def begin_sequences(self, num: int) -> None:
        """Count engine sequences as in progress until the request ends.

        Raises RateLimitError, or RequestError for more sequences than the key may ever have at once.
        """
        self._usage.begin_sequences(num)
        self._num_sequences += num

    def reserve(self, request_id: str, num_prompt_tokens: int, num_new_tokens: int) -> None:
        """Reserve tokens for one engine request, before it is sent to the engine.

        Raises RateLimitError, or RequestError for more tokens than the key has per minute.
        """
        num_tokens = num_prompt_tokens + num_new_tokens
        use = self._usage.reserve(num_tokens)
        if use is not None:
            self._reserved[request_id] = _Reserved(num_prompt_tokens, num_tokens, use)

    def close(self, num_generated: Mapping[str, int], *, was_refused: bool, is_counted: bool) -> None:
        """End the admission: give back reserved tokens that were not used.

        num_generated: the number of new tokens of each engine request that gave an output.
        was_refused: whether the engine refused the other requests. Their prompts were then not computed
            either.
        is_counted: whether the HTTP request counts towards the limit per minute.
        """
        if not self._is_open:
            return
        self._is_open = False
        for request_id, reserved in self._reserved.items():
            num_used = reserved.num_prompt_tokens + num_generated.get(request_id, 0)
            if was_refused and request_id not in num_generated:
                num_used = 0
            self._usage.settle(reserved.use, reserved.num_tokens, num_used)
        self._usage.end(self._request, self._num_sequences, is_counted=is_counted)


def num_new_tokens(params: SamplingParams, num_prompt_tokens: int, most: int, max_model_len: int) -> int:
    """Return how many tokens to reserve for a request's output: at most `most` for each sample."""
    longest = min(most, max(0, max_model_len - num_prompt_tokens))
    if params.max_tokens is not None:
        longest = min(longest, params.max_tokens)
    return longest * params.num_samples
