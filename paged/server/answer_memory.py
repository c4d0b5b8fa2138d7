"""How much memory the answers hold that their readers have not taken yet, and what bounds it."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.async_options import CANDIDATE_BYTES, PAUSE_BYTES, TOKEN_BYTES
from ..errors import QueueFullError, RequestError
from ..sampling_params import RequestOutputKind, SamplingParams
from . import frames

RESUME_BYTES = PAUSE_BYTES // 4  # unread of the answers of one HTTP request when its engine goes on
MAX_ANSWER_BYTES = 256 * 2**20  # of an answer that is sent as a whole: there is nothing to read before
MAX_BYTES_IN_ALL = 512 * 2**20


class AnswerBudget:
    """Bytes that the answers of all requests hold.

    num_pauses: how often a request was paused, as its reader was slow.
    """

    def __init__(self, max_bytes: int = MAX_BYTES_IN_ALL, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self.max_bytes = max_bytes
        self.max_answer_bytes = max_answer_bytes
        self.num_bytes = 0
        self.num_pauses = 0

    @property
    def is_used_up(self) -> bool:
        """Whether answers hold more than they may."""
        return self.num_bytes > self.max_bytes

    def check(
        self, params: SamplingParams, num_prompt_tokens: int, *, max_model_len: int, vocab_size: int
    ) -> None:
        """Raise RequestError if a request asks for more than one answer may hold.

        Output tokens count only where max_tokens is given and all come at once: few requests without it
        generate as many as fit the context.
        """
        prompt_top, top = params.prompt_logprobs, params.logprobs
        if prompt_top is not None:
            size = num_prompt_tokens * _bytes_of_token(prompt_top, vocab_size)
            what = f"prompt_logprobs of {num_prompt_tokens:,} tokens would"
            self._check_size("prompt_logprobs", what, size, "ask for fewer")
        if top is not None and params.max_tokens is not None and not comes_in_parts(params.output_kind):
            most = min(params.max_tokens, max_model_len - num_prompt_tokens)
            size = most * params.num_samples * _bytes_of_token(top, vocab_size)
            what = f"logprobs of {params.num_samples:,} samples of {most:,} tokens could"
            self._check_size("logprobs", what, size, "ask for fewer, or stream the answer")

    def _check_size(self, param: str, what: str, size: int, way_out: str) -> None:
        if size > self.max_answer_bytes:
            mebibytes = (
                f"{size / 2**20:,.0f} MiB, and an answer has at most {self.max_answer_bytes / 2**20:,.0f}"
            )
            raise RequestError(f"{what} take {mebibytes}; {way_out}", param=param)


class AnswerAccount:
    """The bytes that the answers of one HTTP request hold: those of all its prompts and samples.

    num_bytes: held. num_unread: of these, those that a reader may take, and has not.
    """

    def __init__(self, budget: AnswerBudget) -> None:
        self.budget = budget
        self.num_bytes = 0
        self.num_unread = 0
        self._paused: dict[int, Callable[[], None]] = {}  # what lets each paused request go on, by its key

    def grow(self, num_bytes: int, *, readable: bool) -> None:
        """Count bytes that came. readable: whether a reader may take them now."""
        self.num_bytes += num_bytes
        self.budget.num_bytes += num_bytes
        self.num_unread += num_bytes if readable else 0

    def on_read(self, num_bytes: int) -> None:
        """Count bytes that the reader took, and let paused requests go on if it has taken most."""
        self.num_unread -= num_bytes
        if self._paused and self.num_unread <= RESUME_BYTES:
            resumed, self._paused = self._paused, {}
            for resume in resumed.values():
                resume()

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that are not held any more."""
        self.num_bytes -= num_bytes
        self.budget.num_bytes -= num_bytes

    @property
    def must_pause(self) -> bool:
        """Whether the requests of a reader should wait for it."""
        return self.num_unread > (0 if self.budget.is_used_up else PAUSE_BYTES)

    def pause(self, key: int, resume: Callable[[], None]) -> bool:
        """Note that a request is paused, and what lets it go on. Return False if it is paused already."""
        if key in self._paused:
            return False
        self._paused[key] = resume
        self.budget.num_pauses += 1
        return True

    def forget(self, key: int) -> None:
        """Drop a request that has ended."""
        self._paused.pop(key, None)

    def refusal(self) -> RequestError | None:
        """Return why an answer that is sent as a whole cannot grow further; None if it can."""
        if self.num_bytes > self.budget.max_answer_bytes:
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


def comes_in_parts(kind: RequestOutputKind) -> bool:
    """Return whether outputs can be read before the last one."""
    return kind is not RequestOutputKind.FINAL_ONLY


def size_of(output: frames.Output) -> int:
    """Return about how many bytes an output holds until it is read."""
    places = [place for place in output.prompt_logprobs or () if place is not None]
    size = 0
    for completion in output.completions:
        size += len(completion.text) + len(completion.token_ids) * TOKEN_BYTES
        places += completion.logprobs or ()
    return size + sum(len(token_ids) for token_ids, *_ in places) * CANDIDATE_BYTES


def _bytes_of_token(num_top: int, vocab_size: int) -> int:
    return TOKEN_BYTES + (1 + (vocab_size if num_top < 0 else num_top)) * CANDIDATE_BYTES
