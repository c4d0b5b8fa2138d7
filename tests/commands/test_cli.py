"""The command line, run in this process except where only a fresh one can show the behaviour."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.main import get_command

from paged import EngineConfig, LLMEngine, SamplingParams, StructuredOutputsParams, __version__
from paged.architectures.config import DEMO
from paged.architectures.families.multimodal import NATIVE
from paged.base.from_vllm import neutral_of
from paged.commands import cli, common, generate
from paged.commands.headings import HEADINGS
from paged.commands.several_values import one_value_each
from paged.device import threads
from paged.protocol.jobs import read_jobs
from paged.scheduler.schedule import StepOutput
from tests.support.checkpoints import edit_json
from tests.support.command_line import write
from tests.support.served import eventually

SMALL = ("--num-blocks", "64", "--device", "cpu")
HEADING = re.compile(r"^(\w+):$", re.MULTILINE)
LONG_GRAMMAR = f'root ::= "{"b" * 300}"'  # longer than a file name may be
GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.fixture(scope="module")
def engine():
    return LLMEngine("demo", num_blocks=64, device="cpu")


@pytest.fixture
def loaded(engine, monkeypatch):
    """Share one engine between runs instead of loading one for each."""
    monkeypatch.setattr(common, "start", lambda _: engine)
    yield engine
    engine.scheduler.check()
    assert not engine.has_unfinished_requests()


def expected(engine, prompt, **params) -> str:
    return engine.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0].text


def test_prompt_text_and_figures(run, engine):
    code, out, err = run("generate", "def add(a, b):", *GREEDY, *SMALL)
    assert code == 0
    assert out == "def add(a, b):" + expected(engine, "def add(a, b):", temperature=0, max_tokens=8) + "\n"
    start, figures = err.splitlines()
    assert start == engine.describe()
    num_tokens = len(engine.tokenizer.encode("def add(a, b):")) + 7
    assert figures.startswith("time to first token ")
    assert "; 8 tokens, " in figures
    assert figures.endswith(f" tokens/s; {-(-num_tokens // 16)} of 64 blocks used")


def test_text_comes_as_it_is_made(run, loaded, monkeypatch, capsys):
    pieces = []
    step = loaded.step

    def recorded_step():
        pieces.append(capsys.readouterr().out)
        return step()

    monkeypatch.setattr(loaded, "step", recorded_step)
    run("generate", "def add(a, b):", *GREEDY)
    assert pieces[0] == "def add(a, b):"
    assert len(pieces) == 8
    text = expected(loaded, "def add(a, b):", temperature=0, max_tokens=7)
    assert all(pieces[1:])
    assert "".join(pieces[1:]) == text


def test_prompt_from_stdin(run, loaded):
    text = expected(loaded, "def add(a, b):", temperature=0, max_tokens=8)
    assert run("generate", *GREEDY, stdin="def add(a, b):\n")[1] == f"def add(a, b):{text}\n"


def test_every_option_of_the_api_is_a_flag(run):
    help_text = run("generate", "--help")[1]
    assert HEADING.findall(help_text) == ["Arguments", "Options", *(h for h in HEADINGS if h != "Server")]
    names = {field.name for owner in (SamplingParams, EngineConfig) for field in fields(owner)}
    assert set(common.NO_FLAGS) < names
    flags = names - set(common.NO_FLAGS) | {"json_schema", "json_object", "regex", "choice", "grammar"}
    for name in flags:
        assert re.search(rf"\n  (-\w+, )?--{name.replace('_', '-')}[ ,]", help_text), name
    # Fields without an option are refused, not taken for another option.
    for name in common.NO_FLAGS:
        message = run.refused("generate", "x", f"--{name.replace('_', '-')}", "1")
        is_known = name in neutral_of("EngineArgs")
        assert ("they are a field of SamplingParams" if is_known else "No such option") in message
    # Help and defaults are those of the API; lines are wrapped to the width of the terminal.
    words = " ".join(help_text.split())
    assert "0 or -1 keeps all. [default: from generation_config.json, else 0]" in words
    assert "maximum number of tokens to generate. [default: from generation_config.json, else 256]" in words
    assert "branch, tag or commit of the model on the hub. [default: the hub's default branch]" in words
    assert "treat EOS as any other token. [default: off]" in words
    assert "[default: 256, or fewer if the recurrent states" in words
    assert "[default: demo]" in words
    assert "added to the logits of token ids. As ID=BIAS. Takes one value or several." in words
    assert """Takes one value or several. [default: '\\n' ':' '"' '*']""" in words


@pytest.mark.parametrize(
    "name", ["generate", "chat", "run-batch", "serve", "plan", "simulate", "models", "warmup"]
)
def test_help_shows_every_default(name):
    """A default of None is shown as what it stands for."""
    command = typer.main.get_command(cli.app).get_command(None, name)
    context = typer.Context(command)
    for option in command.params:
        if option.param_type_name == "option":
            flag, text = option.get_help_record(context)
            assert re.search(r"\[default: .+\]$", text), flag
            assert "None" not in text, flag


# An option for every field, with a value that is not its default.
FLAGS = {
    "n": (["--n", "2"], 2),
    "best_of": (["--best-of", "3"], 3),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.5"], 0.5),
    "top_k": (["--top-k", "-1"], -1),
    "min_p": (["--min-p", "0.1"], 0.1),
    "typical_p": (["--typical-p", "0.9"], 0.9),
    "top_n_sigma": (["--top-n-sigma", "1.5"], 1.5),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "repetition_penalty_last_n": (["--repetition-penalty-last-n", "8"], 8),
    "dry_multiplier": (["--dry-multiplier", "0.8"], 0.8),
    "dry_base": (["--dry-base", "2"], 2.0),
    "dry_allowed_length": (["--dry-allowed-length", "3"], 3),
    "dry_sequence_breakers": (
        ["--dry-sequence-breakers", ";", "--dry-sequence-breakers", "."],
        [";", "."],
    ),
    "dry_penalty_last_n": (["--dry-penalty-last-n", "0"], 0),
    "logit_bias": (["--logit-bias", "5=-100", "--logit-bias", "6=1.5"], {5: -100.0, 6: 1.5}),
    "allowed_token_ids": (["--allowed-token-ids", "1", "--allowed-token-ids", "0"], [1, 0]),
    "bad_words": (["--bad-words", "a b"], ["a b"]),
    "min_tokens": (["--min-tokens", "2"], 2),
    "max_tokens": (["--max-tokens", "3"], 3),
    "stop": (["--stop", "a", "--stop", "b,c"], ["a", "b,c"]),
    "stop_token_ids": (["--stop-token-ids", "1", "--stop-token-ids", "0"], [1, 0]),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "ignore_eos": (["--ignore-eos"], True),
    "logprobs": (["--logprobs", "2"], 2),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "detokenize": (["--no-detokenize"], False),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "spaces_between_special_tokens": (["--no-spaces-between-special-tokens"], False),
    "priority": (["--priority", "-1"], -1.0),
    "timeout_s": (["--timeout-s", "1.5"], 1.5),
    "num_speculative_tokens": (["--num-speculative-tokens", "2"], 2),
    "cache_salt": (["--cache-salt", "s"], "s"),
    "structured_outputs": (["--regex", "a+"], StructuredOutputsParams(regex="a+")),
}


class StandIn:
    """An engine that has options and defaults of sampling."""

    def __init__(self, options):
        self.options = options

    def params_of(self, given, max_tokens):
        return SamplingParams(**{"max_tokens": max_tokens, "top_p": 0.25, **given})


def test_every_sampling_flag_reaches_the_engine(run, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(common, "start", StandIn)
    monkeypatch.setattr(generate, "_stream", lambda engine, *given: seen.append((engine.options, *given)))
    monkeypatch.setattr(generate, "_check_shows_text", lambda _: None)
    no_flags = {"logits_processors", "output_kind", "no_stop_within", "seed"}  # --seed is the engine's
    assert {*FLAGS} | no_flags == {field.name for field in fields(SamplingParams)}
    given = {name: value for name, (_, value) in FLAGS.items() if name not in ("stop", "detokenize")}
    run("generate", "x", *(text for name in given for text in FLAGS[name][0]))
    # Stop strings need text.
    run("generate", "x", *FLAGS["stop"][0])
    run("generate", "x", *FLAGS["detokenize"][0])
    run("generate", "x")
    wanted = [given, {"stop": ["a", "b,c"]}, {"detokenize": False}, {}]
    assert seen == [
        ({"model": "demo"}, "x", SamplingParams(**{"max_tokens": 256, "top_p": 0.25, **params}), [], None)
        for params in wanted
    ]
    # The other kinds of structured outputs, as text or in a file.
    schema, grammar = write(tmp_path / "s.json", {"type": "null"}), write(tmp_path / "g", 'root ::= "a"')
    seen.clear()
    flags = [
        (["--json-schema", "{}"], {"json": "{}"}),
        (["--json-object"], {"json_object": True}),
        (["--json-schema", schema], {"json": schema.read_text()}),
        (["--choice", "a", "--choice", "b"], {"choice": ["a", "b"]}),
        (["--grammar", 'root ::= "b"'], {"grammar": 'root ::= "b"'}),
        (["--grammar", grammar], {"grammar": grammar.read_text()}),
        (["--grammar", LONG_GRAMMAR], {"grammar": LONG_GRAMMAR}),
    ]
    for argv, _ in flags:
        run("generate", "x", *argv)
    assert [params.structured_outputs for _, _, params, _, _ in seen] == [
        StructuredOutputsParams(**language) for _, language in flags
    ]


def test_engine_flags_reach_the_engine(run, monkeypatch):
    seen = []
    monkeypatch.setattr(common, "start", StandIn)
    monkeypatch.setattr(generate, "_stream", lambda engine, *_: seen.append(engine.options) or 0)
    options = {
        "model": "some/where",
        "tokenizer": "else/where",
        "revision": "v1",
        "tokenizer_revision": "v2",
        "generation_config": "paged",
        "dtype": "float32",
        "device": "cpu",
        "block_size": 32,
        "max_model_len": 100,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "num_blocks": 9,
        "gpu_memory_utilization": 0.5,
        "cpu_memory_utilization": 0.25,
        "attention_backend": "torch",
        "scheduling_policy": "fair",
        "long_prefill_token_threshold": 5,
        "max_num_partial_prefills": 2,
        "max_waiting": 7,
        "watermark": 0.1,
        "preemption_mode": "swap",
        "max_preemptions": 3,
        "swap_space": 0.5,
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "rank_timeout_s": 9.0,
        "seed": 3,
    }
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    weights = ("--tenant-weights", "a=2,b=0.5", "--tenant-weights", "c=1")
    layers = ("--pipeline-layers", "12", "--pipeline-layers", "10")
    images = ("--limit-mm-per-prompt", '{"image": {"count": 2}}', "--mm-processor-kwargs", '{"size": 9}')
    run("generate", "x", *flags, *weights, *layers, *images, "--no-enable-prefix-caching")
    extra = {"tenant_weights": {"a": 2.0, "b": 0.5, "c": 1.0}, "enable_prefix_caching": False}
    extra["pipeline_layers"] = [12, 10]
    extra |= {"limit_mm_per_prompt": {"image": {"count": 2}}, "mm_processor_kwargs": {"size": 9}}
    assert seen == [options | extra]


def test_file_of_texts(run, loaded, tmp_path):
    prompts = write(tmp_path / "prompts.txt", "def a(x):", "", '{"prompt": "as it stands"}')
    code, out, err = run("generate", "--prompts", prompts, *GREEDY)
    assert code == 0
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["index"] for result in results] == [0, 1]
    assert [result["prompt"] for result in results] == ["def a(x):", '{"prompt": "as it stands"}']
    for result in results:
        assert result["text"] == expected(loaded, result["prompt"], temperature=0, max_tokens=8)
        assert result["finish_reason"] in ("length", "stop")
    assert "2/2" in err
    assert "tokens/s" in err


def test_file_of_objects_in_order(run, loaded, tmp_path):
    # The first prompt takes longest, and its result still comes first.
    lines = [
        {"prompt": "def a(x):", "max_tokens": 20, "ignore_eos": True},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 2, "ignore_eos": True},
        {"prompt": "a\u2028b", "stop_token_ids": list(range(loaded.model_config.vocab_size))},
    ]
    output = tmp_path / "results.jsonl"
    prompts = write(tmp_path / "prompts.jsonl", *lines)
    # Parameters of a line override those of the command line.
    flags = ("--temperature", "0", "--max-tokens", "3")
    code, out, _ = run("generate", "--prompts", prompts, "--output", output, *flags)
    assert (code, out) == (0, "")
    first, second, third = map(json.loads, output.read_text().splitlines())
    assert list(first) == ["index", "prompt", "text", "token_ids", "finish_reason", "stop_reason"]
    assert first["text"] == expected(loaded, "def a(x):", temperature=0, max_tokens=20, ignore_eos=True)
    assert len(first["token_ids"]) == 20
    assert second["prompt_token_ids"] == [5, 6, 7]
    assert (len(second["token_ids"]), second["finish_reason"]) == (2, "length")
    assert third["prompt"] == "a\u2028b"
    assert (third["text"], third["finish_reason"]) == ("", "stop")


def test_lines_carry_terms_and_several_samples(run, loaded, tmp_path):
    lines = [
        {"prompt": "a", "n": 2, "seed": 3, "priority": 0, "tenant": "x", "timeout_s": 60},
        {"prompt": "a", "cache_salt": "s"},
    ]
    file = write(tmp_path / "p.jsonl", *lines)
    code, out, _ = run("generate", "--prompts", file, "--max-tokens", "5")
    assert code == 0
    several, salted = map(json.loads, out.splitlines())
    samples = [expected(loaded, "a", seed=3, max_tokens=5, n=n) for n in (1, 2)]
    assert several["outputs"][0]["text"] == samples[0] == samples[1]
    assert len({sample["text"] for sample in several["outputs"]}) == 2
    assert salted["finish_reason"] in ("length", "stop")


def test_lines_carry_every_sampling_parameter_that_json_can_say(tmp_path):
    values = {name: value for name, (_, value) in FLAGS.items() if name != "detokenize"}
    line = values | {"logit_bias": {"5": -100, "6": 1.5}, "structured_outputs": {"regex": "a+"}}
    (job,) = read_jobs(write(tmp_path / "p.jsonl", {"prompt": "x", **line}), {"n": 9})
    assert SamplingParams(**job.sampling) == SamplingParams(**{"n": 9, **values})


def test_log_probabilities_are_in_the_lines(run, loaded, tmp_path):
    prompts = write(tmp_path / "p.jsonl", {"prompt": "def f(x):", "logprobs": 2, "prompt_logprobs": 0})
    (result,) = map(json.loads, run("generate", "--prompts", prompts, *GREEDY)[1].splitlines())
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    output = loaded.generate("def f(x):", params, use_tqdm=False)[0].outputs[0]
    assert result["cumulative_logprob"] == output.cumulative_logprob
    assert [place[0]["token_id"] for place in result["logprobs"]] == output.token_ids
    of_prompt = [place and place[0]["token_id"] for place in result["prompt_logprobs"]]
    assert of_prompt == [None, *loaded.tokenizer.encode("def f(x):")[1:]]
    for place, expected_place in zip(result["logprobs"], output.logprobs, strict=True):
        assert {entry["token_id"]: entry["logprob"] for entry in place} == {
            token_id: candidate.logprob for token_id, candidate in expected_place.items()
        }
        assert set(place[0]) == {"token_id", "token", "logprob", "rank"}
        assert place[0]["rank"] == 1


@pytest.mark.usefixtures("loaded")
def test_several_samples_of_a_prompt_are_set_apart(run):
    _, out, err = run("generate", "a", "--n", "2", "--max-tokens", "4")
    alone = run("generate", "a", "--max-tokens", "4")[1]
    first, second = (part.split("\n", 1) for part in out.split("\n--- sample ")[1:])
    assert (first[0], second[0]) == ("1 of 2", "2 of 2")
    assert "a" + first[1].rstrip() == alone.rstrip()
    assert "; 8 tokens, " in err


def test_live_view_ends_with_everything_done(run, loaded, tmp_path):
    file, output = write(tmp_path / "p", "a", "b"), tmp_path / "out"
    _, out, err = run("generate", "--prompts", file, "--output", output, "--live", *GREEDY)
    assert out == ""
    assert len(output.read_text().splitlines()) == 2
    words = err.split()
    assert " ".join(words[words.index("requests") :]).startswith("requests 0 running 0 waiting 2 of 2 done")
    assert "64 blocks" not in err
    assert loaded.stats().num_used_blocks == 0


def test_one_bad_prompt_stops_none_of_the_others(run, loaded, tmp_path):
    vocab_size = loaded.model_config.vocab_size
    lines = [{"prompt": "x"}, {"prompt_token_ids": [vocab_size]}, '{"prompt": "\\ud800"}', {"prompt": "y"}]
    code, out, err = run("generate", "--prompts", write(tmp_path / "p.jsonl", *lines), *GREEDY)
    assert code == 1
    results = [json.loads(line) for line in out.splitlines()]
    assert ["error" in result for result in results] == [False, True, True, False]
    assert str(vocab_size) in results[1]["error"]
    assert results[3]["text"] == expected(loaded, "y", temperature=0, max_tokens=8)
    assert err.splitlines()[-1] == "paged: 2 of 4 prompts failed; the error in their lines says why"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "Expecting value"),
        ("[1]", "must be an object"),
        ("{}", "either prompt or prompt_token_ids"),
        ('{"prompt": "x", "prompt_token_ids": [1]}', "either prompt or prompt_token_ids"),
        ('{"prompt": 5}', "prompt must be a string, got 5"),
        ('{"prompt_token_ids": "x"}', "prompt_token_ids must be a list of ints, got 'x'"),
        ('{"prompt": "x", "max_tokns": 1}', "did you mean 'max_tokens'"),
        ('{"prompt": "x", "temperature": NaN}', "NaN is not JSON; numbers are finite"),
        ('{"prompt": "x", "timeout_s": -1}', "timeout_s must be above 0, got -1"),
        ("[" * 100_000, "nested more than 64 deep"),
        ('{"prompt": "x", "id": 1.5}', "id must be a string or an int, got 1.5"),
        ('{"prompt": "x", "output_kind": "delta"}', "output_kind cannot be given here: the"),
        (
            '{"prompt": "x", "logits_processors": []}',
            "logits_processors cannot be given here",
        ),
        (
            '{"prompt": "x", "logit_bias": {"a": 1}}',
            "a token id in logit_bias must be an int, at least 0, got 'a'",
        ),
        ('{"prompt": "x", "logit_bias": [1]}', "logit_bias must be a dict"),
        ('{"prompt": "x", "logit_bias": {"7": 1, "07": 2}}', "logit_bias has token 7 twice, with 1.0 and 2"),
        (
            '{"prompt": "x", "structured_outputs": "a"}',
            "structured_outputs must be an object",
        ),
        ('{"prompt": "x", "structured_outputs": {"jsn": 1}}', "did you mean 'json'"),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_line_is_named(run, tmp_path, line, message):
    prompts = write(tmp_path / "p.jsonl", {"prompt": "fine"}, "", line)
    error = run.refused("generate", "--prompts", prompts, code=1)
    assert f"{prompts}:3: " in error
    assert message in error


def test_other_types_of_files_are_named(run, tmp_path):
    for name in ("p.csv", "p.json", "p.JSON"):
        error = run.refused("generate", "--prompts", write(tmp_path / name, '{"prompt": "x"}'), code=1)
        assert error.startswith(
            f"paged: {tmp_path / name}: prompts come from .txt files or files without a suffix"
        )
        assert error.endswith(f"{Path(name).suffix.lower()} is neither")


@pytest.mark.usefixtures("loaded")
def test_ids_are_passed_through(run, tmp_path):
    lines = [{"prompt": "x", "id": "first"}, {"prompt_token_ids": [10**6], "id": 7}, {"prompt": "y"}]
    out = run("generate", "--prompts", write(tmp_path / "p.NDJSON", *lines), *GREEDY)[1]
    first, failed, nameless = map(json.loads, out.splitlines())
    assert [*first][:3] == ["index", "id", "prompt"]
    assert (first["id"], failed["id"], "error" in failed, "id" in nameless) == ("first", 7, True, False)


@pytest.mark.usefixtures("loaded")
def test_results_are_not_overwritten_unasked(run, tmp_path):
    prompts, output = write(tmp_path / "p.txt", "a", "b"), write(tmp_path / "out.jsonl", "of another run")
    argv = ("generate", "--prompts", prompts, *GREEDY, "--output", output)
    with run.monkeypatch.context() as patched:
        patched.setattr(common, "start", lambda _: pytest.fail("the model was loaded"))
        assert run.fails(*argv, code=1) == (
            f"paged: {output} has results already; --resume goes on, --overwrite begins again"
        )
        assert f"{output}:1: not the result of prompt 0 of this file" in run.fails(*argv, "--resume", code=1)
        assert "give one of them" in run.fails(*argv, "--resume", "--overwrite")
        assert "stdout is none" in run.fails("generate", "--prompts", prompts, "--resume")
        assert "/dev/null is none" in run.fails(*argv[:-1], "/dev/null", "--resume")
        assert "results of --prompts" in run.fails("generate", "x", "--overwrite")
        patched.setattr(common, "start", fails)
        assert run(*argv, "--overwrite")[0] == 1
    assert output.read_text() == "of another run\n"  # an engine that cannot start loses nothing
    assert run(*argv, "--overwrite")[0] == 0
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["a", "b"]
    output.write_text(output.read_text() * 2)
    assert f"{output}:3: not the result of prompt 2" in run.fails(*argv, "--resume", code=1)
    assert run(*argv[:-1], "/dev/null")[:2] == (0, "")


def fails(_):
    raise OSError("no memory")


@pytest.mark.usefixtures("loaded")
def test_a_run_that_was_cut_anywhere_goes_on(run, tmp_path):
    """The file is bitwise that of an undisturbed run, with sampling; results that are kept stay."""
    lines = [{"prompt": "x", "id": i, "max_tokens": 9 - 2 * i, "logprobs": 1} for i in range(4)]
    prompts = write(tmp_path / "p.jsonl", *lines, {"prompt_token_ids": [10**6]})
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    argv = ("generate", "--prompts", prompts, "--output")
    assert run(*argv, whole)[0] == 1
    expected = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(expected) if byte == ord("\n")]
    for cut in (0, 1, 20, ends[0] - 1, ends[0], ends[0] + 30, ends[-2], ends[-1] - 1):
        output.write_bytes(expected[:cut])
        code, _, err = run(*argv, output, "--resume")
        assert (code, output.read_bytes() == expected) == (1, True), cut
        num_kept = sum(end <= cut for end in ends)
        assert f"{100 * num_kept // 5}%" in err
    code, _, err = run(*argv, output, "--resume")
    assert err.splitlines() == [
        "paged: nothing to do: all 5 prompts have results",
        "paged: 1 of 5 prompts failed; the error in their lines says why",
    ]
    assert (code, output.read_bytes()) == (1, expected)


@pytest.mark.usefixtures("loaded")
def test_a_run_goes_on_with_the_options_that_it_was_begun_with(run, tmp_path):
    prompts, output = write(tmp_path / "p.txt", "a", "b"), tmp_path / "out.jsonl"
    argv = ("generate", "--prompts", prompts, "--output", output)
    assert run(*argv, "--max-tokens", "2", *SMALL)[0] == 0
    whole = output.read_bytes()
    for cut in (whole[: whole.index(b"\n") + 5], whole):
        output.write_bytes(cut)
        code, _, err = run(*argv, "--resume", "--max-tokens", "3", *SMALL)
        assert code == 1
        assert f"{output} was begun with other options: max_tokens was 2 and is 3. Go on with" in err
        assert output.read_bytes() == cut
        assert run(*argv, "--resume", "--max-tokens", "2", "--num-threads", "1", "--device", "cpu")[0] == 0
        assert output.read_bytes() == whole
    # Another file of results is begun with other options, and so is one that has none yet.
    assert run(*argv, "--overwrite", "--seed", "5", *SMALL)[0] == 0
    assert "seed was 5 and is not given" in run(*argv, "--resume", *SMALL)[2]
    output.write_bytes(b"")
    assert run(*argv, "--resume", *SMALL)[0] == 0
    # Results of an older version have no options beside them.
    (tmp_path / "out.jsonl.options.json").unlink()
    said = f"paged: the options of the earlier results in {output} are not known; going on with those of this"
    assert said in run(*argv, "--resume", *SMALL)[2]
    assert said not in run(*argv, "--resume", *SMALL)[2]


@pytest.mark.usefixtures("loaded")
def test_a_killed_run_goes_on(run, tmp_path):
    lines = [{"prompt": f"def f{i}(x):", "max_tokens": 10 + 30 * i, "ignore_eos": True} for i in range(6)]
    prompts = write(tmp_path / "p.jsonl", *lines)
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    argv = ("generate", "--prompts", str(prompts), *SMALL, "--output")
    num_done = 6
    while num_done == 6:  # on a busy machine it may have ended before it is killed
        output.unlink(missing_ok=True)
        with paged_process(*argv, str(output), "--resume") as process:
            eventually(lambda: output.exists() and b"\n" in output.read_bytes())
            process.kill()
        num_done = output.read_bytes().count(b"\n")
    assert 1 <= num_done < 6
    assert run(*argv, output, "--resume")[0] == run(*argv, whole)[0] == 0
    assert output.read_bytes() == whole.read_bytes()


def test_a_line_that_is_no_text_is_named(run, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_bytes(b"fine\n\xff\n")
    assert f"{prompts}:2: " in run.refused("generate", "--prompts", prompts, code=1)


def test_empty_file_gives_empty_output(run, tmp_path):
    output = write(tmp_path / "results.jsonl", "of an earlier run")
    prompts = write(tmp_path / "p.txt")
    assert run("generate", "--prompts", prompts, "--output", output, "--overwrite")[:2] == (0, "")
    assert output.read_text() == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "x", "--temprature", "1"], "--temprature"),
        (["generate", "x", "--temperature", "hot"], "'--temperature'"),
        (["generate", "x", "--model"], "'--model'"),
        (["generate", "x", "y"], "unexpected extra argument"),
        (["speak"], "paged has no command 'speak'; it has generate, chat, run-batch, serve, "),
        (["generat"], "paged has no command 'generat'; did you mean 'generate'? it has generate, chat, "),
        (["--foo"], "No such option: --foo (see paged --help)"),
        (["chat", "--foo"], "No such option: --foo (see paged chat --help)"),
        (["generate", "x", "--temperature", "-1"], "temperature must be at least 0"),
        (["generate", "x", "--temperature", "nan"], "temperature must be finite"),
        (
            ["generate", "x", "--max-tokens", "2", "--min-tokens", "3"],
            "--min-tokens 3 is more than --max-tokens 2",
        ),
        (["generate", "x", "--stop", ""], "stop must be a list of non-empty strings, got ['']"),
        (["generate", "x", "--block-size", "12"], "--block-size must be a power of two, got 12"),
        (["generate", "x", "--dtype", "int3"], "dtype must be one of auto, float32, float16, bfloat16"),
        (["generate", "x", "--prompts", "y"], "either a prompt or --prompts"),
        (["generate", "x", "--output", "y"], "--output takes the results of --prompts"),
        (["generate", "x", "--live"], "--live shows many requests at once"),
        (
            ["generate", "x", "--logprobs", "1"],
            "--logprobs has no place in the text of one prompt",
        ),
        (["generate", "x", "--prompt-logprobs", "1"], "--prompt-logprobs has no place in the text"),
        (["generate", "x", "--no-detokenize"], "--no-detokenize leaves nothing to show"),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias must be ID=BIAS such as 42=-100; got '5'"),
        (["generate", "x", "--logit-bias", "-1=5"], "--logit-bias must be ID=BIAS"),
        (
            ["generate", "x", "--logit-bias", "5=1", "--logit-bias", "05=2"],
            "--logit-bias has token 5 twice, with 1.0 and 2.0",
        ),
        (["generate", "x", "--json-schema", "{"], "json must be a JSON schema: "),
        (["generate", "x", "--json-schema", "missing.json"], "missing.json: No such file"),
        (["generate", "x", "--json-schema", ""], "json must be a JSON schema: "),
        (
            ["generate", "x", "--regex", "a", "--choice", "a"],
            "exactly one of json, regex",
        ),
        (["generate", "--prompts", "y", "--live"], "give --output for the results"),
        (
            ["generate", "x", "--scheduling-policy", "sjf"],
            "must be one of fcfs, priority, longest-prefix-match",
        ),
        (["generate", "x", "--tenant-weights", "a=2"], "--tenant-weights go with scheduling_policy 'fair'"),
        (
            ["generate", "x", "--scheduling-policy", "fair", "--tenant-weights", "a=-1"],
            "--tenant-weights['a'] must be above 0, got -1.0",
        ),
        (["generate", "x", "--tenant-weights", "a"], "a number for each tenant such as a=3,b=1; got 'a'"),
        (
            ["generate", "x", "--tenant-weights", "a=1,a=2"],
            "a number for each tenant such as a=3,b=1; got 'a=1,a=2'",
        ),
        (
            ["generate", "x", "--limit-mm-per-prompt", "image=2"],
            '--limit-mm-per-prompt must be an object such as {"image": 2}: this is not JSON',
        ),
        (["generate", "x", "--limit-mm-per-prompt", '{"image": -1}'], "must be from 0 to 4096, got -1"),
        (["generate"], "no prompt: give it as an argument, on stdin,"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags(run, argv, message):
    assert message in run.refused(*argv, code=1 if "No such file" in message else 2)


def test_options_may_have_no_value():
    for given, read in (
        (["serve", "m", "--ray"], ["serve", "m", "--ray="]),
        (["serve", "--ray", "--port", "1", "m"], ["serve", "--ray=", "--port", "1", "m"]),
        (["serve", "--ray", "auto", "m"], ["serve", "--ray", "auto", "m"]),
        ([], []),
    ):
        assert cli._spelled_out(given) == read


# Command lines, the options of several values that they give, and what else is positional.
SEVERAL = {
    "serve m --served-model-name a b --port 1": ("--served-model-name a b", "m"),
    "serve --served-model-name a b --port 1 m": ("--served-model-name a b", "m"),
    "serve --model=m --lora-target-modules q v --api-key k": ("--lora-target-modules q v --api-key k", ""),
    "serve m --served-model-name a --served-model-name b": ("--served-model-name a b", "m"),
    "serve --api-key k m n": ("--api-key k", "m n"),
    "serve --lora-modules a=x b=y/z=1 {} m": ("--lora-modules a=x b=y/z=1 {}", "m"),
    "generate --stop -- x": ("--stop --", "x"),
    "generate x --stop a -b -tp 2 --cudagraph-capture-sizes 1 8": (
        "--stop a --cudagraph-capture-sizes 1 8",
        "x",
    ),
    "generate --model m --stop a b": ("--stop a", "b"),
    "generate --stop a b -- x": ("--stop a b", "x"),
    "run-batch --lora-target-modules q in out": ("--lora-target-modules q", "in out"),
    "run-batch in out --lora-target-modules q v": ("--lora-target-modules q v", "in out"),
}


@pytest.mark.parametrize("line", SEVERAL)
def test_options_take_several_values_after_one_flag(line):
    """As vLLM's do, unless the values may be the model or the prompt that is not given elsewhere."""
    name, *args = line.split()
    parameters = get_command(cli.app).get_command(None, name).params
    found, positional = [], []
    values = iter(one_value_each(parameters, args))
    several = {flag for each in parameters if getattr(each, "multiple", False) for flag in each.opts}
    for text in values:
        if text in several:
            found += [text, next(values)] if text not in found else [next(values)]
        elif text in ("--port", "-tp", "--model"):
            next(values)
        elif not text.startswith("-"):
            positional.append(text)
    assert (" ".join(found), " ".join(positional)) == SEVERAL[line]


