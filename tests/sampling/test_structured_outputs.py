"""Structured outputs: outputs match their grammar, other requests are unaffected, errors are reported."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

import paged
from paged import LLMEngine, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from paged.sampling import structured_outputs as module
from paged.sampling.structured_outputs import GrammarMasks, Grammars
from tests.support.checkpoints import SHAPE, assert_all_free, edit_json, new_engine, random_model
from tests.support.json_schemas import SCHEMAS, closed

DEMO = Path(paged.__file__).parent / "demo"
PROMPT = "def area(width, height):\n"
OBJECT = closed({"name": {"enum": ["Ann", "Bo"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}})


@pytest.fixture(scope="module")
def demo() -> LLMEngine:
    return new_engine(DEMO, skip_tokenizer_init=False, num_blocks=2048)


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model with the demo's tokenizer and more logits than the tokenizer has tokens."""
    directory = tmp_path_factory.mktemp("random")
    random_model(LlamaConfig(**{**SHAPE, "vocab_size": 4107, "eos_token_id": 0})).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory / name)
    return directory


def structured(**params: Any) -> SamplingParams:
    """Make SamplingParams, with json, regex, choice and grammar passed on to structured_outputs."""
    language = {k: params.pop(k) for k in ("json", "regex", "choice", "grammar") if k in params}
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(**language), **{"max_tokens": 100, "seed": 1, **params}
    )


