"""Options of vLLM's command line as flags, in files and in the environment: Python's tables decide."""

import re

import pytest

from paged import EngineArgs, FlexibleArgumentParser
from paged.base.errors import ConfigError, PagedError
from paged.base.from_vllm import neutral_of
from paged.commands.settings import from_environment, from_file
from paged.commands.vllm_options import SEVERAL, without_flag

# Options of `paged serve` that have these names in vLLM too, where they mean the same.
TABLE = {**neutral_of("serve"), **neutral_of("EngineArgs")}
WRONG = "surely-no-value-of-this"


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_every_option_is_refused_at_another_value_and_says_why(tmp_path):
    file = tmp_path / "a.yaml"
    for name, (_, reason) in TABLE.items():
        said = re.escape(f": {reason}")
        with pytest.raises(ConfigError, match=f"^paged x got {flag_of(name)}.*{said}"):
            without_flag("paged x", ["m", f"{flag_of(name)}={WRONG}"], flag_of(name))
        file.write_text(f"{name.replace('_', '-')}: {WRONG}\n")
        with pytest.raises(ConfigError, match=f"a.yaml got {name}.*{said}"):
            from_file(file, {"port": int})
        with pytest.raises(ConfigError, match=f"the environment got {name}.*{said}"):
            from_environment({"port": int}, {f"PAGED_{name.upper()}": WRONG, "PAGED_PORT": "1"})


def test_every_option_is_accepted_at_a_value_that_changes_nothing(tmp_path):
    file = tmp_path / "a.yaml"
    for name, neutral in TABLE.items():
        for value in neutral.values:
            if value in (None, "", True, False) or name == "ignore_patterns":
                continue
            for args in ([f"{flag_of(name)}={value}"], [flag_of(name), str(value)]):
                assert without_flag("paged x", ["m", *args, "--port", "1"], flag_of(name)) == [
                    "m",
                    "--port",
                    "1",
                ]
            assert from_environment({"port": int}, {f"PAGED_{name.upper()}": str(value)}) == {}
        file.write_text(f"{name}: null\nport: 1\n")
        assert from_file(file, {"port": int}) == {"port": 1}
        assert from_environment({"port": int}, {f"PAGED_{name.upper()}": ""}) == {}
    # A switch has no value; its negation is another flag.
    assert without_flag("x", ["--disable-log-stats", "m"], "--disable-log-stats") == ["m"]
    assert without_flag("x", ["--no-enable-eplb", "m"], "--no-enable-eplb") == ["m"]
    assert without_flag("x", ["--enable-chunked-prefill=true"], "--enable-chunked-prefill") == []
    assert without_flag("x", ["-dp", "1", "-ep=1"], "-d") == ["-ep=1"]
    assert without_flag("x", ["--nonsense", "1"], "--nonsense") is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "serve demo --data-parallel-size 2",
            "paged serve got --data-parallel-size 2: of the ways to use",
        ),
        (
            "serve demo --data-parallel-size=2",
            "paged serve got --data-parallel-size 2: of the ways to use",
        ),
        ("serve demo -dp 4", "paged serve got -dp 4: of the ways to use several devices"),
        ("serve demo --api-server-count 2", "paged serve got --api-server-count 2: one process answers HTTP"),
        ("generate x --enable-eplb", "paged generate got --enable-eplb: the choice of experts is not"),
        (
            "generate x --no-enable-chunked-prefill",
            "got --no-enable-chunked-prefill: long prompts are always",
        ),
        (
            "run-batch a b --speculative-config {}x",
            "--speculative-config must be JSON such as",
        ),
        ("bench latency --speculative-config.method x", "--speculative-config['method'] must be one of"),
        ("bench latency --spec-method ngram", "got --spec-method ngram: speculative_config has method"),
        (
            "chat --num-gpu-blocks-override 7",
            "paged chat got --num-gpu-blocks-override 7: its name is num_blocks",
        ),
        ("warmup --data_parallel_size 2", "paged warmup got --data_parallel_size 2: of the ways"),
        ("generate x -tp 1 --enable-eplb", "paged generate got --enable-eplb: the choice"),
        ("generate x -tp 1 --nonsense", "No such option: --nonsense"),
    ],
)
def test_commands_say_what_is_missing_or_what_replaces_it(run, argv, message):
    assert message in run.refused(*argv.split())


def test_a_token_of_the_hub_is_in_no_message(run, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("hf-token: topsecret\n")
    for argv in (["--hf-token", "topsecret"], ["--hf-token=topsecret"], ["--config", file]):
        message = run.refused("serve", "demo", *argv)
        assert "hf auth login" in message
        assert "topsecret" not in message
    with pytest.raises(PagedError) as error:
        from_environment({}, {"PAGED_HF_TOKEN": "topsecret"})
    assert "topsecret" not in str(error.value)


def test_options_of_several_values_are_read_whole():
    """By the parser of vLLM's scripts, and by the commands."""
    neutral = neutral_of("EngineArgs")
    assert neutral.keys() >= {*SEVERAL}
    for name in SEVERAL:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        flag = f"--{name.replace('_', '-')}"
        assert getattr(parser.parse_args([flag, "a", "b"]), name) == ["a", "b"]
        with pytest.raises(ConfigError, match=re.escape(f"got {flag} a b: ")):
            without_flag("paged serve", ["m", flag, "a", "b", "--port", "1"], flag)
    pattern = ["m", "--ignore-patterns", "original/**/*", "--port", "1"]
    assert without_flag("paged serve", pattern, "--ignore-patterns") == ["m", "--port", "1"]