def test_a_value_that_may_be_a_second_model_is_named(run, tmp_path, monkeypatch):
    """Neither reading is guessed: the one would serve another model, the other let a client in."""
    file = tmp_path / "a.yaml"
    file.write_text("model: demo\nport: 1\n")
    flags = ("--api-key", "k", "mine")
    for config in (("--config", file), (f"--config={file}",)):
        message = run.refused("serve", *config, *flags)
        assert "the second value after --api-key may be one more of its values, or the model" in message
        assert f"which {file} names, too: write --api-key before each value, or the model before" in message
    parameters = get_command(cli.app).get_command(None, "serve").params
    file.write_text("port: 1\n")
    monkeypatch.setenv("PAGED_CONFIG", str(file))
    assert one_value_each(parameters, [*flags]) == [*flags]  # the model
    monkeypatch.setenv("PAGED_MODEL", "demo")
    assert "which PAGED_MODEL names, too" in run.refused("serve", *flags)
    for clear in (["mine", "--api-key", "k"], ["--api-key", "k", "--api-key", "l"]):
        assert one_value_each(parameters, clear) == clear
    parameters = get_command(cli.app).get_command(None, "plan").params
    several = ["--lora-target-modules", "q_proj", "demo"]
    assert one_value_each(parameters, several) == several  # which reads no PAGED_MODEL