def run(engine: LLMEngine, *params: SamplingParams) -> list[RequestOutput]:
    outputs = engine.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    assert_all_free(engine)
    return outputs


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def logits_of_steps(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list to which the logits of every later step are appended."""
    monkeypatch.setattr(engine.runner, "graphs", None)  # a replay does not call what is replaced here
    found, head = [], engine.runner.model.logits

    def noted(*args: Any) -> Tensor:
        found.append(head(*args))
        return found[-1].clone()

    monkeypatch.setattr(engine.runner.model, "logits", noted)
    return found


# Every output is valid


def test_there_are_200_valid_schemas():
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS) == 200
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("model", ["demo", "random"])
def test_outputs_of_200_schemas_are_valid(model, demo, random_checkpoint):
    options = {"skip_tokenizer_init": False, "num_blocks": 6000, "max_model_len": 480}
    engine = demo if model == "demo" else new_engine(random_checkpoint, **options)
    outputs = run(engine, *(structured(json=schema, max_tokens=400) for schema in SCHEMAS))
    for schema, output in zip(SCHEMAS, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.finish_reason == "stop", (schema, completion)
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(completion.text))
        # White space is bounded, and tokens that the tokenizer does not have are never chosen.
        assert not re.search(r"\s{40}", completion.text)
        assert max(completion.token_ids) < 4096
    assert len(set(texts(outputs))) > 100


REGEXES = ["[a-c]{2,9}", r"\d{3}-\d{4}", "(yes|no), (sir|madam)!", "é{1,3}😀", "^abc?$", "a{5}"]
CHOICES = [["yes", "no"], ["a", "ab", "abc"], ['"quoted"', "new\nline", "back\\slash", "\U0001f600", "nul\0"]]
LIST = 'root ::= "(" item ("," item){0,3} ")"\nitem ::= [0-9]{1,3} | root0\nroot0 ::= "()" '
SUM = 'start: term ("+" term)~0..4\nterm: /[0-9]{1,3}/ | "(" start ")" | "x"'


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regex_choice_and_grammar(demo, temperature):
    params = [
        *(structured(regex=regex, temperature=temperature) for regex in REGEXES),
        *(structured(choice=choice, temperature=temperature) for choice in CHOICES),
        structured(grammar=LIST, temperature=temperature),
        structured(grammar=SUM, temperature=temperature, max_tokens=400),
    ]
    outputs = run(demo, *params)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    made = iter(texts(outputs))
    for regex in REGEXES:
        assert re.fullmatch(regex, next(made))
    for choice in CHOICES:
        assert next(made) in choice
    assert re.fullmatch(r"\((\d{1,3}|\(\))(,(\d{1,3}|\(\))){0,3}\)", next(made))
    eval(re.sub(r"\b0+(?=\d)", "", next(made)), {"x": 1})


@pytest.mark.parametrize("vocab_size", [300, 340], ids=["fewer-logits", "more-logits"])
def test_sentencepiece_tokenizer(tmp_path, vocab_size):
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    pieces += ["▁the", "▁cat", "at", "é", *(f"{c}{c}" for c in letters)]
    assert len(pieces) == 316
    write_sentencepiece(tmp_path, pieces)
    random_model(LlamaConfig(**{**SHAPE, "vocab_size": vocab_size, "eos_token_id": 2})).save_pretrained(
        tmp_path
    )
    engine = new_engine(tmp_path, skip_tokenizer_init=False)
    regexes = ["[a-f ]{3,12}", "the (cat|dog)s", "é[à-ý]"]
    outputs = engine.generate([[5, 259, 261]] * 3, [structured(regex=r) for r in regexes], use_tqdm=False)
    for regex, output in zip(regexes, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(regex, output.outputs[0].text), output
        assert max(output.outputs[0].token_ids) < min(vocab_size, 316)


def write_sentencepiece(directory: Path, pieces: list[str]) -> None:
    """Write a tokenizer like Llama 2's: blanks are a character, and characters may be bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)


# How it is chosen


@pytest.mark.parametrize("edits", [{}, {"logit_bias": {0: 0.0}}], ids=["plain", "edited"])
def test_greedy_chooses_the_most_likely_allowed_token(demo, monkeypatch, edits):
    from llguidance import LLMatcher, grammar_from
    from llguidance.hf import from_tokenizer

    steps = logits_of_steps(demo, monkeypatch)
    written = []  # the logits that masks were written over
    apply = GrammarMasks.apply
    monkeypatch.setattr(
        GrammarMasks, "apply", lambda masks, kernels, x: (written.append(x), apply(masks, kernels, x))
    )
    regex = "[a-z]{4} [0-9]{4}"
    (output,) = run(demo, structured(regex=regex, temperature=0.0, logprobs=2, **edits))
    matcher = LLMatcher(from_tokenizer(demo.tokenizer.hf, eos_token=[0]), grammar_from("regex", regex))
    (completion,) = output.outputs
    assert len(steps) == len(completion.token_ids) == len(completion.logprobs)
    raw_differs = False
    for logits, token, reported in zip(steps, completion.token_ids, completion.logprobs, strict=True):
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(words, bitorder="little", count=4096)).bool()
        assert token == logits[0].where(allowed, -torch.inf).argmax()
        # Reported log-probabilities are the model's, before the grammar.
        raw = logits[0].log_softmax(-1)
        assert reported[token].logprob == pytest.approx(raw[token].item(), abs=1e-4)
        raw_differs |= token != raw.argmax()
        assert token == 0 or matcher.consume_token(token)
    assert raw_differs
    assert len(written) == (len(steps) if edits else 0)


def test_neighbours_keep_their_tokens(demo):
    free = [SamplingParams(max_tokens=12, seed=i, temperature=float(i % 2)) for i in range(4)]
    alone = [run(demo, params)[0].outputs[0].token_ids for params in free]
    bound = [structured(json=OBJECT), structured(choice=["a", "b"], temperature=0.0)]
    mixed = run(demo, free[0], bound[0], free[1], free[2], bound[1], free[3])
    assert [mixed[i].outputs[0].token_ids for i in (0, 2, 3, 5)] == alone
    assert [mixed[i].outputs[0].token_ids for i in (1, 4)] == [
        run(demo, b)[0].outputs[0].token_ids for b in bound
    ]


