"""DRY against a brute-force reading of its rule, and strings as tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import paged
from paged import SamplingParams
from paged.dry import dry_penalties
from paged.errors import RequestError
from paged.token_rules import TokenRules
from paged.tokenizer import Tokenizer


def params_of(**values: Any) -> SamplingParams:
    return SamplingParams(dry_multiplier=2.0, dry_base=3.0, **values)


def brute_force(
    token_ids: list[int], breakers: set[int], *, allowed_length: int = 2, last_n: int = -1
) -> dict[int, float]:
    """As text-generation-webui reads: from every earlier place of the last token, walk back."""
    ids = token_ids if last_n < 0 else token_ids[len(token_ids) - last_n :] if last_n else []
    lengths: dict[int, int] = {}
    for i in range(len(ids) - 1):
        n = 0
        while n <= i and ids[i - n] == ids[-1 - n] and ids[-1 - n] not in breakers:
            n += 1
        if ids[i + 1] not in breakers:
            lengths[ids[i + 1]] = max(n, lengths.get(ids[i + 1], 0))
    return {t: 2.0 * 3.0 ** (n - allowed_length) for t, n in lengths.items() if n >= allowed_length}


def test_by_hand():
    ids = [5, 1, 2, 3, 9, 1, 2, 3]
    # 9 followed the last three tokens before: 2 * 3 ** (3 - 2).
    assert dry_penalties(ids, params_of(), {}) == {9: 6.0}
    assert dry_penalties(ids, params_of(dry_allowed_length=4), {}) == {}
    assert dry_penalties(ids, params_of(dry_penalty_last_n=0), {}) == {}
    assert dry_penalties(ids, params_of(dry_penalty_last_n=6), {}) == {9: 2.0}  # which see two of the three
    assert dry_penalties(ids, params_of(dry_penalty_last_n=5), {}) == {}
    # No repetition reaches back across a breaker, and a breaker is never held back.
    assert dry_penalties(ids, params_of(), {1: ((),)}) == {9: 2.0}
    assert dry_penalties(ids, params_of(), {2: ((),)}) == {}
    assert dry_penalties(ids, params_of(), {9: ((),)}) == {}
    # A breaker of several tokens, and one that only begins.
    assert dry_penalties(ids, params_of(), {9: ((1,),)}) == {9: 2.0}
    assert dry_penalties(ids, params_of(), {9: ((1, 2),)}) == {}
    assert dry_penalties(ids, params_of(), {9: ((2,),), 3: ((4,),)}) == {9: 6.0}


def test_equals_brute_force():
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        breakers = {2} if rng.random() < 0.3 else set()
        for allowed_length, last_n in ((1, -1), (2, 20), (3, 7)):
            params = params_of(dry_allowed_length=allowed_length, dry_penalty_last_n=last_n)
            expected = brute_force(ids, breakers, allowed_length=allowed_length, last_n=min(last_n, len(ids)))
            assert dry_penalties(ids, params, dict.fromkeys(breakers, ((),))) == expected


def test_long_repetitions_cost_a_finite_number():
    costs = dry_penalties([1, 2] * 2000, params_of(), {})
    assert costs[1] < float("inf")
    assert set(costs) == {1}


class Counted(int):
    """A token that counts how often it is compared."""

    comparisons = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)


@pytest.mark.parametrize("base", [1.0, 1.0 + 1e-9, 3.0])
def test_repetitive_text_takes_linear_time(base):
    n = 2000
    tokens = [Counted(1 + i % 2) for i in range(n)]
    Counted.comparisons = 0
    params = SamplingParams(dry_multiplier=2.0, dry_base=base)
    assert dry_penalties(tokens, params, {})[1] >= 2.0
    assert Counted.comparisons < 10 * n


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Path(paged.__file__).parent / "demo")


def rules_of(tokenizer: Tokenizer, bad_words: Any = (), breakers: Any = ()) -> TokenRules:
    return TokenRules.of(bad_words, breakers, tokenizer.encode_bare, lambda: tokenizer.token_texts)


def test_token_texts_are_what_tokens_add(tokenizer):
    texts = tokenizer.token_texts
    ids = tokenizer.encode_bare("def add(a, b):\n    return a")
    assert "".join(texts[i] for i in ids) == "def add(a, b):\n    return a"


def test_bad_words_are_spelled_with_and_without_a_space(tokenizer):
    words = rules_of(tokenizer, ["return", " import os"]).bad_words
    texts = [tokenizer.hf.decode([*word]) for word in words]
    assert texts == ["return", " return", "import os", " import os"]


def test_breakers_are_all_tokens_that_hold_them(tokenizer):
    breakers = rules_of(tokenizer, breakers=["\n"]).breakers
    holding = {i for i, text in enumerate(tokenizer.token_texts) if "\n" in text}
    assert {token for token, tails in breakers.items() if () in tails} == holding
    assert len(holding) > 5
    # One of several characters may be spread over tokens.
    spread = rules_of(tokenizer, breakers=["):"]).breakers
    (paren,) = tokenizer.encode_bare(")")
    assert tuple(tokenizer.encode_bare(":")) in spread[paren]


def breakers_by_force(tokenizer: Tokenizer, strings: list[str]) -> dict[int, set[tuple[int, ...]]]:
    """Every string in every token's text, and every beginning of one at its end, as llama.cpp looks."""
    encode, found = tokenizer.encode_bare, {}
    for string in strings:
        before, together = encode("a"), encode(f"a{string}")
        wholes = [encode(string)]
        if together[: len(before)] == before:
            wholes.append(together[len(before) :])
        for whole in filter(None, wholes):
            found.setdefault(whole[0], set()).add((*whole[1:],))
        for token, text in enumerate(tokenizer.token_texts):
            if string in text:
                found.setdefault(token, set()).add(())
                continue
            for n in range(1, len(string)):
                if text.endswith(string[:n]):
                    found.setdefault(token, set()).add((*encode(string[n:]),))
    return found


