"""Drafters guess what followed the same tokens before, in the request or where it may look."""

import random
from collections.abc import Sequence

import pytest

from paged.drafting.drafters import new_drafter
from paged.drafting.token_index import MOST_LOOKS, TokenIndex
from paged.options.sampling_params import SamplingParams
from paged.options.speculative_config import SpeculativeConfig
from paged.requests.request import Request, RequestInputs


def new_request(prompt: list[int], output: Sequence[int] = (), **options) -> Request:
    salt = options.pop("cache_salt", None)
    params = SamplingParams(cache_salt=salt)
    request = Request(RequestInputs(prompt_token_ids=prompt, max_total_tokens=200, params=params, **options))
    request.token_ids += output
    return request


def test_the_longest_of_the_newest_matches_is_found():
    rng = random.Random(0)
    for shortest, longest in ((1, 3), (2, 5), (3, 32)):
        tokens = [rng.randrange(3) for _ in range(3)]
        index = TokenIndex(tokens, shortest)
        for _ in range(150):
            tokens += [rng.randrange(3) for _ in range(rng.randint(1, 4))]
            index.update()
            assert index.find(tokens, longest) == expected(tokens, shortest, longest)


def expected(tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
    size = len(tokens)
    matches = []
    for end in range(size - 1, shortest - 1, -1):
        length = 0
        while length < min(longest, end) and tokens[end - length - 1] == tokens[size - length - 1]:
            length += 1
        if length >= shortest:
            matches.append((end, length))
    return max(matches[:MOST_LOOKS], key=lambda match: match[1], default=(0, 0))


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_what_followed_is_guessed_and_repeated(method):
    drafter = new_drafter(SpeculativeConfig(method=method))
    copies = new_request([5, 6, 7, 8, 9, 1], [5, 6])
    loops = new_request([1, 2, 3, 2, 3])
    new = new_request([1, 2, 3, 4])
    assert [d.tokens for d in drafter.propose([copies, loops, new], [3, 5, 4])] == [
        [7, 8, 9],
        [2, 3, 2, 3, 2],
        [],
    ]
    copies.token_ids += [7, 8]
    assert drafter.propose([copies], [9])[0].tokens[:3] == [9, 1, 5]


def test_the_window_of_ngram_is_bounded():
    # The newest match of three tokens is another one than that of five.
    prompt = [1, 2, 3, 4, 5, 10, 9, 2, 3, 4, 5, 11, 8, 1, 2, 3, 4, 5]
    for longest, token in ((4, 11), (5, 10)):
        drafter = new_drafter(SpeculativeConfig(method="ngram", prompt_lookup_max=longest))
        assert drafter.propose([new_request(prompt)], [1])[0].tokens == [token]


def test_suffix_looks_at_siblings_and_ended_outputs_of_its_tenant_and_salt():
    drafter = new_drafter(SpeculativeConfig(method="suffix"))
    first = new_request([1, 2, 3], [4, 5, 6])
    sibling = Request(first.inputs, 1)
    sibling.token_ids += [9, 4, 5]
    assert [draft.tokens for draft in drafter.propose([first, sibling], [1, 1])] == [[], [6]]
    ended = new_request([20, 21], [30, 31, 32, 33], tenant="a", cache_salt="s")
    drafter.propose([ended], [1])
    ended.finish("stop", 0.0)
    same = new_request([1, 30, 31], tenant="a", cache_salt="s")
    others = [
        new_request([1, 30, 31], tenant="b", cache_salt="s"),
        new_request([1, 30, 31], tenant="a", cache_salt="t"),
        new_request([1, 30, 31]),
    ]
    drafts = drafter.propose([same, *others], [5] * 4)
    assert [draft.tokens for draft in drafts] == [[32, 33], [], [], []]