def test_samples_and_forks_have_states_of_their_own(demo):
    (output,) = run(demo, structured(json=OBJECT, n=3, temperature=2.0))
    assert len({completion.text for completion in output.outputs}) > 1
    for completion in output.outputs:
        jsonschema.validate(json.loads(completion.text), OBJECT)

    params = structured(regex="[a-z]{3}( [a-z]{3}){4}", temperature=2.0)
    demo.add_request("parent", PROMPT, params)
    for _ in range(4):
        demo.step()
    demo.fork("parent", "child")
    with pytest.raises(RequestError, match=r"structured_outputs choice does not allow the \d+ tokens"):
        demo.fork("parent", "other", structured(choice=["yes"]))
    finished = {}
    while demo.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0] for output in demo.step() if output.finished}
    assert_all_free(demo)
    assert finished["parent"].text != finished["child"].text
    assert finished["parent"].text[:4] == finished["child"].text[:4]
    for completion in finished.values():
        assert re.fullmatch("[a-z]{3}( [a-z]{3}){4}", completion.text)


def test_preemption_changes_nothing(demo):
    params = [structured(regex=f"([a-z]{{2}}{i} ){{14}}", n=1 + (i == 2), max_tokens=80) for i in range(4)]
    roomy = run(demo, *params)
    tight = new_engine(DEMO, skip_tokenizer_init=False, num_blocks=13, block_size=8)
    outputs = run(tight, *params)
    assert tight.stats().num_recompute_preemptions
    assert texts(outputs) == texts(roomy)


def test_a_failed_step_changes_nothing(demo, monkeypatch):
    expected = texts(run(demo, structured(json=OBJECT)))
    monkeypatch.setattr(demo.runner, "graphs", None)  # a replay does not call what is replaced here
    calls, forward = iter(range(100)), demo.runner.model.forward

    def failing(*args: Any) -> Tensor:
        if next(calls) == 3:
            raise RuntimeError("the device is gone")
        return forward(*args)

    monkeypatch.setattr(demo.runner.model, "forward", failing)
    demo.add_request("r", PROMPT, structured(json=OBJECT))

    def finish() -> list[RequestOutput]:  # in any number of steps: one whose mask is late computes nothing
        outputs: list[RequestOutput] = []
        while demo.has_unfinished_requests():
            outputs = demo.step()
        return outputs

    with pytest.raises(RuntimeError, match="is gone"):
        finish()
    assert texts(finish()) == expected


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_error_after_a_token_was_appended_changes_nothing(demo, monkeypatch, at):
    """The token may complete the grammar, and nothing but the next mask tells."""
    params = structured(regex="[a-z]{2,6}", ignore_eos=True)
    expected = texts(run(demo, params))
    policy = demo.scheduler.policy
    generated = policy.generated
    calls = iter(range(1, 100))

    def failing(requests: Sequence[Any]) -> None:
        if next(calls) == at:
            raise RuntimeError("the policy fails")
        generated(requests)

    monkeypatch.setattr(policy, "generated", failing)
    demo.add_request("r", PROMPT, params)
    outputs: list[RequestOutput] = []
    while demo.has_unfinished_requests():
        with suppress(RuntimeError):
            outputs = demo.step() or outputs
    assert texts(outputs) == expected
    assert outputs[0].outputs[0].finish_reason == "stop"


def test_an_interrupt_of_the_recovery_holds_no_request(demo, monkeypatch):
    params = SamplingParams(temperature=0.0, max_tokens=8, stop=["never"])
    expected = texts(run(demo, params))
    execute = demo.runner.execute
    end = demo.core.outputs.end_at_stop_string
    fails = iter([True, True])

    def executing(schedule: Any) -> Any:
        if next(fails, False):
            raise KeyboardInterrupt
        return execute(schedule)

    def ending(*arguments: Any) -> Any:
        if next(fails, False):
            raise KeyboardInterrupt
        return end(*arguments)

    demo.add_request("r", PROMPT, params)
    demo.step()
    monkeypatch.setattr(demo.runner, "execute", executing)
    monkeypatch.setattr(demo.core.outputs, "end_at_stop_string", ending)
    with pytest.raises(KeyboardInterrupt):
        demo.step()
    outputs: list[RequestOutput] = []
    for _ in range(20):
        outputs = demo.step() or outputs
    assert texts(outputs) == expected


# How it ends


