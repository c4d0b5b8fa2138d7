"""Coding agents of npm, and clients for JavaScript, on a server that answers from a script: two calls, an end

make clients && python -m tests.support.coding_agents --write    # runs them, and records the bodies they send

The bodies are kept without what is private or another's work: identities are zeros, folders have one name,
and long texts are cut.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged import AsyncLLMEngine
from tests.support.scripted_server import Recorded, scripted_server

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".venv-clients"
RECORDED = Path(__file__).parent / "agent_bodies.json"
MODEL = "demo"
QUESTION = "What is the sum of 33333333 and one? Use the shell."
ANSWER = "All done."
COMMANDS = ("echo $((33333333 + 1))", "echo $((55555555 + 1))")
RESULTS = ("33333334", "55555556")
LONGEST_TEXT = 64  # characters of a recorded text; the shape of a body is recorded, not its prose


@dataclass(frozen=True)
class Agent:
    """A program that has a model call tools.

    package: of npm, whose version is recorded.
    folder: of PACKAGES, in which it is installed.
    tool, argument: its tool that runs a command, and the tool's argument.
    command: returns the command line, from the URL of the server and the folder to work in.
    variables: of its environment, from the URL.
    more: other arguments that its tool needs.
    is_recorded: whether its bodies are; not those that refer to answers.
    """

    package: str
    folder: str
    tool: str
    argument: str
    command: Callable[[str, Path], Sequence[str | Path]]
    variables: Callable[[str], Mapping[str, str]] = lambda _: {}
    more: tuple[tuple[str, str], ...] = ()
    is_recorded: bool = True

    @property
    def _manifest(self) -> Path:
        return PACKAGES / self.folder / "node_modules" / self.package / "package.json"

    @property
    def is_installed(self) -> bool:
        """Whether it can be run."""
        return shutil.which("node") is not None and self._manifest.exists()

    @property
    def version(self) -> str:
        """Its name and version, as it is installed."""
        return f"{self.package} {json.loads(self._manifest.read_text())['version']}"

    def call(self, command: str) -> str:
        """Return the text of a call of its tool."""
        return tool_call(self.tool, {self.argument: command, **dict(self.more)})

    def answer(self, prompt: str) -> str:
        """Return the next answer in a conversation, which tells by itself how far it is."""
        first, second = COMMANDS
        if RESULTS[1] in prompt:
            return ANSWER
        if RESULTS[0] in prompt:
            return f"Now the second. {self.call(second)}"
        if '"name": "ToolSearch"' in prompt and "select:CronList" not in prompt:
            return tool_call("ToolSearch", {"query": "select:CronList"})
        return self.call(first) if f'"name": "{self.tool}"' in prompt else "A title"

    def run(self, engine: AsyncLLMEngine) -> tuple[str, Recorded]:
        """Return what it prints, and what it has sent."""
        options = {"served_model_name": MODEL, "ignore_builtin_tools": True, "response_store": 2**20}
        with (
            tempfile.TemporaryDirectory() as folder,
            scripted_server(engine, self.answer, **options) as (
                served,
                recorded,
            ),
        ):
            home = Path(folder)
            ran = subprocess.run(
                self.command(served.url, home),
                cwd=home,
                # Nothing of this environment: a key in it would go to whom the agent chooses.
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": folder,
                    "LANG": "C.UTF-8",
                    **self.variables(served.url),
                },
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert ran.returncode == 0, f"{recorded.responses} {ran.stdout[-2000:]} {ran.stderr[-2000:]}"
        return ran.stdout, recorded


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """Return the text of a call, in the form of Hermes."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _program(pattern: str) -> Path:
    """Return a program of an agent, whose package has the name of this machine's processor."""
    return min((PACKAGES / "agents/node_modules").glob(pattern))


def _claude(_: str, __: Path) -> list[str | Path]:
    return [_program("@anthropic-ai/claude-code-*/claude"), "-p", QUESTION, "--allowedTools", "Bash"]


def _claude_variables(url: str) -> dict[str, str]:
    models = {f"ANTHROPIC_{name}": MODEL for name in ("MODEL", "DEFAULT_HAIKU_MODEL")}
    private = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", **models, **private}


