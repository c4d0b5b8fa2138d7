"""Whatever a checkpoint's tokenizer is, text costs bounded time and memory, and what fails is one error."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import textwrap

import pytest
from tokenizers import Regex, normalizers
from transformers import AutoTokenizer

from paged import LLMEngine, SamplingParams, StructuredOutputsParams
from paged.architectures.config import DEMO
from paged.base.errors import CheckpointError, RequestError
from paged.checkpoints.gguf.tokenizer import PRE_TOKENIZERS
from paged.checkpoints.tokenizer_patterns import PUBLISHED
from paged.text.remote_tokenizer import RemoteTokenizer
from paged.text.tokenizer import Tokenizer
from paged.text.tokenizer_bounds import why_unbounded
from paged.text.tokenizer_files import source_of
from paged.text.tokenizer_worker import load
from paged.text.worker import WorkerLimits

VOCABULARY = {"<unk>": 0, "a": 1, "b": 2, "c": 3}
BPE = {"type": "BPE", "vocab": VOCABULARY, "merges": [], "unk_token": "<unk>"}
WORD_PIECE = {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
UNKNOWN = {"id": 0, "content": "<unk>", **FLAGS, "special": True}


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern, content, form="String"):
    return {"type": "Replace", "pattern": {form: pattern}, "content": content}


def charsmap(*numbers):
    binary = b"".join(number.to_bytes(4, "little") for number in numbers)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(binary).decode()}


def template(*pieces, **known):
    single = [
        {"SpecialToken" if piece[0] == "<" else "Sequence": {"id": piece, "type_id": 0}} for piece in pieces
    ]
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def description(**parts):
    empty = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", **dict.fromkeys(empty), "added_tokens": [UNKNOWN], "model": BPE, **parts}


def write(directory, *, settings=None, **parts):
    """Write the demo's checkpoint with another tokenizer, or only other settings."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, directory)
    if parts:
        (directory / "tokenizer.json").write_text(json.dumps(description(**parts)))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(named))
    if settings:
        file = directory / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return directory


def refused(directory) -> str:
    with pytest.raises(CheckpointError) as info:
        Tokenizer(directory)
    message = str(info.value)
    assert len(message) <= 500
    assert message.isprintable()
    assert "skip_tokenizer_init=True" in message
    return message


@pytest.fixture
def short_limits(monkeypatch):
    limits = WorkerLimits(time_s=0.5, memory=2**30)
    monkeypatch.setattr(RemoteTokenizer.__init__, "__defaults__", (limits,))


# Files that make the library panic or raise, when it reads them or tokenizes the probe.
BROKEN = {
    "charsmap-of-nothing": {"normalizer": charsmap(4, 0xFFFFFFFF)},
    "charsmap-cut-off": {"normalizer": charsmap(255, 0xFFFFFFFF)},
    "missing-special-token": {"post_processor": template("<x>", "A")},
    "pieces-of-no-length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "regex-not-closed": {"pre_tokenizer": split("(a")},
    "prefix-of-more-bytes": {
        "model": {
            **BPE,
            "vocab": {"<unk>": 0, "éa": 1, "a": 2, "é": 3},
            "merges": [["é", "a"]],
            "continuing_subword_prefix": "xxxxé",
        }
    },
    "word-level-unknown": {"model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "[UNK]"}},
    "word-piece-unknown": {"model": {**WORD_PIECE, "vocab": VOCABULARY, "unk_token": "[UNK]"}},
    "bpe-unknown": {"model": {**BPE, "unk_token": "[UNK]"}},
    "unigram-unknown": {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}},
}


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_break_the_library_are_refused_in_one_line(kind, tmp_path):
    message = refused(write(tmp_path, **BROKEN[kind]))
    assert message.startswith(str(tmp_path))


def test_the_report_of_a_panic_does_not_reach_the_terminal(tmp_path):
    write(tmp_path, **BROKEN["missing-special-token"])
    code = f"""
        from pathlib import Path
        from paged.text.tokenizer import Tokenizer
        try:
            Tokenizer(Path({str(tmp_path)!r}))
        except ValueError as error:
            print(error)
    """
    # A pipe, as the worker may write no file.
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
    )
    assert (run.stdout.count("\n"), run.stderr) == (1, "")


