"""How much memory the answers hold that their readers have not taken yet, and what bounds it."""

from __future__ import annotations

from collections.abc import Callable

from ..base.errors import QueueFullError, RequestError
from ..options.sampling_params import RequestOutputKind, SamplingParams

# About what is held of an answer until it is read.
TOKEN_BYTES = 40
CANDIDATE_BYTES = 200
PAUSE_BYTES = 2**20  # unread: the request computes nothing until its reader has read
RESUME_BYTES = PAUSE_BYTES // 4  # unread of the answers of one HTTP request when its engines go on
MAX_ANSWER_BYTES = 256 * 2**20  # of an answer that is sent as a whole: there is nothing to read before
MAX_BYTES_IN_ALL = 512 * 2**20
# Holds requests of these keys, or lets them go on.
Hold = Callable[[list[int], bool], None]


class AnswerBudget:
    """The memory that the unread answers of all requests occupy, and its limit.

    num_pauses: how many times a request was paused because its reader was slow.
    """

    def __init__(self, max_bytes: int = MAX_BYTES_IN_ALL, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_answer_bytes = max_answer_bytes
        self.num_bytes = 0
        self.num_pauses = 0

    @property
    def is_used_up(self) -> bool:
        """Whether answers occupy more memory than the limit."""
        return self.num_bytes > self.max_bytes


class AnswerAccount:
    """The bytes that the answers to one HTTP request occupy, over all its prompts and samples.

    is_whole: whether all answers are sent together once they are finished.
    num_bytes: the number of bytes.
    num_unread: how many of the bytes the reader has not yet sent on.
    """

    def __init__(self, budget: AnswerBudget, *, is_whole: bool = True) -> None:
        self.budget = budget
        self.is_whole = is_whole
        self.num_bytes = 0
        self.num_unread = 0
        self._num_expected = 0
        self._going: dict[int, Hold] = {}  # what holds each unfinished request, by its key
        self._held: dict[int, Hold] = {}
        self._is_unread = False  # too much is: all are held
        self._is_full = False  # all are held but the first, whose end frees memory

    @property
    def is_paused(self) -> bool:
        """Whether all requests of the account are held, because the reader is too far behind."""
        return self._is_unread

    def expect(
        self, params: SamplingParams, num_prompt_tokens: int, *, max_model_len: int, vocab_size: int
    ) -> None:
        """Add a prompt. Raise RequestError if its answer could exceed the limit.

        Output tokens count only if max_tokens is given and the whole answer is sent at once. Without
        max_tokens, few requests fill the context.
        """
        prompt_top = params.prompt_logprobs
        top = params.logprobs
        size = 0 if not self.is_whole else self._num_expected
        if prompt_top is not None:
            size += num_prompt_tokens * _bytes_of_token(prompt_top, vocab_size)
            what = f"prompt_logprobs of {num_prompt_tokens:,} tokens would"
            self._check_size("prompt_logprobs", what, size, "ask for fewer")
        if top is not None and params.max_tokens is not None and not comes_in_parts(params.output_kind):
            most = min(params.max_tokens, max_model_len - num_prompt_tokens)
            size += most * params.num_samples * _bytes_of_token(top, vocab_size)
            what = f"logprobs of {params.num_samples:,} samples of {most:,} tokens could"
            self._check_size("logprobs", what, size, "ask for fewer, or stream the answer")
        self._num_expected = size

    def _check_size(self, param: str, what: str, size: int, way_out: str) -> None:
        most = self.budget.max_answer_bytes
        if size > most:
            before = ", with all before them," if self.is_whole and self._num_expected else ""
            mebibytes = f"{size / 2**20:,.0f} MiB, and an answer has at most {most / 2**20:,.0f}"
            raise RequestError(f"{what}{before} take {mebibytes}; {way_out}", param=param)

    def join(self, key: int, hold: Hold) -> None:
        """Add an unfinished request. If requests of the account are held, this one is held at once."""
        self._going[key] = hold
        self._balance()

    def leave(self, key: int) -> None:
        """Drop a request that has ended."""
        self._going.pop(key, None)
        self._held.pop(key, None)
        self._balance()

    def grow(self, num_bytes: int, num_unread: int) -> None:
        """Add to the bytes held and to the unread bytes. Negative numbers subtract."""
        self.num_bytes += num_bytes
        self.budget.num_bytes += num_bytes
        self.num_unread += num_unread
        self._balance()

    def _balance(self) -> None:
        """Hold requests whose reader is slow, and requests beyond the number that may grow at once."""
        if self.is_whole:
            return
        budget = self.budget
        mark = 0 if budget.is_used_up else PAUSE_BYTES
        self._is_unread = self.num_unread > (min(mark, RESUME_BYTES) if self._is_unread else mark)
        mark = PAUSE_BYTES if budget.is_used_up else budget.max_answer_bytes // 2
        self._is_full = self.num_bytes > (mark // 2 if self._is_full else mark)
        if self._is_unread:
            self._let_go_on(0)
        elif self._is_full:
            self._let_go_on(1)
        else:
            self._let_go_on(len(self._going) + len(self._held))

    def _let_go_on(self, num: int) -> None:
        """Hold all requests but `num`, preferably the first that run now, else the first that are held."""
        num_more = num - len(self._going)
        if num_more < 0:
            self._move(sorted(self._going)[num:], self._going, self._held, is_held=True)
            self.budget.num_pauses -= num_more
        elif num_more and self._held:
            self._move(sorted(self._held)[:num_more], self._held, self._going, is_held=False)

    @staticmethod
    def _move(keys: list[int], source: dict[int, Hold], target: dict[int, Hold], *, is_held: bool) -> None:
        keys_of: dict[Hold, list[int]] = {}
        for key in keys:
            hold = target[key] = source.pop(key)
            keys_of.setdefault(hold, []).append(key)
        for hold, its_keys in keys_of.items():
            hold(its_keys, is_held)

    def refusal(self, num_own: int) -> RequestError | None:
        """Return the error of an answer that is sent as a whole and has become too large; None if it fits.

        num_own: the bytes of this prompt's answer. If each prompt is answered separately, only these bytes
            count.
        """
        if (self.num_bytes if self.is_whole else num_own) > self.budget.max_answer_bytes:
            return RequestError(
                f"the answer with its log-probabilities takes more than "
                f"{self.budget.max_answer_bytes / 2**20:,.0f} MiB; ask for fewer, or stream it"
            )
        if self.budget.is_used_up:
            return QueueFullError(
                f"the answers in progress take more than {self.budget.max_bytes / 2**20:,.0f} MiB together; "
                "try again later, ask for fewer log-probabilities, or stream the answer"
            )
        return None


class AnswerLedger:
    """The bytes of the answer to one prompt. Every change is added to the account of the HTTP request.

    An output is unread when it arrives, taken when the reader gets it, and released when the reader has sent
    it on. The log-probabilities of a prompt are part of every output, and stay until the end.

    num_bytes: the number of bytes.
    """

    def __init__(self, account: AnswerAccount, *, comes_in_parts: bool) -> None:
        self.account = account
        self.num_bytes = 0
        self._comes_in_parts = comes_in_parts
        self._num_prompt = 0  # of num_bytes, those of the prompt
        self._num_early = 0  # of the prompt, those that the reader can take only with the next output
        self._num_unread = 0
        self._num_taken = 0
        self._num_released = 0  # what is dropped by `release`

    def add_prompt(self, size: int) -> None:
        """Add log-probabilities of the prompt, which arrive before the first output with tokens.

        They do not count as unread, since a request that was paused because of them could never produce that
        output.
        """
        self._num_prompt += size
        self._num_early += size
        self._grow(size, 0)

    def drop_prompt(self) -> None:
        """Drop the log-probabilities of a prompt, before its first output with tokens."""
        self._grow(-self._num_prompt, 0)
        self._num_prompt = 0
        self._num_early = 0

    def add_output(self, size: int, *, is_last: bool) -> None:
        """Add an output."""
        num_unread = 0
        if self._comes_in_parts:
            num_unread = size + self._num_early
            self._num_early = 0
        elif is_last:
            num_unread = self.num_bytes + size
        self._num_unread += num_unread
        self._grow(size, num_unread)

    def replace_outputs(self) -> None:
        """Drop all outputs, because the next output includes their tokens."""
        self._grow(self._num_prompt - self.num_bytes, -self._num_unread)
        self._num_unread = 0

    def take(self, *, is_delta: bool) -> None:
        """Mark all bytes as taken by the reader. `release` then drops them if outputs are deltas."""
        self._num_taken += self._num_unread
        self._num_unread = 0
        if is_delta:
            self._num_released = self.num_bytes - self._num_prompt

    def release(self) -> None:
        """Drop the taken bytes, once the reader has sent them on."""
        if self._num_taken:
            self._grow(-self._num_released, -self._num_taken)
        self._num_released = 0
        self._num_taken = 0

    def clear(self) -> None:
        """Drop everything, once the reader is gone."""
        self._grow(-self.num_bytes, -(self._num_unread + self._num_taken))
        self._num_unread = 0
        self._num_released = 0
        self._num_taken = 0

    def refusal(self) -> RequestError | None:
        """Return the error of an answer that is sent as a whole and has become too large; None if it fits."""
        return None if self._comes_in_parts else self.account.refusal(self.num_bytes)

    def _grow(self, num_bytes: int, num_unread: int) -> None:
        self.num_bytes += num_bytes
        self.account.grow(num_bytes, num_unread)


def comes_in_parts(kind: RequestOutputKind) -> bool:
    """Return whether outputs of this kind can be read before the request is finished."""
    return kind is not RequestOutputKind.FINAL_ONLY


def _bytes_of_token(num_top: int, vocab_size: int) -> int:
    return TOKEN_BYTES + (1 + (vocab_size if num_top < 0 else num_top)) * CANDIDATE_BYTES
