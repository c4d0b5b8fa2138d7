"""Incremental decoding never shows partial characters and ends with the text of decoding at once."""

from __future__ import annotations

import copy
import itertools
import json
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paged.architectures.config import DEMO
from paged.base.errors import CheckpointError, RequestError
from paged.options.sampling_params import SamplingParams
from paged.requests.prompt_report import TokenLogprobs
from paged.requests.request import Request, RequestGroup, RequestInputs
from paged.text.detokenizer import Detokenizer
from paged.text.outputs import OutputProcessor
from paged.text.tokenizer import REPLACEMENT, Tokenizer

TEXTS = [
    "naïve 日本語 🙂",
    "語",
    "def add(a, b):\n    return a + b\n",
    "👩‍👩‍👧 é é ​ ½",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def byte_level():
    """Make a tokenizer like GPT-2's: tokens are bytes, spaces belong to words."""
    return Tokenizer(DEMO)


def sentencepiece(directory, decoder):
    """Make one like Llama 2's: a text's leading space is dropped, unknown characters become bytes."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [
        *special,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abdefnrt(),:+\n",
        "▁a",
        "é▁",
        "▁▁",
    ]
    backend = Backend(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken("<more>", special=False)])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(tmp_path_factory.mktemp("tokenizers") / "llama", decoders.Sequence(steps))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    return sentencepiece(tmp_path_factory.mktemp("tokenizers") / "metaspace", decoders.Sequence(steps))


@pytest.fixture(params=["bytes", "window"])
def way(request):
    """Run a test with the bytes of tokens, and as if these were unknown."""

    def changed(tokenizer):
        tokenizer = copy.copy(tokenizer)
        assert tokenizer.token_bytes is not None
        if request.param == "window":
            tokenizer.token_bytes = None
        return tokenizer

    return changed


def shown(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **options: bool) -> list[str]:
    """Return the text before the first token and after each one, and the text that `finish` adds."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    texts = [*itertools.accumulate(map(detokenizer.append, ids), initial="")]
    return [*texts, detokenizer.finish()]


def whole_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **options: bool) -> str:
    return "".join(shown(tokenizer, prompt, ids, **options)[-2:])


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize("before", ["def b", "日本語"], ids=ascii)
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_token_by_token_equals_decoding_at_once(kind, way, before, text, request):
    tokenizer = way(request.getfixturevalue(kind))
    prompt = tokenizer.encode(before)
    # Without the space that a Llama puts before a text, so that characters of bytes are adjacent.
    ids = tokenizer.encode(text)[kind == "llama" :]
    whole = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]
    *texts, rest = shown(tokenizer, prompt, ids)
    assert texts[-1] == whole
    assert text.strip() in whole
    assert REPLACEMENT not in "".join(texts)
    assert rest == "", "whole characters were held back until the end"