def test_a_decoder_that_panics_is_refused(tmp_path):
    message = refused(write(tmp_path, decoder={"type": "Strip", "content": "a", "start": 0, "stop": 5}))
    assert "index out of bounds" in message or "decode is not bounded" in message


# A tokenizer that passes the probe, and the texts that it fails on.
EXPANDING = replace("b", "b" * 999)
HARD = {
    "a" * 40 + "!": "retry-limit-in-match over|takes more than 0.5 s",
    "c" * 4000: "takes more than 0.5 s",
    "b" * 2**21: "takes more than",  # 1024 MiB, which may take longer than 0.5 s
}


@pytest.mark.usefixtures("short_limits")
def test_a_prompt_that_exceeds_the_limits_is_refused_alone(tmp_path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    write(tmp_path, normalizer=EXPANDING, pre_tokenizer=split("(a+)+$|c+c+x"))
    engine = LLMEngine(str(tmp_path), device="cpu", num_blocks=16)
    params = SamplingParams(max_tokens=3, temperature=0)
    engine.add_request("good", "a c", params)
    engine.step()
    for text, reason in HARD.items():
        with pytest.raises(RequestError, match=reason):
            engine.add_request("hard", text, params)
    engine.add_request("after", "a c", params)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    assert outputs.keys() == {"good", "after"}
    assert outputs["good"].outputs[0].token_ids == outputs["after"].outputs[0].token_ids
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="structured_outputs needs the tokenizer in this process"):
        engine.add_request("grammar", "a c", grammar)
    with pytest.raises(CheckpointError, match=r"because .*load it with transformers\.AutoTokenizer"):
        engine.get_tokenizer()


# Settings that are refused, and what the message says.
SETTINGS = {
    "length": ({"model_max_length": "x"}, "model_max_length must be a number, got 'x'"),
    "template": ({"chat_template": 5}, "chat_template must be a string, or a list"),
    "name-of-template": ({"chat_template": [{"name": 5, "template": "x"}]}, "chat_template must be a string"),
    "token": ({"eos_token": ["x"]}, "eos_token must be a string or the fields of a token"),
    "tokens": ({"additional_special_tokens": 7}, "additional_special_tokens must be a list"),
    "added": ({"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder must be an object of ids"),
    "flag": ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    "files": (
        {"fast_tokenizer_files": ["../away/tokenizer.4.0.0.json"]},
        "fast_tokenizer_files must be a list",
    ),
    "inputs": ({"init_inputs": ["/etc/passwd"]}, "init_inputs must be left out"),
    "vocabulary": ({"vocab": "/etc/passwd"}, "vocab must be left out"),
    "class": ({"tokenizer_class": "AutoModelForCausalLM"}, "must be the name of a tokenizer's class"),
    "class-that-loads": (
        {"tokenizer_class": "AutoTokenizerFast"},
        "'AutoTokenizerFast' is not a class of tokenizers",
    ),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_are_refused_by_key(kind, tmp_path):
    settings, reason = SETTINGS[kind]
    message = refused(write(tmp_path, settings=settings))
    assert "tokenizer_config.json" in message
    assert reason in message


@pytest.mark.parametrize(
    ("name", "value"),
    [("special_tokens_map.json", {"eos_token": 5}), ("added_tokens.json", {"<x>": "y"})],
)
def test_other_files_are_refused_by_key(name, value, tmp_path):
    (write(tmp_path) / name).write_text(json.dumps(value))
    (key,) = value
    assert refused(tmp_path).startswith(f"{tmp_path / name}: {key} must be")


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "vocab.txt"]
)
def test_a_link_to_a_file_elsewhere_is_refused(name, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    write(inside)
    (inside / name).unlink(missing_ok=True)
    (inside / name).symlink_to(DEMO / "tokenizer.json")
    assert refused(inside).startswith(f"{inside / name} is a link to {DEMO / 'tokenizer.json'}, outside")


def test_the_cache_of_the_hub_is_read_through_its_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    snapshot.mkdir(parents=True)
    write(snapshot)
    blobs.mkdir()
    for file in [*snapshot.iterdir()]:
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert Tokenizer(snapshot).encode("def") == Tokenizer(DEMO).encode("def")


@pytest.mark.parametrize(
    "name",
    [
        "LlamaTokenizerFast",
        "LlamaTokenizer",
        "Qwen2TokenizerFast",
        "GPT2Tokenizer",
        "GPTNeoXTokenizerFast",
        "PreTrainedTokenizer",
    ],
)
def test_classes_that_checkpoints_name_are_loaded_in_this_process(tmp_path, name):
    tokenizer = Tokenizer(write(tmp_path, settings={"tokenizer_class": name}))
    assert len(tokenizer.hf) == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode("def f(x):")).endswith("def f(x):")