def test_empty_stdin(run):
    assert "stdin is empty" in run.refused("generate", stdin="")


def test_missing_files(run, tmp_path):
    prompts = write(tmp_path / "p.txt", "x")
    missing = tmp_path / "missing" / "p.txt"
    assert (
        run.refused("generate", "--prompts", missing, code=1)
        == f"paged: {missing}: No such file or directory"
    )
    assert f"{tmp_path}: " in run.refused("generate", "--prompts", tmp_path, code=1)
    assert f"no such directory: {missing.parent}" in run.refused(
        "generate", "--prompts", prompts, "--output", missing, code=1
    )
    assert f"{tmp_path}: " in run.refused("generate", "--prompts", prompts, "--output", tmp_path, code=1)
    assert "would overwrite" in run.refused("generate", "--prompts", prompts, "--output", prompts, code=1)
    assert prompts.read_text() == "x\n"


def test_unknown_models(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = tmp_path / "missing"
    assert (
        run.fails("generate", "x", "--model", missing, code=1)
        == f"paged: no such directory or GGUF file: {missing}"
    )
    assert "config.json" in run.fails("generate", "x", "--model", tmp_path, code=1)
    assert "is a file" in run.fails("generate", "x", "--model", write(tmp_path / "file"))


@pytest.mark.parametrize(
    ("argv", "is_positional"),
    [
        ("generate x", False),
        ("run-batch in.jsonl out.jsonl", False),
        *(
            (command, True)
            for command in ("chat", "warmup", "plan", "simulate", "bench throughput", "bench latency")
        ),
    ],
)
def test_every_command_takes_the_model_in_the_same_ways(run, argv, is_positional, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), {"custom_id": "1"})
    said = "no such directory or GGUF file: ./nowhere"
    assert said in run.fails(*argv.split(), "--model", "./nowhere", code=1)
    if is_positional:
        assert said in run.fails(*argv.split(), "./nowhere", code=1)
        assert said in run.fails(*argv.split(), "./nowhere", "--model", "./nowhere", code=1)
        assert "the model is given twice, as a and as --model b; leave one out" in run.refused(
            *argv.split(), "a", "--model", "b"
        )