def repaired(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Replace byte tokens that are not valid UTF-8 by replacement characters.

    Decoding at once would also replace valid characters beside them, which may have been shown already.
    """
    result = list[int]()
    pairs = zip(tokenizer.hf.convert_ids_to_tokens(ids), ids, strict=True)
    for is_bytes, group in itertools.groupby(pairs, lambda pair: pair[0].startswith("<0x")):
        tokens, run = zip(*group, strict=True)
        if is_bytes:
            text = bytes(int(token[3:5], 16) for token in tokens).decode("utf-8", "replace")
            run = tokenizer.hf.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])
        result += run
    return result


@pytest.mark.parametrize("kind", ["byte_level", "llama", "metaspace"])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_tokens_equal_decoding_at_once(kind, data, request):
    """Random tokens, with special tokens and without, after any prompt, also as invalid UTF-8."""
    tokenizer = request.getfixturevalue(kind)
    assert tokenizer.token_bytes is not None
    # Byte and special tokens are rare in a vocabulary, so they are drawn more often.
    last = len(tokenizer.hf) - 1
    token = st.integers(0, min(280, last)) | st.integers(0, last)
    prompt, ids = data.draw(st.lists(token, max_size=12)), data.draw(st.lists(token, max_size=30))
    skip = data.draw(st.booleans())
    texts = shown(tokenizer, prompt, ids, skip_special_tokens=skip, spaces_between_special_tokens=False)
    if skip:
        prompt, ids = ([i for i in part if i not in tokenizer.special_token_ids] for part in (prompt, ids))
    before, whole = (
        tokenizer.decode(repaired(tokenizer, part), skip_special_tokens=False)
        for part in (prompt, prompt + ids)
    )
    if not before.endswith(REPLACEMENT):  # otherwise the next bytes may complete it
        assert before + "".join(texts[-2:]) == whole


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_half_a_character_waits_and_is_a_replacement_only_at_the_end(kind, way, request):
    tokenizer = way(request.getfixturevalue(kind))
    prompt, ids = tokenizer.encode("x"), tokenizer.encode("🙂")[kind == "llama" :]
    assert len(ids) > 2
    *texts, rest = shown(tokenizer, prompt, ids[:-1])
    assert set(texts) == {""}
    assert set(rest) == {REPLACEMENT}
    # The character may begin in the prompt.
    if tokenizer.token_bytes is not None:
        assert whole_text(tokenizer, prompt + ids[:-1], ids[-1:]) == "🙂"


def test_bytes_that_are_never_a_character_do_not_wait_for_ever(llama, way):
    tokenizer = way(llama)
    stray = tokenizer.hf.convert_tokens_to_ids("<0x80>")
    texts = shown(tokenizer, tokenizer.encode("x"), [stray] * 100)
    assert len(texts[-2]) > 50
    assert set(texts[-2]) == {REPLACEMENT}


def test_special_tokens_are_text_only_if_they_are_not_skipped(byte_level, way):
    tokenizer = way(byte_level)
    ids, end, text = tokenizer.encode("a b"), tokenizer.hf.eos_token_id, tokenizer.hf.eos_token
    ids = [end, *ids, end, end, *ids]
    assert whole_text(tokenizer, [end], ids) == "a ba b"
    shown_too = {"skip_special_tokens": False}
    assert whole_text(tokenizer, [end], ids, **shown_too) == f"{text}a b{text} {text}a b"
    together = whole_text(tokenizer, [end], ids, **shown_too, spaces_between_special_tokens=False)
    assert together == tokenizer.decode(ids, skip_special_tokens=False) == f"{text}a b{text}{text}a b"


def test_space_after_a_special_token_stays(llama, way):
    tokenizer = way(llama)
    special = tokenizer.hf.eos_token_id
    ids = [*tokenizer.encode("a"), special, special, *tokenizer.encode("b")]
    assert whole_text(tokenizer, tokenizer.encode("d"), ids) == " a b"
    # At the beginning of a text there is none.
    assert whole_text(tokenizer, [special], ids) == "a b"


def test_long_text_costs_linear_time(byte_level, monkeypatch):
    """Each token is decoded a bounded number of times, however long the text is."""
    tokenizer, decoded = copy.copy(byte_level), 0
    tokenizer.token_bytes = None

    def counting(token_ids, **options):
        nonlocal decoded
        decoded += len(token_ids)
        return byte_level.decode(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    ids = tokenizer.encode("def add(a, b):\n") * 50
    assert whole_text(tokenizer, ids, ids) == "def add(a, b):\n" * 50
    assert decoded < 20 * len(ids)


def test_ids_beyond_the_tokenizer_are_no_text(byte_level):
    # The vocabulary of a model may be larger than that of its tokenizer.
    ids = [*byte_level.encode("a"), len(byte_level.hf) + 7, *byte_level.encode("b")]
    assert whole_text(byte_level, [], ids) == "ab"


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder(), decoders.Strip(" ", 1, 0), None],
    ids=str,
)
def test_tokens_that_depend_on_their_neighbours_are_decoded_together(decoder, tmp_path):
    tokenizer = sentencepiece(tmp_path / "other", decoder)
    assert tokenizer.token_bytes is None
    ids = [i for i in tokenizer.encode("abc def") if i not in tokenizer.special_token_ids]
    assert whole_text(tokenizer, ids[:1], ids[1:]) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:1])) :]


def words(directory, **parts):
    """Make a tokenizer with one token for a word of a's and one for any other word."""
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(directory)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_text_of_far_too_many_tokens_is_seen_at_its_beginning(kind, request, monkeypatch):
    tokenizer = copy.copy(request.getfixturevalue(kind))
    text, seen, encode = "def add(a, b): " * 70_000, [], tokenizer.encode

    def counting(text, **options):
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counting)
    num_tokens = len(encode(text))
    assert 1000 < tokenizer.least_tokens(text, 1000) < num_tokens
    assert sum(seen) < len(text) / 50
    # Never refused: a text that fits, or one that may be only a little too long.
    for most in (num_tokens, num_tokens + 1, num_tokens * 9 // 10):
        assert tokenizer.least_tokens(text, most) == 0


BLANK = 300_000
SWALLOWED = {
    "blanks": ({"pre_tokenizer": pre_tokenizers.WhitespaceSplit()}, " " * BLANK + "a a"),
    "stripped": ({"normalizer": normalizers.Strip()}, "a" + "\n" * BLANK),
    "one-word": ({}, "b" * BLANK),
    "joined": (
        {
            "normalizer": normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
            "pre_tokenizer": pre_tokenizers.WhitespaceSplit(),
        },
        "a" + " " * BLANK + "\n" * BLANK + "a",
    ),
    "far-behind": (
        {
            "normalizer": normalizers.Replace(Regex("<[^>]*>"), ""),
            "pre_tokenizer": pre_tokenizers.WhitespaceSplit(),
        },
        "a <" + " b" * BLANK + ">",
    ),
    "cut-out": (
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex("<[^>]*>"), "removed"),
                    pre_tokenizers.WhitespaceSplit(),
                ]
            )
        },
        "a <" + " b" * BLANK + ">",
    ),
}