def test_paths_in_the_settings_are_not_given_to_classes(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **options: given.append(options) or str)
    path = {"entity_vocab_file": "/etc/passwd"}
    load(source_of(write(tmp_path, settings=path | {"tokenizer_class": "LlamaTokenizer"})))
    assert given[0]["entity_vocab_file"] is None
    assert given[0]["trust_remote_code"] is False


def test_only_the_files_of_the_checkpoint_are_opened(tmp_path):
    """Names of files that settings have are where the author's files were: they are not opened."""
    away = tmp_path / "away"
    away.mkdir()
    shutil.copy(DEMO / "tokenizer.json", away)
    inside = tmp_path / "inside"
    inside.mkdir()
    keys = ("vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "chat_template_file")
    write(
        inside, settings={"tokenizer_class": "LlamaTokenizer"} | dict.fromkeys(keys, f"{away}/tokenizer.json")
    )
    code = f"""
        import sys
        from paged.text.tokenizer import Tokenizer
        import transformers
        opened = []
        sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
        Tokenizer(__import__("pathlib").Path({str(inside)!r}))
        assert any("inside/tokenizer.json" in name for name in opened), opened
        assert not any("away" in name for name in opened), opened
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_the_worker_opens_no_file_elsewhere(tmp_path):
    inside, away = tmp_path / "inside", tmp_path / "away"
    for directory in (inside, away):
        directory.mkdir()
        (directory / "file").touch()
    (inside / "link").symlink_to(away / "file")
    code = f"""
        from paged.text.tokenizer_worker import watch_files
        watch_files([{str(inside)!r}])
        import wave  # from the library of Python
        open("{inside}/file").close()
        for name in ("{away}/file", "{inside}/link", "{inside}/../away/file"):
            try:
                open(name)
            except PermissionError:
                continue
            raise SystemExit(name)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


RUNS = [
    text * 200_000 for text in ("  ", "A", "a", "語", "- ", "\u0301", "1", "'", " \u3000", "\n ", "\t", "Aa")
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_take_linear_time_and_match_no_empty_text(pattern):
    replaced = normalizers.Replace(Regex(pattern), "x")
    for text in RUNS:  # a quadratic pattern takes a minute
        replaced.normalize_str(text + "x")
    for text in ("", *"aA1'- \n\u3000語\u0301!🙂"):
        assert len(replaced.normalize_str(text)) == len(text)


def test_patterns_are_known_by_their_exact_text():
    assert {kind.expression for kind in PRE_TOKENIZERS.values()} - {None} <= PUBLISHED.keys()
    for pattern in PUBLISHED:
        assert why_unbounded(description(pre_tokenizer=split(pattern))) is None
        for other in (pattern + "|x", pattern + "+", f"(?:{pattern})", pattern[:-1]):
            found = why_unbounded(description(pre_tokenizer=split(other)))
            assert other in PUBLISHED or "is not known to take linear time" in found


UNBOUNDED = [
    ("normalizer", replace("", "x"), "pattern ''"),
    ("normalizer", replace("a", "a" * 65), "65 times as long"),
    ("normalizer", {"type": "Prepend", "prepend": "x" * 65}, "66 times as long"),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFKC"}] * 2}, "121 times as long"),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Strip"}] * 17}, "17 steps"),
    ("normalizer", replace("a+b", "x", "Regex"), "'a+b' is not known to take linear time"),
    ("normalizer", charsmap(0), "'Precompiled' is not known"),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "'FixedLength' is not known"),
    ("pre_tokenizer", 5, "is not understood"),
    ("post_processor", template("<x>", "A"), "no special token '<x>'"),
    ("post_processor", template("A", "A"), "does not have the text once"),
    ("post_processor", template("B"), "does not have the text once"),
    ("normalizer", {"type": "Prepend", "prepend": ""}, "prepends nothing"),
    ("decoder", replace("a", "a" * 65), "65 times as long"),
    ("decoder", {"type": "Strip", "content": "a", "start": 0, "stop": 1}, "strips the ends"),
    ("model", {"type": "Unigram", "vocab": [["a" * 2000, -1.0]], "unk_id": 0}, "tokens of up to 2000"),
    (
        "model",
        {**WORD_PIECE, "vocab": VOCABULARY, "unk_token": "a", "max_input_chars_per_word": 10**6},
        "200",
    ),
    ("model", {"type": "New"}, "is not understood"),
    ("added_tokens", [{**UNKNOWN, "content": "x" * 2**21}], "2097152 characters"),
]


