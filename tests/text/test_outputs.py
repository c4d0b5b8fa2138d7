"""Outputs of a request: held-back stop strings, deltas, and text that never changes once shown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged import CompletionOutput, LLMEngine, RequestError, RequestOutputKind, SamplingParams
from paged.architectures.config import DEMO
from paged.requests.prompt_report import TokenLogprobs
from paged.requests.request import Request, RequestGroup, RequestInputs
from paged.requests.stop_strings import StopStrings, stop_strings
from paged.text.outputs import OutputProcessor
from paged.text.tokenizer import Tokenizer
from paged.text.transcript import Transcript
from tests.support.checkpoints import assert_all_free, new_engine

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TOKENIZER = Tokenizer(DEMO)
EOS = TOKENIZER.hf.eos_token_id


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return TOKENIZER


def served(
    tokenizer: Tokenizer, ids: Sequence[int], eos: int | None = None, num_given: int = 0, **params: Any
) -> list[CompletionOutput]:
    """Return the output after each of these token ids, as an engine makes it, until the request ends.

    num_given: how many of them another engine made.
    """
    sampling = SamplingParams(**params)
    stops = stop_strings(tuple(sampling.stop)) if sampling.stop else None
    ends = frozenset(() if eos is None else [eos])
    inputs = RequestInputs(
        prompt_token_ids=tokenizer.encode("x"),
        params=sampling,
        max_total_tokens=1 + len(ids),
        stop_ids=ends,
        stops=stops,
        num_given_tokens=num_given,
    )
    request = Request(inputs)
    request.token_ids += ids[:num_given]
    ids = ids[num_given:]
    group, processor = RequestGroup("a", [request]), OutputProcessor(tokenizer)
    outputs = []
    for token_id in ids:
        request.token_ids.append(token_id)
        request.on_token(token_id, 0.0)
        if stops is not None:
            processor.end_at_stop_string(request, 0.0)
        if request.finish_reason is not None or group.outbox.wants(sampling.output_kind):
            outputs += processor.output(group).outputs
        if request.finish_reason is not None:
            return outputs
    raise AssertionError("the request goes on")


# --- stop strings


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    return max(k for s in stops for k in range(len(s)) if text.endswith(s[:k]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.integers(0, 8),
)
def test_stop_strings_are_those_of_a_search_through_everything(stops, pieces, num_skipped):
    """The match that ends first counts, of several the longest; matches in skipped text do not."""
    automaton, state, text = StopStrings(tuple(stops)), 0, ""
    for i, piece in enumerate(pieces):
        found = None
        if i < num_skipped:
            state = automaton.skip(state, piece)
        else:
            state, found = automaton.read(state, piece)
        ends = (
            (end, -len(s))
            for end in range(len(text) + 1, len(text + piece) + 1)
            for s in stops
            if i >= num_skipped and (text + piece)[:end].endswith(s)
        )
        expected = min(ends, default=None)
        assert (found and (len(text) + found.end, -found.length)) == expected
        if found is not None:
            return
        text += piece
        assert automaton.num_open(state) == longest_beginning(text, stops)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA], ids=str)
def test_exactly_what_may_become_a_stop_string_is_held_back(tokenizer, kind):
    text = "def add(a, b):\n    return a + b\n\ndef sub"
    ids, stops = tokenizer.encode(text), ("return a - b", "\n\n\n", "b\n\ndef s")
    final = text[: text.index(stops[2])]
    outputs = served(tokenizer, ids, stop=stops, output_kind=kind)
    texts = [c.text for c in outputs]
    if kind is DELTA:
        texts = [*itertools.accumulate(texts)]
    for n, shown in enumerate(texts[:-1], start=1):
        said = tokenizer.decode(ids[:n])
        assert shown == said[: len(said) - longest_beginning(said, stops)]
    assert (texts[-1], outputs[-1].stop_reason) == (final, stops[2])
    assert any(len(set(pair)) == 1 for pair in itertools.pairwise(texts)), "nothing was held back"


@pytest.mark.parametrize("include", [False, True])
def test_include_stop_str_in_output(tokenizer, include):
    ids = tokenizer.encode("one two three")
    outputs = served(tokenizer, ids, stop="wo t", include_stop_str_in_output=include)
    assert outputs[-1].text == ("one two t" if include else "one t")
    # The token that ends the request has text, unless it is special and special tokens are left out.
    stop_id, eos = ids[-1], tokenizer.hf.eos_token_id
    last = served(tokenizer, ids, stop_id, include_stop_str_in_output=include, max_tokens=99)[-1]
    assert (last.text, last.finish_reason) == (tokenizer.decode(ids[: len(ids) - (not include)]), "stop")
    for skip in (True, False):
        last = served(
            tokenizer, [*ids, eos], eos, include_stop_str_in_output=include, skip_special_tokens=skip
        )[-1]
        assert last.text == "one two three" + tokenizer.hf.eos_token * (include and not skip)


def test_min_tokens_holds_stop_strings_off_and_not_those_that_begin_in_it(tokenizer):
    ids = tokenizer.encode("a b a b a b c")
    pieces = [tokenizer.decode([i]) for i in ids]
    assert len(pieces) == 7
    for min_tokens, text, num_tokens in ((0, "a ", 2), (1, "a ", 2), (2, "a b a ", 4), (5, "a b a b a ", 6)):
        last = served(tokenizer, ids, stop=["b", "never"], min_tokens=min_tokens, max_tokens=99)[-1]
        assert (last.text, len(last.token_ids)) == (text, num_tokens)
    last = served(tokenizer, ids, stop="a b c", min_tokens=6, max_tokens=99)[-1]
    assert last.text == "a b a b "
    # A stop string that came too early is shown, as it cannot end the text any more.
    texts = [c.text for c in served(tokenizer, ids, stop=["b", "c"], min_tokens=6, max_tokens=99)]
    assert texts[:6] == [*itertools.accumulate(pieces)][:6]


BLANKS = " \t\n\r"


def cut_of_the_answer(text: str, is_inside: bool, stop: str, include: bool) -> tuple[str, bool]:
    """Return what a text is cut to by a stop string, which is searched in its answer, and whether it is."""
    begun = text.lstrip(BLANKS)
    start = 0
    if is_inside or begun.startswith("<r>"):
        end = text.find("</r>", 0 if is_inside else len(text) - len(begun) + 3)
        if end < 0:
            return text, False
        rest = text[end + 4 :]
        start = len(text) - len(rest.lstrip(BLANKS))
    at = text.find(stop, start)
    return (text, False) if at < 0 else (text[: at + len(stop) * include], True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        st.sampled_from(["<r>", "</r>", "<", "r>", " ", "\n", "a", "b", "ab", "</", "</r> a"]), max_size=9
    ),
    st.sampled_from(["a", "b", "ab", "<", "\n", "</r>", "r> a", "r>"]),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_stop_strings_end_the_answer_and_not_its_reasoning(pieces, stop, is_inside, include, rng):
    """In whatever tokens the text comes; what is shown does not change; a replay finds the same."""
    text = "".join(pieces)
    expected, is_cut = cut_of_the_answer(text, is_inside, stop, include)
    ids = []
    at = 0
    while at < len(text):
        length = rng.randint(1, 3)
        ids += TOKENIZER.encode(text[at : at + length])
        at += length
    options = {
        "stop": stop,
        "no_stop_within": ("" if is_inside else "<r>", "</r>"),
        "include_stop_str_in_output": include,
    }
    outputs = served(TOKENIZER, [*ids, EOS], EOS, **options, max_tokens=99)
    assert outputs[-1].text == expected
    assert (outputs[-1].stop_reason == stop) == is_cut
    for output in outputs:
        assert expected.startswith(output.text)
    deltas = served(TOKENIZER, [*ids, EOS], EOS, **options, max_tokens=99, output_kind=DELTA)
    assert "".join(output.text for output in deltas) == expected
    assert len(deltas) == len(outputs)
    num_given = rng.randrange(len(outputs))
    replayed = served(TOKENIZER, [*ids, EOS], EOS, num_given, **options, max_tokens=99)
    assert replayed[-1].text == expected


def test_min_tokens_counts_the_reasoning_too(tokenizer):
    ids = [tokenizer.encode(piece)[0] for piece in ("b", "a", "b", "a", "b")]
    for min_tokens, num_shown in ((0, 2), (3, 4), (4, 4)):
        last = served(
            tokenizer, ids, stop="b", min_tokens=min_tokens, no_stop_within=("", "a"), max_tokens=99
        )[-1]
        assert len(last.text) == num_shown, min_tokens


def test_ten_thousand_stop_strings(tokenizer):
    text = "def add(a, b):\n    return a + b\n"
    stops = [*(f"never {i} seen" for i in range(9_999)), "a + b"]
    last = served(tokenizer, tokenizer.encode(text), stop=stops)[-1]
    assert (last.text, last.stop_reason) == (text[: text.index("a + b")], "a + b")
    with pytest.raises(RequestError, match=r"stop has 3 strings of 300000 characters together; 262144"):
        SamplingParams(stop=["x" * 100_000] * 3)


def test_text_with_a_stop_string_always_open_is_taken_once(tokenizer, monkeypatch):
    """The cost per token does not grow with the text: a copy for every token would make it quadratic."""
    taken, since = [], Transcript.since

    def counted(transcript, start):
        taken.append(since(transcript, start))
        return taken[-1]

    monkeypatch.setattr(Transcript, "since", counted)
    ids = tokenizer.encode(" the") * 1000
    text = tokenizer.decode(ids)
    last = served(tokenizer, ids, stop=[" the the.", "e!"])[-1]
    assert last.text == text
    assert len(taken) == len(ids) - 1
    assert "".join(taken) == text[: len(text) - len(" the the")]


def test_odd_stop_strings_are_served(tokenizer):
    ids = tokenizer.encode("a\0b\x00 c")
    for stop in ("\ud800", "\udfff\0", "\U0010ffff"):  # these occur in no text
        last = served(tokenizer, ids, stop=stop)[-1]
        assert (last.text, last.finish_reason) == ("a\0b\x00 c", "length")
    last = served(tokenizer, ids, stop=["\0b\0"])[-1]
    assert (last.text, last.stop_reason) == ("a", "\0b\0")


# --- what an output holds


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return new_engine("demo", skip_tokenizer_init=False, num_blocks=64)


def outputs_of(engine: LLMEngine, **params: Any) -> list[list[CompletionOutput]]:
    """Return the samples of one prompt in each output."""
    engine.add_request("a", "def add(a, b):\n", SamplingParams(max_tokens=12, ignore_eos=True, **params))
    seen = []
    while engine.has_unfinished_requests():
        seen += [output.outputs for output in engine.step()]
    assert_all_free(engine)
    return seen


def test_the_three_kinds_say_the_same(engine):
    params: dict[str, Any] = {"n": 2, "seed": 5, "logprobs": 2, "stop": "never seen"}
    cumulative = outputs_of(engine, **params)
    deltas = outputs_of(engine, **params, output_kind=DELTA)
    (final,) = outputs_of(engine, **params, output_kind=FINAL_ONLY)
    assert len(cumulative) == len(deltas) == 12
    for sample in range(2):
        shown, pieces, whole = [c[sample] for c in cumulative], [c[sample] for c in deltas], final[sample]
        assert shown[-1] == whole
        assert [len(c.token_ids) for c in pieces] == [1] * 12
        # Earlier outputs have not changed.
        for n, (completion, piece) in enumerate(zip(shown, pieces, strict=True), start=1):
            assert completion.token_ids == whole.token_ids[:n]
            assert completion.logprobs == whole.logprobs[:n]
            assert completion.text == "".join(c.text for c in pieces[:n])
            assert (piece.token_ids, piece.logprobs) == (
                whole.token_ids[n - 1 : n],
                whole.logprobs[n - 1 : n],
            )
            assert piece.finish_reason == completion.finish_reason
            assert len(completion.token_ids) == n
            assert repr(completion.token_ids) == repr(whole.token_ids[:n])
            assert completion.token_ids[-1] == completion.token_ids[n - 1] == whole.token_ids[n - 1]
    assert final[0].text != final[1].text
    assert all(type(c.token_ids) is list for c in final)


def test_deltas_hold_what_came_while_nobody_looked(engine):
    """generate() advances all requests but makes only the outputs that it returns."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=DELTA)
    (whole,) = engine.generate("def add(a, b):\n", params, use_tqdm=False)
    engine.add_request("a", "def add(a, b):\n", params)
    engine.step()
    engine.generate("x = ", SamplingParams(max_tokens=5), use_tqdm=False)
    seen = []
    while engine.has_unfinished_requests():
        seen += [output.outputs[0] for output in engine.step()]
    assert len(seen) == 6
    assert len(seen[0].token_ids) == 6
    assert [t for c in seen for t in c.token_ids] == whole.outputs[0].token_ids[1:]
    assert whole.outputs[0].text.endswith("".join(c.text for c in seen))