def test_ends(demo):
    cases = [
        # (parameters, text, finish_reason, stop_reason, last token)
        ({"regex": "abc"}, "abc", "stop", None, 0),
        ({"regex": "abc", "ignore_eos": True}, "abc", "stop", None, None),
        ({"regex": "abc", "ignore_eos": True, "stop_token_ids": [70]}, "abc", "stop", 70, 70),
        ({"choice": ["ab", "abab"], "ignore_eos": True}, "abab", "stop", None, None),
        ({"regex": "a{20}", "max_tokens": 2, "ignore_eos": True}, None, "length", None, None),
        ({"regex": "abc-def", "stop": "-"}, "abc", "stop", "-", None),
        ({"regex": "a+", "min_tokens": 5, "max_tokens": 9}, None, None, None, None),
    ]
    outputs = run(demo, *(structured(**params) for params, *_ in cases))
    for (params, text, reason, stop_reason, last), output in zip(cases, outputs, strict=True):
        (completion,) = output.outputs
        assert text in (None, completion.text), params
        assert reason in (None, completion.finish_reason), params
        assert completion.stop_reason == stop_reason, params
        assert last in (None, completion.token_ids[-1]), params
        assert last is not None or 0 not in completion.token_ids[:5]
    assert len(outputs[-1].outputs[0].token_ids) > 5