@pytest.mark.parametrize(("name", "part", "reason"), UNBOUNDED)
def test_what_is_not_known_to_be_bounded_is_said(name, part, reason):
    assert why_unbounded(description()) is None
    assert reason in why_unbounded(description(**{name: part}))


@pytest.mark.parametrize("normalizer", [{"type": "Strip", "strip_left": True}, replace("a", "")], ids=str)
def test_added_tokens_of_text_that_is_removed_are_not_known_to_be_bounded(normalizer):
    """The library takes offsets in the remaining text for those in the text, and panics."""
    found = description(normalizer=normalizer, added_tokens=[{**UNKNOWN, "normalized": True}])
    assert "removes text in which added tokens are found" in why_unbounded(found)
    assert why_unbounded(description(normalizer=normalizer)) is None


def test_an_interrupt_passes(monkeypatch):
    tokenizer = Tokenizer(DEMO)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("x")


def test_a_remote_tokenizer_is_equal_to_that_of_transformers(tmp_path, monkeypatch):
    """Here it is only the pattern that sends the demo's tokenizer to the worker."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    parts = json.loads(file.read_text())
    parts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|(?=x)y"
    file.write_text(json.dumps(parts))
    ours, theirs = Tokenizer(tmp_path), Tokenizer(DEMO)
    assert isinstance(ours._tokenizer, RemoteTokenizer)
    assert (len(ours), ours.special_token_ids) == (len(theirs), theirs.special_token_ids)
    assert (ours.special_tokens, ours.chat_templates) == (theirs.special_tokens, theirs.chat_templates)
    for text in ("", "def f(x):\n    return ' naïve 日本語 🙂'", "<|endoftext|> x"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert [ours.token_text(i) for i in ids] == [theirs.token_text(i) for i in ids]
    with pytest.raises(RequestError, match="lone surrogate"):
        ours.encode("\ud800")
    # A text that is far too long is refused before it is sent as a whole.
    sizes, ask = list[int](), RemoteTokenizer._ask
    monkeypatch.setattr(RemoteTokenizer, "_ask", lambda self, r: sizes.append(len(str(r))) or ask(self, r))
    assert ours.least_tokens("def f(x): " * 100_000, 100) > 100
    assert sum(sizes) < 10_000