def test_breakers_equal_brute_force(tokenizer):
    strings = ["\n", ":", "    return", "):\n", "aa", "aaa", "é", "\u2603", "self.self.", "\n\n\n"]
    breakers = rules_of(tokenizer, breakers=strings).breakers
    assert {token: {*tails} for token, tails in breakers.items()} == breakers_by_force(tokenizer, strings)
    assert sum(map(len, breakers.values())) > 300


class CountedText(str):
    """A token's text that counts how often something is looked for in it."""

    looks = 0

    def __contains__(self, part: str) -> bool:
        CountedText.looks += 1
        return str.__contains__(self, part)

    def endswith(self, *args: Any) -> bool:
        CountedText.looks += 1
        return str.endswith(self, *args)


def test_many_long_breakers_are_compiled_in_linear_time():
    texts = [CountedText(chr(97 + i % 26) * (1 + i % 5)) for i in range(2000)]
    breakers = [chr(97 + i % 26) + "xyz"[i % 3] * 39 for i in range(64)]
    TokenRules.of((), breakers, lambda text: [ord(c) for c in text], lambda: texts)
    assert CountedText.looks < 20 * len(texts)


def test_strings_that_cannot_be_tokens_are_refused(tokenizer):
    with pytest.raises(RequestError, match="not valid Unicode"):
        rules_of(tokenizer, ["\ud800"])
    with pytest.raises(RequestError, match="at most 64 strings of at most 40 characters, got 65"):
        rules_of(tokenizer, breakers=[chr(97 + i % 26) * (1 + i // 26) for i in range(65)])
    with pytest.raises(RequestError, match="bad_words need the tokenizer"):
        TokenRules.of(["a"], (), None, list)
    with pytest.raises(RequestError, match="pass dry_sequence_breakers="):
        TokenRules.of((), ["a"], None, list)