@pytest.mark.parametrize("case", SWALLOWED)
def test_text_that_the_tokenizer_swallows_is_not_too_long(case, tmp_path):
    parts, text = SWALLOWED[case]
    tokenizer = words(tmp_path, **parts)
    assert 0 < len(tokenizer.encode(text)) < 3
    assert tokenizer.least_tokens(text, 10) == 0


@pytest.mark.parametrize("behavior", ["normalizer", "splitter"])
def test_text_with_runs_of_blanks_is_seen_at_its_beginning(behavior, tmp_path):
    blanks = Regex(r"\s+")
    parts = {
        "normalizer": {
            "normalizer": normalizers.Replace(blanks, " "),
            "pre_tokenizer": pre_tokenizers.Whitespace(),
        },
        "splitter": {"pre_tokenizer": pre_tokenizers.Split(blanks, "removed")},
    }
    tokenizer = words(tmp_path, **parts[behavior])
    assert 10 < tokenizer.least_tokens("a  " * 100_000, 10) < 100_000


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=ascii)
def test_lone_surrogate_is_refused(byte_level, text):
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level.encode(text)


WAY_OUT = "; give another tokenizer with tokenizer=, or do without one: skip_tokenizer_init=True"


def refused(directory) -> str:
    with pytest.raises(CheckpointError) as info:
        Tokenizer(directory)
    message = str(info.value)
    assert message.endswith(WAY_OUT)
    return message.removesuffix(WAY_OUT)


def test_directory_without_a_tokenizer_is_named_with_the_files_looked_for(tmp_path):
    names = "tokenizer.json, tokenizer_config.json and tokenizer.model"
    assert refused(tmp_path) == f"{tmp_path} has no tokenizer: looked for {names}"
    # transformers would make one that turns every text into no tokens.
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    found = "found only tokenizer_config.json"
    assert refused(tmp_path) == f"{tmp_path} has no tokenizer: looked for {names}, {found}"


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tokenizer.json", "{", "is not JSON: Expecting property name enclosed in double quotes"),
        ("tokenizer.json", "{}", "is damaged: Model missing. at line 1 column 2"),
        ("tokenizer_config.json", "[", "is not JSON: Expecting value"),
    ],
)
def test_damaged_file_is_named_with_the_reason_in_one_line(tmp_path, name, text, reason):
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, tmp_path)
    (tmp_path / name).write_text(text)
    message = refused(tmp_path)
    assert message.startswith(str(tmp_path / name))
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "llama", "metaspace"])
def test_several_tokens_at_once_say_what_each_says(kind, skip, way, request):
    tokenizer = way(request.getfixturevalue(kind))
    rng = random.Random(skip)
    for prompt in ([], tokenizer.encode("a")):
        # Characters of several tokens, and a special token at a fifth of the positions.
        ids = [i for text in TEXTS for i in tokenizer.encode_bare(text)]
        special = [*tokenizer.special_token_ids]
        ids = [rng.choice(special) if rng.random() < 0.2 else i for i in ids]
        one, several = (Detokenizer(tokenizer, prompt, skip_special_tokens=skip) for _ in range(2))
        while ids:
            size = rng.randint(1, 7)
            chunk, ids = ids[:size], ids[size:]
            assert several.extend(chunk) == "".join(map(one.append, chunk))
        assert several.finish() == one.finish()


@pytest.mark.parametrize("prompt", ["def a", "a b ", None], ids=ascii)
@pytest.mark.parametrize("kind", ["byte_level", "llama", "metaspace"])
def test_texts_of_log_probabilities_join_to_the_text(request, kind, prompt):
    """Also after a prompt of special tokens alone, where the first word loses its space."""
    tokenizer = request.getfixturevalue(kind)
    before = tokenizer.encode(prompt) if prompt else sorted(tokenizer.special_token_ids)[-1:]
    ids = tokenizer.encode_bare("and  ten, render (a, b): tea")
    params = SamplingParams(logprobs=0, max_tokens=None, skip_special_tokens=True)
    one = Request(RequestInputs(prompt_token_ids=before, params=params, max_total_tokens=1000))
    group, outputs = RequestGroup("a", [one]), OutputProcessor(tokenizer)
    for token_id in ids:
        one.add_logprobs(TokenLogprobs([token_id], [-1.0], 1))
        one.token_ids.append(token_id)
    (completion,) = outputs.output(group).outputs
    texts = [place[token].decoded_token for place, token in zip(completion.logprobs, ids, strict=True)]
    assert "".join(texts) == completion.text