def _codex(url: str, home: Path) -> list[str | Path]:
    provider = f'[model_providers.paged]\nname = "paged"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(f'model = "{MODEL}"\nmodel_provider = "paged"\n{provider}')
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [_program(".bin/codex"), "exec", *options, QUESTION]


def _opencode(sdk: str) -> Callable[[str, Path], list[str | Path]]:
    def command(url: str, home: Path) -> list[str | Path]:
        provider = {
            "npm": sdk,
            "name": "paged",
            "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
            "models": {MODEL: {"name": MODEL, "limit": {"context": 200_000, "output": 8000}}},
        }
        model = f"paged/{MODEL}"
        config = {"provider": {"paged": provider}, "model": model, "small_model": model, "autoupdate": False}
        (home / "opencode.json").write_text(json.dumps(config))
        return [
            _program("opencode-linux-*/bin/opencode"),
            "run",
            "--model",
            model,
            QUESTION,
        ]

    return command


def _client(name: str) -> Callable[[str, Path], list[str | Path]]:
    script = Path(__file__).parent / "agent_clients.mjs"
    return lambda url, _: ["node", script, PACKAGES / "javascript", url, MODEL, name, QUESTION]


_SAID = (("description", "Add"),)
AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code", "agents", "Bash", "command", _claude, _claude_variables, more=_SAID
    ),
    "codex": Agent("@openai/codex", "agents", "exec_command", "cmd", _codex),
    "opencode, messages": Agent(
        "opencode-ai", "agents", "bash", "command", _opencode("@ai-sdk/anthropic"), more=_SAID
    ),
    "opencode, responses": Agent(
        "opencode-ai", "agents", "bash", "command", _opencode("@ai-sdk/openai"), more=_SAID
    ),
    "openai": Agent("openai", "javascript", "shell", "command", _client("openai")),
    "agents": Agent("@openai/agents", "javascript", "shell", "command", _client("agents")),
    "anthropic": Agent("@anthropic-ai/sdk", "javascript", "shell", "command", _client("anthropic")),
    "ai, responses": Agent("@ai-sdk/openai", "javascript", "shell", "command", _client("ai-openai")),
    "ai, stored responses": Agent(
        "@ai-sdk/openai", "javascript", "shell", "command", _client("ai-stored"), is_recorded=False
    ),
    "ai, messages": Agent("@ai-sdk/anthropic", "javascript", "shell", "command", _client("ai-anthropic")),
}
_IDENTITY = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|[0-9a-f]{40,}|(?<=ses_)\w+")
_FOLDER = re.compile(r"/tmp/[\w.-]+")


def _zeros(found: re.Match[str]) -> str:
    return re.sub(r"[0-9A-Za-z]", "0", found[0])


def without_prose(value: Any) -> Any:
    """Return a value of JSON without identities, folders and long texts, and of the same shape."""
    match value:
        case dict():
            return {key: without_prose(part) for key, part in value.items()}
        case list():
            return [without_prose(part) for part in value]
        case str():
            text = _FOLDER.sub("/tmp/work", _IDENTITY.sub(_zeros, value))
            is_kept = len(text) <= LONGEST_TEXT or any(result in text for result in RESULTS)
            return text if is_kept else f"{text[:LONGEST_TEXT]}..."
    return value


def main() -> None:
    """Run the agents, and write the bodies that they send."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=AGENTS, action="append", help="default: all")
    arguments = parser.parse_args()
    engine = AsyncLLMEngine(MODEL, device="cpu", num_threads=1, num_blocks=256)
    made = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name in arguments.only or AGENTS:
        agent = AGENTS[name]
        try:
            said, recorded = agent.run(engine)
        except AssertionError as error:  # the others are run all the same
            print(f"{name} failed: {error}")
            continue
        print(
            f"{name} ({agent.version}):", *(status for _, _, status in recorded.responses), said[-60:].strip()
        )
        if not agent.is_recorded:
            continue
        bodies = [{"path": path, "body": without_prose(body)} for path, body in recorded.bodies]
        made[name] = {"version": agent.version, "bodies": bodies}
    engine.shutdown()
    if arguments.write:
        RECORDED.write_text(json.dumps(made, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