def test_model_without_eos_finishes_where_the_grammar_ends(tmp_path, random_checkpoint):
    shutil.copytree(random_checkpoint, tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        edit_json(tmp_path / name, eos_token_id=None)
    engine = new_engine(tmp_path, skip_tokenizer_init=False)
    assert not engine.eos_token_ids
    (output,) = run(engine, structured(json=OBJECT, n=2))
    for completion in output.outputs:
        jsonschema.validate(json.loads(completion.text), OBJECT)
        assert (completion.finish_reason, completion.token_ids.count(0)) == ("stop", 0)


@pytest.mark.parametrize("ends", [{}, {"ignore_eos": True}], ids=["eos", "ignore_eos"])
def test_complete_before_min_tokens_is_an_error_that_names_both(demo, ends):
    short, neighbour = run(demo, structured(regex="abc", min_tokens=50, **ends), structured(regex="abc"))
    assert short.outputs[0].finish_reason == "error"
    assert re.search(
        r"structured_outputs .* after \d+ tokens, .*min_tokens is 50", short.outputs[0].stop_reason
    )
    assert neighbour.outputs[0].text == "abc"


def test_token_outside_the_grammar_is_an_error_of_its_request(demo, monkeypatch):
    monkeypatch.setattr(GrammarMasks, "apply", lambda *_: None)
    free, bound = run(demo, SamplingParams(max_tokens=3, temperature=0.0), structured(regex="[0-9]+é"))
    assert free.outputs[0].finish_reason == "length"
    assert bound.outputs[0].finish_reason == "error"
    assert "not in the language of structured_outputs" in bound.outputs[0].stop_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", ["allowed", "everywhere"])
def test_nan_ends_the_request_with_an_error(demo, monkeypatch, place, temperature):
    monkeypatch.setattr(demo.runner, "graphs", None)  # a replay does not call what is replaced here
    calls, head = iter(range(100)), demo.runner.model.logits

    def broken(*args: Any) -> Tensor:
        logits = head(*args)
        if next(calls) == 0:
            logits[0, 66 if place == "allowed" else slice(None)] = torch.nan
        return logits

    monkeypatch.setattr(demo.runner.model, "logits", broken)
    params = structured(regex="[a-z]{3}", temperature=temperature)
    bound, sound = run(demo, params, params)
    assert bound.outputs[0].finish_reason == "error"
    assert "not finite" in bound.outputs[0].stop_reason
    assert re.fullmatch("[a-z]{3}", sound.outputs[0].text)


def test_abort_releases_the_grammar(demo):
    demo.add_request("r", PROMPT, structured(json=OBJECT))
    demo.step()
    demo.abort_request("r")
    assert_all_free(demo)
    assert run(demo, structured(regex="ab"))[0].outputs[0].text == "ab"


# What is refused


REFUSED = [
    ({"regex": "a("}, r"structured_outputs regex is refused: .*unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": r"[^\s\S]"}, "nothing in this model's vocabulary matches"),
    ({"regex": "\ud800"}, "surrogates not allowed"),
    ({"regex": "a" * 300_000}, "has 300,000 characters; 262,144 are allowed"),
    ({"choice": ["\ud800"]}, "structured_outputs choice is refused"),
    ({"grammar": "root ::= missing"}, "Rule 'missing' not found"),
    ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    ({"grammar": "start: " + "(" * 100_000}, "too deeply nested"),
    ({"json": "[1]"}, "structured_outputs json is refused"),
    ({"json": {"type": "strin"}}, "Invalid type: strin"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: .*"not"'),
    ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf"),
    (
        {"json": {"items": {"type": "string", "pattern": "a(?=b)"}}},
        r"json is refused: items: .*look-around",
    ),
    ({"json": {"$ref": "#/$defs/missing"}}, r"\$ref: .*/\$defs/missing"),
    ({"json": {"items": {"$ref": "#"}, "minItems": 1, "type": "array"}}, "items: no finite value matches"),
    ({"json": {"const": float("inf")}}, "json must be a JSON schema: .*Out of range float values"),
    (
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        r"minimum \(5\) is greater than maximum \(3\)",
    ),
    ({"json": '{"type":"array","items":' * 500 + "{}" + "}" * 500}, "recursion limit exceeded"),
]


@pytest.mark.parametrize(("language", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_grammars_are_refused_when_the_request_is_added(demo, language, message):
    with pytest.raises(RequestError, match=message) as caught:
        demo.add_request("bad", PROMPT, structured(**language))
    assert len(str(caught.value)) < 1000
    assert not demo.has_unfinished_requests()


def test_chains_of_rules_do_not_overflow_the_stack(demo):
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(15_000))
    try:
        demo.add_request("deep", PROMPT, structured(grammar=f'start: r0\n{rules}r15000: "a"'))
    except RequestError:
        return
    demo.abort_request("deep")


def test_compilation_has_a_deadline_and_the_cache_a_limit(demo, monkeypatch):
    grammars, compiled, over = Grammars(demo.tokenizer, 4096, frozenset([0])), [], threading.Event()
    compile_it = module._compile

    def slow(kind: str, text: str, vocabulary: Any) -> Any:
        compiled.append(text)
        if text == "slow":
            over.wait(60)
        return compile_it(kind, text, vocabulary)

    monkeypatch.setattr(module, "_compile", slow)
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        grammars.start(StructuredOutputsParams(regex=regex))
    assert compiled == ["a", "b", "c", "b"]
    grammars.start(StructuredOutputsParams(grammar='start: "a"'))
    with pytest.raises(RequestError, match="grammar is refused"):  # the same text as another kind of grammar
        grammars.start(StructuredOutputsParams(grammar="a"))
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.01)
    with pytest.raises(RequestError, match="structured_outputs regex was not compiled within"):
        grammars.start(StructuredOutputsParams(regex="slow"))
    over.set()


def test_add_and_fork_wait_for_a_grammar_no_longer_than_its_deadline(demo, monkeypatch):
    over, compile_it = threading.Event(), module._compile
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="too slow"))
    demo.add_request("other", "x", SamplingParams(max_tokens=4, ignore_eos=True))
    demo.step()
    monkeypatch.setattr(module, "_compile", lambda *args: over.wait(60) and compile_it(*args))
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.01)
    for ask in (lambda: demo.add_request("a", "x", params), lambda: demo.fork("other", "a", params)):
        with pytest.raises(RequestError, match="structured_outputs regex was not compiled within"):
            ask()
    over.set()
    last = [output for _ in range(3) for output in demo.step()][-1]
    assert (last.request_id, last.finished) == ("other", True)
    assert_all_free(demo)


def test_missing_library_and_missing_tokenizer_are_named(demo, monkeypatch):
    params = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        Grammars(None, 4096, frozenset([0])).start(params)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(RequestError, match=re.escape("pip install 'paged[structured]'")):
        Grammars(demo.tokenizer, 4096, frozenset([0])).start(params)
