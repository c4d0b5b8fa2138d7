"""DraftLengths: how many drafts a step verifies. Ledger: what that has won and lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

from ..requests.request import Request
from .acceptance import Acceptance
from .drafter import Draft
from .step_times import StepTimes

MARGIN = 1.02  # how much faster tokens must be expected to come with drafts than without
SHARE = 0.005  # of all time that may be lost, beside the allowance
ALLOWANCE = 64.0  # plain steps
MOST_LOST = 32.0  # plain steps that one step may have lost: not all of what is above is due to drafts
MOST_BELOW = 0.5  # of its estimate that a step may take when it is tried
TRY_EVERY = 32  # steps: how often a number of rows is tried that may be better than the best known
REFRESH_EVERY = 96  # steps with drafts, after which plain steps are measured again
PATIENCE = 16  # guesses without a gain before they become rarer
PROBING = 0.003  # the share of time that guesses may take then
SEARCHING = 0.006  # the same where none were found
MEASURED = 16  # of so many plain steps in a row one is measured, as that takes time itself
MOST_DOUBLINGS = 8
SLOW = 0.2  # of a plain step: guesses that take longer get a limit
FIRST_LIMIT = 2  # the guess that chooses the first limit
LIMIT_EVERY = 8  # guesses
WEIGHT = 2  # guesses that one counts as which takes a plain step and wins nothing

OTHER, PLAIN_DECODE, DRAFTS = range(3)  # kinds of steps


class Ledger:
    """The seconds that drafts have saved and cost, including steps that only try drafts out.

    won: the seconds saved so far; negative if drafts have cost more than they saved.
    balance: the seconds that may be lost now. It grows by SHARE of all time and by the time saved, up to the
        time of ALLOWANCE steps.
    """

    def __init__(self) -> None:
        self.won = 0.0
        self.balance = float("inf")  # before the first step
        self._most = 0.0

    @property
    def may_try(self) -> bool:
        """Whether steps of unknown duration may be tried."""
        return self.balance > self._most / 4

    def add(self, won: float, seconds: float, plain: float) -> None:
        """Add a step to the account.

        won: the seconds that the step saved. seconds, plain: the duration of this step, and of a step without
            drafts.
        """
        self.won += won
        self._most = ALLOWANCE * plain
        self.balance = min(self.balance + won + SHARE * seconds, self._most)


class DraftLengths:
    """Chooses how many draft tokens a step verifies, to maximize the expected tokens per second.

    The choice uses measured step times and acceptance rates. It is zero if a step without drafts is expected
    to be faster.

    most: maximum number of draft tokens of a request.
    seed: passed to `StepTimes`.
    clock: returns the time in seconds.

    limit: the length of the longest draft that is worth proposing; below `most` if the drafter is slow.
    is_idle: whether the current decode step has nothing to teach, so that `end_step` may be skipped.
    """

    def __init__(self, most: int, seed: Callable[[int], float], clock: Callable[[], float]) -> None:
        self.acceptance = Acceptance(most)
        self.times = StepTimes(most, seed)
        self.ledger = Ledger()
        self.limit = 1  # until it is known how long guesses take
        self.is_idle = False
        self._most = most
        self._clock = clock
        self._step = 0
        self._num_misses = 0  # guesses in a row that won nothing
        self._guess_at = 0  # the step of the next guess
        self._try_at = 0  # the next step of which rows may be tried
        self._num_since_plain = 0  # steps with drafts since plain ones were measured
        self._last = OTHER  # what the last step was
        self._started = 0.0  # when the step's guesses began
        self._guessing = 0.0  # the seconds that they took; 0 if there were none
        self._has_found = False  # whether there were any
        self._num_guesses = 0
        self._usual: dict[int, float] = {}  # by the limit, the same in most steps: a new request takes more

    def begin_step(self) -> bool:
        """Begin a decode step. Return whether drafts may help in it; if so, call `wants_guesses` next."""
        self._step += 1
        self._guessing = 0.0
        if self._step >= self._guess_at:
            self.is_idle = False
            return True
        self.is_idle = self._last == PLAIN_DECODE and not self._num_since_plain and self._step % MEASURED > 0
        return False

    def wants_guesses(self, num_requests: int, context: int) -> bool:
        """Return whether drafts should be proposed.

        context: the requests' mean number of computed tokens.
        """
        if self.ledger.balance <= 0:
            return False
        if self._num_since_plain >= REFRESH_EVERY or self.times.plain(num_requests, context) is None:
            return False  # until a plain step behind a plain step was measured
        self._started = self._clock()
        self.acceptance.learn()
        return True

    def choose(
        self, requests: Sequence[Request], drafts: Sequence[Draft], num_requests: int, context: int, left: int
    ) -> list[int]:
        """Return the number of tokens to verify of each proposed draft.

        num_requests: the number of requests in the step, including those without a draft.
        left: maximum number of draft tokens that the step has room for.
        """
        counts = self._counts(drafts, num_requests, context, left)
        self.acceptance.watch(requests, drafts)
        self._guessing = self._clock() - self._started
        self._num_guesses += 1
        usual = self._usual.get(self.limit, self._guessing)
        if self._num_guesses <= LIMIT_EVERY:
            self._usual[self.limit] = min(usual, self._guessing)
        else:
            self._usual[self.limit] = usual + (min(self._guessing, 2 * usual) - usual) / 8
        if self._num_guesses == FIRST_LIMIT or (self._has_found and self._num_guesses % LIMIT_EVERY == 0):
            self._choose_limit(drafts, num_requests, context, left)
        return counts

    def _guessing_of(self, limit: int) -> float:
        """Return the seconds of guesses of so many tokens, measured or as if each token took its time."""
        known = self._usual.get(limit)
        return self._usual.get(self.limit, 0.0) * (1 + limit) / (1 + self.limit) if known is None else known

    def _choose_limit(self, drafts: Sequence[Draft], num_requests: int, context: int, left: int) -> None:
        """Choose the length of the next drafts, where long ones take long to guess."""
        plain = self.times.plain(num_requests, context)
        if plain is None or self._guessing_of(self._most) <= SLOW * plain:
            self.limit = self._most
            return
        chances = [self.acceptance.longest_chances(draft) for draft in drafts]
        best = self._most
        best_rate = 0.0
        for limit in range(1, self._most + 1):
            ranked = sorted(chain.from_iterable(each[:limit] for each in chances), reverse=True)
            guessing = self._guessing_of(limit)
            rate = self._best(ranked[:left], num_requests, context, guessing)[1]
            if rate > best_rate:
                best_rate = rate
                best = limit
        self.limit = best

    def _counts(self, drafts: Sequence[Draft], num_requests: int, context: int, left: int) -> list[int]:
        """Return how many tokens of each draft to verify: the likeliest ones."""
        self._has_found = any(draft.tokens for draft in drafts)
        if not self._has_found:
            return [0] * len(drafts)
        chances = [self.acceptance.chances(draft) for draft in drafts]
        ranked = sorted(chain.from_iterable(chances), reverse=True)
        num, _ = self._best(ranked[:left], num_requests, context, self._guessing_of(self.limit))
        if not num:
            return [0] * len(drafts)
        least = ranked[num - 1]
        # A draft's chances fall from token to token, so those above `least` are its first.
        counts = []
        for each in chances:
            count = 0
            for chance in each:
                if chance < least:
                    break
                count += 1
            counts.append(count)
        surplus = sum(counts) - num  # as several are equal to `least`
        for i in reversed(range(len(counts))):
            while surplus and counts[i] and chances[i][counts[i] - 1] == least:
                counts[i] -= 1
                surplus -= 1
        return counts

    def _best(
        self, ranked: Sequence[float], num_requests: int, context: int, guessing: float
    ) -> tuple[int, float]:
        """Return how many drafts make tokens come fastest, and how many tokens come then in a second.

        ranked: the probability of each draft token to be accepted, the highest first.
        guessing: the seconds of the drafter.
        """
        plain = self.times.plain(num_requests, context)
        assert plain is not None, "guesses are made once a plain step was measured"
        gains = [*accumulate(ranked, initial=float(num_requests))]
        best = tried = 0
        best_rate = tried_rate = MARGIN * num_requests / plain
        fastest = plain  # that a step of so many rows may turn out to be
        may_try = self.ledger.may_try
        for rows, seconds, is_known in self.times.drafting(num_requests, context):
            num = rows - num_requests
            if num > len(ranked):
                break
            expected = gains[num]
            likely = max(plain, seconds) + guessing  # a step of more rows is not faster
            if (is_known or may_try) and expected > best_rate * likely:
                best = num
                best_rate = expected / likely
            fastest = max(fastest, seconds if is_known else MOST_BELOW * seconds)
            if not is_known and expected > tried_rate * (fastest + guessing):
                tried = num
                tried_rate = expected / (fastest + guessing)
        if tried and may_try and self._step >= self._try_at and tried_rate > MARGIN * best_rate:
            self._try_at = self._step + TRY_EVERY
            return tried, tried_rate
        return best, best_rate

    def end_step(self, num_requests: int, context: int, rows: int, seconds: float, num_accepted: int) -> None:
        """Learn from a decode step.

        rows: the number of tokens that the step computed.
        """
        has_drafts = rows > num_requests
        is_steady = self._last == PLAIN_DECODE
        plain = self.times.mean_plain(num_requests, context)
        won = -self._guessing
        if plain is not None and (has_drafts or self._last == DRAFTS):
            # A plain step takes longer behind one with drafts.
            won = (1 + num_accepted / num_requests) * plain - min(seconds, MOST_LOST * plain)
        if has_drafts:
            self._num_since_plain += 1
        elif is_steady:
            self._num_since_plain = 0
        if has_drafts or is_steady:
            self.times.record(num_requests, rows, context, seconds - self._guessing)
        self._last = DRAFTS if has_drafts else PLAIN_DECODE
        if plain is not None:
            self.ledger.add(won, seconds, plain)
            self._plan_next_guess(won, plain)

    def end_other_step(self) -> None:
        """Record a step that is not a decode. The next step without drafts may take an unusual time."""
        self._last = OTHER

    def _plan_next_guess(self, won: float, plain: float) -> None:
        """Guess in the next step, or later if guesses have won nothing for long."""
        if self._last == DRAFTS and won > 0:
            self._num_misses = 0
        elif self._guessing:
            self._num_misses += max(1, int(WEIGHT * self._guessing / plain))
            doublings = min(self._num_misses - PATIENCE, MOST_DOUBLINGS)
            if doublings > 0:
                share = PROBING if self._has_found else SEARCHING
                rarest = int(self._guessing_of(self.limit) / (share * plain))
                self._guess_at = self._step + min(2**doublings, rarest)
