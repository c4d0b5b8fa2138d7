"""Bytes and offsets of tokens, in chats and completions: what each token is of the text that is returned."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import decoders

from paged import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paged.architectures.config import DEMO
from paged.protocol.answers.chunks import Head
from paged.protocol.answers.completions import CompletionChunks, CompletionForm, Echo, completion_body
from paged.protocol.answers.places import Decoding, chat_places
from paged.text.detokenizer import Detokenizer
from paged.text.tokenizer import REPLACEMENT, Tokenizer
from tests.support.random_requests import joined
from tests.text.test_tokenizer import TEXTS, sentencepiece

HEAD = Head("i", "o", 1, "m")
ALL_TEXTS = [*TEXTS, "é😀ok", "<s>def a</s>\n<|endoftext|>é", "a"]


@pytest.fixture(scope="module", params=["byte level", "byte level, decoded together", "llama", "metaspace"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    steps = {"llama": strip, "metaspace": [decoders.ByteFallback(), decoders.Metaspace()]}
    if request.param in steps:
        directory = tmp_path_factory.mktemp("tokenizers") / request.param
        return sentencepiece(directory, decoders.Sequence(steps[request.param]))
    tokenizer = Tokenizer(DEMO)
    if "together" in request.param:
        tokenizer.token_bytes = None
    return tokenizer


def answer(tokenizer: Tokenizer, prompt: str | list[int], ids: list[int], skip: bool) -> RequestOutput:
    """Return the output of these tokens after a prompt."""
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    options = {"skip_special_tokens": skip, "spaces_between_special_tokens": False}
    detokenizer = Detokenizer(tokenizer, prompt_ids, **options)
    text = detokenizer.extend(ids) + detokenizer.finish()
    follows = not tokenizer.special_token_ids.issuperset(prompt_ids)
    texts = [tokenizer.token_text(t, first=not (follows or i)) for i, t in enumerate(ids)]
    places = [{t: Logprob(-1.0, 1, name)} for t, name in zip(ids, texts, strict=True)]
    completion = CompletionOutput(0, text, ids, "length", None, places, -1.0)
    of_prompt = [None, *({t: Logprob(-1.0, 1, tokenizer.token_text(t))} for t in prompt_ids[1:])]
    given = prompt if isinstance(prompt, str) else None
    return RequestOutput("r", given, prompt_ids, [completion], True, 0, RequestMetrics(0.0), of_prompt)


def in_parts(rng: random.Random, whole: RequestOutput) -> list[RequestOutput]:
    """Return outputs with deltas of some tokens each; all text is in the last."""
    (all_of_it,) = whole.outputs
    cuts = sorted({0, len(all_of_it.token_ids), *(rng.randrange(1, 9) for _ in range(2))})
    parts = []
    for start, end in itertools.pairwise(cuts):
        is_last = end >= len(all_of_it.token_ids)
        text, reason = (all_of_it.text, "length") if is_last else ("", None)
        ids, places = all_of_it.token_ids[start:end], all_of_it.logprobs[start:end]
        one = CompletionOutput(0, text, ids, reason, None, places, -1.0)
        parts.append(
            RequestOutput(
                "r",
                whole.prompt,
                whole.prompt_token_ids,
                [one],
                is_last,
                0,
                whole.metrics,
                whole.prompt_logprobs,
            )
        )
        if is_last:
            break
    return parts


@pytest.mark.parametrize("echoes", [True, False], ids=["echo", "no echo"])
def test_an_offset_is_where_the_text_of_its_token_begins(tokenizer, echoes):
    """On prompts of text and of ids, with and without special tokens, streamed and whole."""
    rng = random.Random(0)
    special = sorted(tokenizer.special_token_ids)
    names = [*map(tokenizer.token_text, special)]
    for i in range(60):
        text = ALL_TEXTS[i % len(ALL_TEXTS)] + rng.choice(["", *ALL_TEXTS])
        ids = tokenizer.encode_bare(text)
        if i % 3 == 1:
            ids.insert(rng.randrange(len(ids)), special[-1])
        prompt = text if i % 2 else [special[0], *ids]
        skip = i % 4 < 2
        output = answer(tokenizer, prompt, [*ids, *ids[:2]], skip)
        form = CompletionForm(
            decoding=Decoding(tokenizer, skip, spaces_between_special_tokens=False),
            echo=Echo(tokenizer=tokenizer) if echoes else None,
            logprobs=True,
        )
        (choice,) = completion_body([output], HEAD, form)["choices"]
        found = choice["logprobs"]
        tokens, offsets = found["tokens"], found["text_offset"]
        assert len(tokens) == len(output.prompt_token_ids) * echoes + len(ids) + 2
        for token, offset, following in zip(
            tokens, offsets, [*offsets[1:], len(choice["text"])], strict=True
        ):
            if REPLACEMENT in token or token in names:  # a part of a character, or perhaps left out
                assert choice["text"].startswith(token, offset) or offset <= following
            elif offset < following:
                assert choice["text"][offset:following] == token, (
                    prompt,
                    tokens,
                    offsets,
                    choice["text"],
                    skip,
                )
            else:  # Llama's tokenizer puts a blank before a text and after each special token
                assert token in ("", " ")
        chunks = CompletionChunks(HEAD, form)
        sent = [chunk for part in in_parts(rng, output) for chunk in chunks.add(0, part)]
        (streamed,) = joined("", sent)["choices"]
        assert (streamed["text"], streamed["logprobs"]) == (choice["text"], found)


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer):
    """Also of parts of characters, and of every other candidate; skipped special tokens have none."""
    special = max(tokenizer.special_token_ids)
    for text in ALL_TEXTS:
        for skip in (True, False):
            ids = [*tokenizer.encode_bare(text), special]
            output = answer(tokenizer, [5, *tokenizer.encode_bare("a")], ids, skip)
            decoding = Decoding(tokenizer, skip_special_tokens=skip)
            content = chat_places(output.outputs[0].logprobs, 1, decoding)["content"]
            assert all(place["top_logprobs"][0]["bytes"] == place["bytes"] for place in content)
            parts = [place["bytes"] for place in content]
            if tokenizer.token_bytes is None:  # parts of characters are not known there
                assert all(
                    p is not None or REPLACEMENT in c["token"] for p, c in zip(parts, content, strict=True)
                )
                continue
            assert b"".join(map(bytes, parts)) == output.outputs[0].text.encode()
            assert (parts[-1] == []) == skip


def test_emoji_of_an_echo_count_as_the_characters_that_they_are():
    tokenizer = Tokenizer(DEMO)
    output = answer(tokenizer, "é😀ok", tokenizer.encode_bare("!"), True)
    form = CompletionForm(decoding=Decoding(tokenizer), echo=Echo(tokenizer=tokenizer), logprobs=True)
    (choice,) = completion_body([output], HEAD, form)["choices"]
    offsets = dict(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True))
    assert (offsets["ok"] if "ok" in offsets else offsets["o"], offsets["!"]) == (2, 4)