@pytest.mark.usefixtures("loaded")
def test_prompt_that_the_engine_refuses(run):
    assert "can never fit" in run.fails("generate", "x", "--max-tokens", "2000")


def test_request_that_ends_in_an_error(run, loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(
        loaded.runner, "execute", lambda schedule: StepOutput([None for _ in schedule.requests])
    )
    code, _, err = run("generate", "x")
    assert (code, err) == (1, "paged: the model's logits are not finite\n")
    code, out, _ = run("generate", "--prompts", write(tmp_path / "p.txt", "x"))
    assert code == 1
    assert json.loads(out) == {"index": 0, "prompt": "x", "error": "the model's logits are not finite"}


def test_the_seed_is_the_engines(run, tmp_path):
    """The same command gives the same text, and a file with that prompt gives it too."""
    argv = ("--max-tokens", "8", *SMALL, "--seed")
    text = run("generate", "x", *argv, "1")[1]
    assert run("generate", "x", *argv, "1")[1] == text
    assert run("generate", "x", *argv, "2")[1] != text
    lines = write(tmp_path / "p.jsonl", {"prompt": "x"}, {"prompt": "x", "seed": 5})
    own, given = map(json.loads, run("generate", "--prompts", lines, *argv, "1")[1].splitlines())
    assert "x" + own["text"] + "\n" == text
    assert given["text"] != own["text"]


def test_bash_completes_commands_and_options(tmp_path):
    source = Path(cli.__file__).parents[2]
    program = tmp_path / "paged"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{source}" exec "{sys.executable}" -m paged "$@"\n')
    program.chmod(0o755)
    script = 'eval "$(_PAGED_COMPLETE=source_bash paged)"; complete -p paged; COMP_CWORD=$#; '
    script += 'COMP_WORDS=(paged "$@"); _paged_completion paged; echo "${COMPREPLY[@]}"'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def completed(*words):
        argv = ["bash", "--norc", "-c", script, "bash", *words]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=True)
        assert "-o default" in done.stdout  # files are completed where nothing else is
        return done.stdout.splitlines()[-1]

    assert completed("gen") == "generate"
    assert completed("run-batch", "--max-num-s") == "--max-num-seqs"


