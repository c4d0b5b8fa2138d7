"""DryHistory: find the tokens that would continue a repetition, and lower their logits.

DRY is p-e-w's "Don't Repeat Yourself" (2024): a token that followed an earlier occurrence of the last n
tokens costs dry_multiplier * dry_base ** (n - dry_allowed_length), for the largest such n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .seats import Sampled

# The largest penalty, far below the largest float32: longer repetitions cost no more than this.
MAX_LOG_PENALTY = math.log(1e30)
# The columns of a place: the token before it (-1 before the first), its token, its position in its text, the
# text's number, the place before it, and its reach. A breaker never costs anything, so it too has -1 before
# it, and its reach is 0. That changes no later reach, because repetitions count from the breaker on.
PRIOR, TOKEN, POSITION, OWNER, BEFORE, REACH = range(6)
NO_TOKEN = -2  # equals no token, and not the -1 before the first
MOST_APPENDED = 128  # tokens of a text, one by one; a text that lacks more is read anew


class DryHistory:
    """The texts (prompt and output) of the current batch's requests that use DRY, on the device.

    A place is the position of one token in one text. The places of all texts are stored together, in order of
    arrival. The reach of a place is how many of the tokens before it equal the last tokens of its text. The
    texts of requests that ended or were preempted are dropped; if a preempted request resumes, its text is
    read again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._requests: list[Sampled] = []
        # The texts of these requests, in their order; empty while they change, so that after an interrupt the
        # next update reads them all again.
        self._texts: list[_Text] = []
        self._places = self._ints([[]] * 6)  # i32[6, capacity]
        self._num_places = 0
        self._newest = self._ints([])  # i32[num_texts]: the last place of each text
        self._found = self._ints([])  # i64: the places whose reach is not 0
        self._bounds = self._ints([[]] * 3)  # i32[3, num_texts]: see _Text.bounds
        self._costs = torch.empty(0, device=device)  # f32: _Text.costs of all texts, one after another

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in the allocated memory."""
        return self._places.shape[1]

    def keep(self, requests: Sequence[Sampled]) -> None:
        """Keep the texts of these requests. Drop all others."""
        if not requests and not self._requests:
            return
        texts = self._texts
        self._texts = []
        self._requests = [*requests]
        slots = {request: slot for slot, request in enumerate(requests)}
        if moved := [slots.get(text.request, -1) for text in texts]:
            self._renumber(moved)
        else:
            self._places = self._ints([[]] * 6)
            self._num_places = 0
        known = {text.request: text for text in texts}
        first_cost = 0
        for slot, request in enumerate(requests):
            text = known.get(request) or _Text(request, self.device)
            text.slot = slot
            text.first_cost = first_cost
            first_cost += text.longest + 1
            if request not in known:
                known[request] = text
                self._read(text)
        texts = [known[request] for request in requests]
        self._find(len(texts))
        self._bounds = self._ints([text.bounds() for text in texts]).view(-1, 3).T
        self._costs = torch.cat([self._costs[:0], *(text.costs for text in texts)])
        self._texts = texts

    def update(self) -> None:
        """Append the tokens that the requests have got since the last call."""
        tokens = [text.request.token_ids for text in self._texts]
        num_new = [len(own) - text.num_known for text, own in zip(self._texts, tokens, strict=True)]
        if self._texts and min(num_new) >= 0 and max(num_new) <= MOST_APPENDED:
            for _ in range(max(num_new)):
                self._make_room()
                self._advance(tokens)
        else:  # an update was interrupted
            requests = self._requests
            self._texts = []
            self.keep(requests)

    def apply_behind_drafts(
        self,
        logits: Tensor,  # f32[num_rows * vocab_size], changed in place
        rows: Tensor,  # i64[most, num_texts]: as of `apply`, behind each text's first draft, its second...
        tokens: Sequence[list[int]],  # of each text, its drafts included
    ) -> None:
        """Subtract the DRY penalty from the logits of rows that follow drafts. Then forget the drafts."""
        texts = self._texts
        self._texts = []
        known = [(text.num_known, text.breaker) for text in texts]
        num_places = self._num_places
        reach = self._places[REACH, :num_places].clone()
        before = self._newest, self._found, self._bounds
        self._texts = texts
        for rows_behind in rows:
            self._advance(tokens, keeps_others=False)
            self.apply(logits, rows_behind)
        self._texts = []
        for text, (num_known, breaker) in zip(texts, known, strict=True):
            text.num_known = num_known
            text.breaker = breaker
        self._num_places = num_places
        self._places[REACH, :num_places] = reach
        self._newest, self._found, self._bounds = before
        self._texts = texts

    def apply(
        self,
        logits: Tensor,  # f32[num_rows * vocab_size], changed in place
        rows: Tensor,  # i64[num_texts]: the flat index of each request's first logit
    ) -> None:
        """Subtract the DRY penalty from the logits."""
        columns = (self._places[row] for row in (TOKEN, POSITION, OWNER, REACH))
        token, position, owner, reach = (column.index_select(0, self._found) for column in columns)
        start, first_cost, last_cost = (bound.index_select(0, owner) for bound in self._bounds)
        # Only the part of a repetition inside the window and after the last breaker counts.
        cost = reach.minimum(position.sub_(start)).clamp_(min=0).add_(first_cost).minimum(last_cost)
        index = rows.index_select(0, owner).add_(token)
        rest = logits.index_select(0, index).sub_(self._costs.index_select(0, cost))
        # A token's highest cost applies: the minimum, which does not depend on the order of places.
        logits.scatter_reduce_(0, index, rest, "amin")

    def _make_room(self) -> None:
        """Drop places that have left their windows, if there is no room for a token of every text."""
        texts = self._texts
        self._texts = []
        if self._num_places + len(texts) > self.capacity:
            position, owner = self._places[POSITION : OWNER + 1, : self._num_places]
            self._forget(position < self._bounds[0].index_select(0, owner))
            self._find(len(texts))
        self._texts = texts

    def _advance(self, tokens: Sequence[list[int]], *, keeps_others: bool = True) -> None:
        """Append a token to every text that has more: what it repeats reaches one further, the rest ends.

        tokens: of each text, also those that it has already.
        keeps_others: whether the other texts stay as they are; else their repetitions end.
        """
        texts = self._texts
        self._texts = []
        growing = [slot for slot, text in enumerate(texts) if text.num_known < len(tokens[slot])]
        takes_all = len(growing) == len(texts)
        columns = self._ints([text.take(own) for text, own in zip(texts, tokens, strict=True)]).T
        self._bounds = columns[4:]
        if takes_all:
            self._newest = self._append(columns[:4], self._newest)
        else:
            grow = self._ints(growing).long()
            places = self._append(columns[:4].index_select(1, grow), self._newest.index_select(0, grow))
            self._newest = self._newest.index_copy(0, grow, places)
        prior, _, _, owner, before, reach = self._places[:, : self._num_places]
        token = columns[TOKEN].index_select(0, owner)
        found = (prior == token).nonzero()[:, 0]
        reaches = reach.index_select(0, before.index_select(0, found)).add_(1)
        if takes_all or not keeps_others:
            reach.zero_().index_copy_(0, found, reaches)
            self._found = found
        else:
            reach.mul_(token == NO_TOKEN).index_copy_(0, found, reaches)
            self._found = reach.nonzero()[:, 0]
        self._texts = texts

    def _read(self, text: _Text) -> None:
        """Append all tokens of a new text."""
        tokens = text.request.token_ids[text.start :]
        first = self._num_places
        token = self._ints(tokens)
        prior = token.roll(1)
        prior[0] = -1
        if alone := text.alone & {*tokens}:
            prior[[i for i, breaker in enumerate(tokens) if breaker in alone]] = -1
        position = torch.arange(len(tokens), dtype=torch.int32, device=self.device)
        columns = (prior, token, position + text.start, torch.full_like(position, text.slot))
        self._append(torch.stack(columns), (position + (first - 1)).clamp_(min=0))
        reach = self._places[REACH, first : self._num_places].zero_()
        reaches = _reaches(tokens)
        reach.index_copy_(0, self._ints([*reaches]).long(), self._ints([*reaches.values()]))
        reach.mul_(prior >= 0)

    def _append(self, columns: Tensor, before: Tensor) -> Tensor:
        """Append places, i32[4, num] and i32[num], without their reach. Return their numbers, i32[num]."""
        first = self._num_places
        end = self._num_places + len(before)
        if end > self.capacity:
            # Doubled, so that existing places are not copied for every new token.
            grown = self._places.new_empty(6, 2 * end)
            grown[:, :first] = self._places[:, :first]
            self._places = grown
        self._places[:BEFORE, first:end] = columns
        self._places[BEFORE, first:end] = before
        self._num_places = end
        return torch.arange(first, end, dtype=torch.int32, device=self.device)

    def _renumber(self, slots: list[int]) -> None:
        """Give the texts new numbers, and drop those that get -1."""
        if slots != [*range(len(slots))]:
            owner = self._places[OWNER, : self._num_places]
            owner.copy_(self._ints(slots).index_select(0, owner))
            if -1 in slots:
                self._forget(owner < 0)

    def _forget(self, gone: Tensor) -> None:
        """Drop the places that are True in bool[num_places]."""
        left = ~gone
        # The place before a window's first is gone: any other will do, as no reach crosses that point.
        moved = left.cumsum(0, dtype=torch.int32).sub_(1).clamp_(min=0)
        places = self._places[:, : self._num_places]
        places[BEFORE] = moved.index_select(0, places[BEFORE])
        index = left.nonzero()[:, 0]
        self._places = torch.stack([row.index_select(0, index) for row in places])
        self._num_places = self.capacity

    def _find(self, num_texts: int) -> None:
        """Find the last place of each text, and the places whose reach is not 0."""
        owner, _, reach = self._places[OWNER:, : self._num_places]
        places = torch.arange(self._num_places, dtype=torch.int32, device=self.device)
        self._newest = places.new_zeros(num_texts).scatter_reduce_(0, owner.long(), places, "amax")
        self._found = reach.nonzero()[:, 0]

    def _ints(self, numbers: Sequence[Sequence[int]] | Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def check(self) -> None:
        """Check that every text has its places, and that a brute-force search finds the same reach."""
        assert [text.request for text in self._texts] == self._requests, "an update was interrupted"
        _, token, position, owner, before, reach = self._places[:, : self._num_places].tolist()
        assert set(owner) == {*range(len(self._texts))}, "a place without a text, or a text without places"
        assert self._found.tolist() == [place for place, n in enumerate(reach) if n]
        for slot, text in enumerate(self._texts):
            places = [place for place in range(self._num_places) if owner[place] == slot]
            assert (text.slot, int(self._newest[slot])) == (slot, places[-1])
            assert self._bounds[:, slot].tolist() == [*text.bounds()]
            ids = text.request.token_ids[: text.num_known]
            start = text.start
            behind = text.behind(text.start)
            assert [token[place] for place in places][start - len(ids) :] == ids[start:]
            assert position[places[-1]] == len(ids) - 1
            for last, place in pairwise(places):
                at = position[place]
                assert (at, before[place]) == (position[last] + 1, last)
                if at > start:
                    expected = _common_end(ids[start:at], ids) if ids[at] not in text.alone else 0
                    assert min(reach[place], at - start, behind) == min(expected, behind)


class _Text:
    """The host's part of a request's text, and its parameters.

    costs: f32[longest + 1], the cost of a repetition by its length; longer ones cost no more.
    slot, first_cost: the text's number in the history, and where its costs begin there.
    """

    def __init__(self, request: Sampled, device: torch.device) -> None:
        params = request.inputs.params
        self.request = request
        self.num_known = len(request.token_ids)
        self.slot = self.first_cost = 0
        self.last_n = params.dry_penalty_last_n
        power = math.log(params.dry_base)
        allowed = params.dry_allowed_length
        most = int(MAX_LOG_PENALTY / power) if power > 0 else 0
        self.longest = min(allowed + most, request.inputs.max_total_tokens)
        costs = [params.dry_multiplier * params.dry_base**n for n in range(self.longest + 1 - allowed)]
        costs = [0.0] * (self.longest + 1 - len(costs)) + costs
        self.costs = torch.tensor(costs, dtype=torch.float32, device=device)
        self.breakers = request.inputs.rules.breakers
        self.alone = self.breakers.get((), frozenset())
        self.tail_lengths = {len(tail) for tail in self.breakers}
        self.breaker = self._last_breaker()

    @property
    def start(self) -> int:
        """The first position of the window in which repetitions are looked for."""
        return max(0, self.num_known - self.last_n) if self.last_n >= 0 else 0

    def behind(self, start: int) -> int:
        """Return how many tokens follow the last breaker of the window."""
        head, end = self.breaker
        return self.num_known - end if head >= start else self.num_known

    def take(self, token_ids: list[int]) -> tuple[int, ...]:
        """Append one token. Return the columns of its place that the host knows, and the new bounds.

        token_ids: of the text, also those that it has already; if it has all, its token is NO_TOKEN.
        """
        at = self.num_known
        if at == len(token_ids):
            return NO_TOKEN, NO_TOKEN, at, self.slot, *self.bounds()
        token = token_ids[at]
        self.num_known = at + 1
        for length in self.tail_lengths:
            if self._is_breaker(token_ids, at - length, at + 1):
                self.breaker = max(self.breaker, (at - length, at + 1))
        return -1 if token in self.alone else token_ids[at - 1], token, at, self.slot, *self.bounds()

    def bounds(self) -> tuple[int, int, int]:
        """Return the start of the window, and where the costs of length 0 and of the longest length lie."""
        start = self.start
        first = self.first_cost
        return start, first, first + min(self.behind(start), self.longest)

    def _last_breaker(self) -> tuple[int, int]:
        """Return start and end of the last breaker; (0, 0) if there is none.

        As in llama.cpp, that is the one that starts last, and of several that start there the longest.
        """
        for head in range(self.num_known - 1, self.start - 1, -1) if self.breakers else ():
            ends = (head + length + 1 for length in self.tail_lengths)
            ended = (end for end in ends if end <= self.num_known)
            if found := [end for end in ended if self._is_breaker(self.request.token_ids, head, end)]:
                return head, max(found)
        return 0, 0

    def _is_breaker(self, token_ids: list[int], head: int, end: int) -> bool:
        return head >= 0 and token_ids[head] in self.breakers.get(tuple(token_ids[head + 1 : end]), ())


def _reaches(tokens: Sequence[int]) -> dict[int, int]:
    """Compute the reach of each position of a text; positions that are left out have reach 0.

    The Z-algorithm (Gusfield, 1997) from the end of the text: linear time, however repetitive it is.
    """
    recent = tokens[::-1]
    num = len(tokens)
    reaches: dict[int, int] = {}
    start = end = 0  # the match that goes back furthest: [start, end) equals [0, end - start)
    distance = 0
    while True:
        try:
            distance = recent.index(recent[0], distance + 1)
        except ValueError:
            return reaches
        n = min(reaches.get(num - distance + start, 0), end - distance) if distance < end else 0
        while distance + n < num and recent[n] == recent[distance + n]:
            n += 1
        reaches[num - distance] = n
        if distance + n > end:
            start = distance
            end = distance + n


def _common_end(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common suffix."""
    pairs = enumerate(zip(reversed(a), reversed(b), strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