def test_without_detokenize_there_is_no_text(engine):
    with_text, without = (
        outputs_of(engine, temperature=0.0, logprobs=1, detokenize=flag)[-1][0] for flag in (True, False)
    )
    assert with_text.text
    assert without.text == ""
    assert without.token_ids == with_text.token_ids
    texts = [[entry.decoded_token for entry in c.logprobs[0].values()] for c in (with_text, without)]
    assert texts == [[engine.tokenizer.decode(with_text.token_ids[:1])], [None]]


def test_special_tokens_are_shown_where_they_are_not_skipped(tokenizer):
    eos, name = tokenizer.hf.eos_token_id, tokenizer.hf.eos_token
    for skip, spaces, text in ((True, True, ""), (False, True, f"{name} {name}"), (False, False, name * 2)):
        options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        assert served(tokenizer, [eos, eos], **options)[-1].text == text


class Counted(list):
    """A list that counts how many items were read."""

    num_taken = 0

    def __iter__(self):
        self.num_taken += len(self)
        return super().__iter__()

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_taken += len(found) if isinstance(key, slice) else 1
        return found


def test_every_log_probability_is_added_up_once(tokenizer):
    """The sum does not depend on how often outputs are made, nor on entries that a failed step has left."""
    params = SamplingParams(logprobs=0, output_kind=DELTA)
    request = Request(RequestInputs(prompt_token_ids=[1], params=params, max_total_tokens=10_000))
    request.sampling.logprobs = logprobs = Counted()
    group, outputs = RequestGroup("a", [request]), OutputProcessor(tokenizer)
    for n in range(1, 501):
        request.add_logprobs(TokenLogprobs([5], [-float(n)], 1))
        assert outputs.output(group).outputs[0].logprobs == []
        request.token_ids.append(5)
        (completion,) = outputs.output(group).outputs
        assert completion.cumulative_logprob == -n * (n + 1) / 2
        assert [entry.logprob for place in completion.logprobs for entry in place.values()] == [-n]
    assert logprobs.num_taken == 1000  # each for the sum, and for the output that shows it
    assert outputs._progress[request].logprobs._readable == []  # what a delta has shown is not kept