def test_version_and_help(run):
    assert run("--version") == (0, f"paged {__version__}\n", "")
    assert run("--help")[1] == run()[1]
    assert "generate" in run()[1]


def paged_process(*argv, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "paged", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cli.__file__).parents[2])},
        **options,
    )


def test_as_a_module_without_torch():
    """A mistyped option is reported without importing torch, which takes seconds."""
    code = "import sys, runpy; sys.argv[1:] = ['generate', '--foo']\n"
    code += "try: runpy.run_module('paged', run_name='__main__')\n"
    code += "finally: print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert done.stderr.startswith("paged: No such option: --foo")
    assert done.stderr.count("\n") == 1


LONG = (
    "generate",
    "def f(x):",
    "--ignore-eos",
    "--max-tokens",
    "2000",
    "--num-blocks",
    "128",
    "--device",
    "cpu",
)


def test_interrupt_is_quiet():
    with paged_process(*LONG) as process:
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # too small for the whole answer
        assert process.stdout.read(9) == "def f(x):"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    # A shell reports it as 130.
    assert process.returncode == -signal.SIGINT
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_closed_pipe_is_quiet():
    with paged_process(*LONG) as process:
        assert process.stdout.read(9) == "def f(x):"
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert "Traceback" not in err
    assert "Error" not in err


