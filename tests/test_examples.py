"""Every example runs, is short, and shows what it says."""

import re
import runpy
from pathlib import Path

import pytest

from paged import AsyncLLMEngine
from tests.support.served import serving

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_LINES = 60
# What each prints, as a regular expression.
SHOWS = {
    "batch": r"def fibonacci\(n\):\n(.*\n)*--- length 48 tokens",
    "ragged": r"times as fast, and every token is the same",
    "streaming": r"---\n['\"].+['\"]\n['\"].+['\"]\n",
    "coroutines": r"first token: '.*\n0 requests run, 0 blocks are used",
    "prefixes": r"read 0 of .*\nwrite 80 of .*\nclose 80 of .*\n4 samples have 24 blocks, of which 6 differ\n"
    r"5 blocks saved\nanother engine: 80 ",
    "tenants": r"'urgent', 'batch-1'.*\nof the first 12: {'free': 3, 'paying': 9}",
    "structured": r"{'name': '.*', 'age': \d+}\n(posi|nega|neu).*\n20\d\d-[01]\d\n{'a': -?\d+.* = -?\d+",
    "embeddings": r"1\.000.*\n.*1\.000.*\n.*1\.000\n'sys\\n' +log-probability +-\d",
    "policy": r"of 5 has ended\n.*of 20 has ended\n.*of 100 has ended\n.*of 300 has ended",
    "kernel": r"1 of 40 tokens: the largest difference is \d",
    "capacity": r"1 H100: \d+ requests/s.*\n2 H100: \d+ requests/s",
    "server": r"CompletionUsage\(completion_tokens=32",
    "agent": r"temperature\({'city': '\w+'}\) = \d+\nconvert\({'celsius': -?\d+}\) = .*\nThe answer: ",
}


@pytest.fixture(autouse=True)
def _uninitialised_is_nan() -> None:
    """Leave the memory of engines as it is: they have caches of the default size, a gigabyte."""


def run(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capfd.readouterr().out
    assert re.search(SHOWS[name], printed), printed


@pytest.mark.parametrize("name", [name for name in SHOWS if name != "agent"])
def test_example_shows_what_it_says(name, capfd):
    run(name, capfd)


def test_agent_calls_its_tools(capfd, monkeypatch):
    engine = AsyncLLMEngine("demo", device="cpu", num_threads=1, num_blocks=64)
    with serving(engine) as served:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{served.url}/v1")
        run("agent", capfd)
    engine.shutdown()


def test_every_example_is_short_and_listed():
    files = {file.stem: file for file in EXAMPLES.glob("*.py")}
    assert files.keys() == SHOWS.keys()
    for file in files.values():
        assert file.read_text(encoding="utf-8").count("\n") <= MAX_LINES, file.name
    listed = re.findall(r"\[(\w+)\.py\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert listed == [*SHOWS]