def test_models_lists_every_architecture(run):
    code, out, _ = run("models", "--architectures")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(NATIVE)
    assert re.search(r"^GraniteForCausalLM +Granite 3$", out, re.MULTILINE)


def test_warmup_says_what_is_ready(run, loaded, monkeypatch):
    for name, compiles, line in (
        ("triton", True, "9 kernels ready\n"),
        ("torch", False, "nothing to compile: attention_backend 'torch' has no kernels of its own\n"),
    ):
        kernels = SimpleNamespace(name=name, compiles_at_launch=compiles)
        monkeypatch.setattr(loaded.runner.model, "kernels", kernels)
        monkeypatch.setattr(loaded, "num_kernels", 9)
        assert run("warmup", "demo")[:2] == (0, line)


def test_warmup_says_how_long_a_cpu_compiled_and_where_the_cache_is(run, loaded, monkeypatch):
    compiling = pytest.importorskip("paged.kernels.cpu.compiling")
    for num_compiled, line in (
        (3, "compiled 3 of 14 kernels for this CPU in 2.5 s, kept in cache\n"),
        (0, "14 kernels for this CPU were compiled before, in cache\n"),
    ):
        told = compiling.Compiled(14, num_compiled, 2.5, Path("cache"))
        monkeypatch.setattr(compiling, "report", lambda told=told: told)
        monkeypatch.setattr(loaded.runner.model, "kernels", SimpleNamespace(name="numba"))
        assert run("warmup", "demo")[:2] == (0, line)


def test_warmup_refuses_before_it_loads(run):
    assert run.refused("warmup", "--dtype", "float33").startswith("paged: --dtype must be one of")
    message = run.refused("warmup", "--kv-cache-dtype", "int4")
    assert message.startswith("paged: --kv-cache-dtype must be one of auto, ")


def test_a_model_that_cannot_be_divided_is_an_error_of_all_its_processes(run):
    """With exit code 2, which each of them has: starting again changes nothing."""
    for options, message in (
        (("-tp", 5), "these numbers do: 2, 4, 8"),
        (("-pp", 9), "--pipeline-parallel-size 9 is more than the 4 layers of the model"),
        (("-pp", 2, "--device", "cuda:0"), "needs its own: give 'cuda'"),
        (("-pp", 2, "--pipeline-layers", 4), "a number for each of the 2 stages"),
    ):
        code, out, err = run("generate", "x", *options)
        assert (code, out) == (2, "")
        assert message in err


# The exit code of a start, its options, and what is wrong: 2 if starting again changes nothing.
STARTS = [
    (2, "--tensor-parallel-size=3", "", "3 does not divide"),
    (2, "-pp=2 --pipeline-layers=4 --pipeline-layers=4", "", "and the model has 4"),
    (2, "-pp=2", "RANK", "RANK is set and WORLD_SIZE is not"),
    (2, "--max-model-len=1000000000", "", "--max-model-len"),
    (2, "", "architecture", "MambaForCausalLM"),
    (2, "", "damaged", "config.json: is not JSON"),
    (2, "", "truncated", "truncated"),
    (1, "", "no weights", "only safetensors are read"),
    (1, "", "no tokenizer", "has no tokenizer"),
    (1, "", "no config", "does not exist"),
    (1, "", "no directory", "no such directory"),
    (1, "-pp=4", "one core", "need as many CPU cores; there are 1"),
]


@pytest.mark.parametrize(("code", "options", "fault", "message"), STARTS)
def test_exit_codes_of_starts(run, tmp_path, monkeypatch, code, options, fault, message):
    """The unit of systemd starts a server again after 1 alone."""
    model = shutil.copytree(DEMO, tmp_path / "model")
    match fault:
        case "RANK":
            monkeypatch.setenv("RANK", "0")
        case "architecture":
            edit_json(model / "config.json", architectures=["MambaForCausalLM"])
        case "damaged":
            (model / "config.json").write_text("{")
        case "truncated":
            file = model / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
        case "no weights":
            (model / "model.safetensors").unlink()
        case "no tokenizer":
            for file in model.glob("tokenizer*"):
                file.unlink()
        case "no config":
            (model / "config.json").unlink()
        case "no directory":
            model = tmp_path / "nowhere"
        case "one core":
            monkeypatch.setattr(threads, "usable_cores", lambda: 1)
            monkeypatch.setattr(threads, "_is_chosen", lambda _: False)
    found, out, err = run("generate", "x", "--model", model, *options.split())
    assert (found, out) == (code, "")
    assert message in err.splitlines()[-1]
