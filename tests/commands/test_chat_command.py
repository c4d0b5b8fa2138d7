"""`paged chat`: turns from a terminal or a pipe, commands, and Ctrl-C."""

from __future__ import annotations

import builtins
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paged import LLMEngine, SamplingParams
from paged.architectures.config import DEMO
from paged.architectures.generation_config import chat_defaults
from paged.commands import cli, common
from paged.scheduler.schedule import StepOutput
from tests.support.checkpoints import new_engine
from tests.support.command_line import write
from tests.support.images import picture, png, seeing

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if messages[-1].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
GREEDY = ("--temperature", "0", "--max-tokens", "5")
ARGV = ("chat", "--chat-template", TEMPLATE, *GREEDY)


@pytest.fixture(scope="module")
def engine():
    return LLMEngine("demo", num_blocks=64, device="cpu", max_model_len=60)


@pytest.fixture
def loaded(engine, monkeypatch):
    monkeypatch.setattr(common, "start", lambda _: engine)
    yield engine
    engine.scheduler.check()
    assert not engine.has_unfinished_requests()


class Talk:
    """Return the engine's answers when each prompt contains the whole conversation."""

    def __init__(self, engine, **params):
        self.engine, self.params = engine, SamplingParams(**{"temperature": 0, "max_tokens": 5, **params})
        self.messages = []

    def say(self, text, role="user"):
        self.messages.append({"role": role, "content": text})
        if role == "system":
            return ""
        (output,) = self.engine.chat(self.messages, self.params, chat_template=TEMPLATE, use_tqdm=False)
        self.messages.append({"role": "assistant", "content": output.outputs[0].text})
        return output.outputs[0].text


def test_a_pipe_is_a_turn_a_line(run, loaded):
    talk = Talk(loaded)
    answers = [talk.say("def f(x):"), talk.say("why?"), talk.say("/etc")]
    code, out, err = run(*ARGV, stdin="def f(x):\n\nwhy?\n//etc\n")
    assert (code, err) == (0, "")
    assert out == "".join(answer + "\n" for answer in answers)
    talk = Talk(loaded)
    talk.say("be kind", role="system")
    assert run(*ARGV, "--system", "be kind", stdin="a")[1] == talk.say("a") + "\n"


def test_tokens_that_are_held_back_are_shown_at_the_end(run, loaded, monkeypatch):
    """With every interval the answer is the same; --stream-interval-s bounds the time between two parts."""
    intervals = []

    def next_publish_time(started: float, ended: float, interval: float) -> float:  # noqa: ARG001
        intervals.append(interval)
        return ended + interval

    monkeypatch.setattr("paged.commands.chat.next_publish_time", next_publish_time)
    answer = Talk(loaded).say("hello")
    for interval, num_shown in (("1e9", 1), ("0", 5)):
        code, out, _ = run(*ARGV, "--stream-interval-s", interval, stdin="hello\n")
        assert (code, out) == (0, f"{answer}\n")
        assert intervals == [float(interval)] * num_shown
        intervals.clear()
    assert run(*ARGV, "--stream-interval-s", "-1")[0] == 2


def test_what_fails_through_a_pipe_ends_it(run, loaded):  # later turns may depend on it
    answer = Talk(loaded).say("a")
    code, out, err = run(*ARGV, stdin="a\nbad\nb\n")
    assert (code, out) == (2, answer + "\n")
    assert err == "paged: the chat template refuses this: no bad words\n"


def test_a_wrong_command_through_a_pipe_ends_no_turn(run, loaded, tmp_path):
    talk, missing = Talk(loaded), tmp_path / "missing" / "talk.json"
    answers = [talk.say("a"), talk.say("b")]
    code, out, err = run(*ARGV, stdin=f"a\n/foo\n/save\n/save {missing}\nb\n")
    assert (code, out) == (1, "".join(answer + "\n" for answer in answers))
    assert err.splitlines() == [
        "paged: there is no command '/foo'; /help lists them, // begins a turn with /",
        "paged: /save needs a file to write to",
        f"paged: /save: {missing}: No such file or directory",
    ]


def test_commands_of_the_conversation(run, loaded, tmp_path):
    talk, file = Talk(loaded), tmp_path / "talk.json"
    talk.say("be kind", role="system")
    answers = [talk.say("a\nb"), talk.say("c")]
    lines = [
        "x",
        "/reset",
        "/system  be kind ",
        "a\\",
        "b",
        "bad",
        "c",
        "/retry",
        f"/save {file}",
        "/save",
        f"/save {tmp_path}",
        "/nothing",
        "/help",
        "/exit",
        "never read",
    ]
    code, out, err = run(*ARGV, typed="".join(f"{line}\n" for line in lines))
    assert code == 0
    shown = out.split(">>> ")
    assert shown[4] == "... " + answers[0] + "\n"
    assert shown[6:8] == [answers[1] + "\n"] * 2  # greedy, so the retry is equal
    assert "/retry          replace the last answer by another one" in shown[12]
    assert len(shown) == 14
    assert json.loads(file.read_text()) == talk.messages
    assert err.splitlines() == [
        "/help lists the commands; Ctrl-D leaves",
        "paged: the chat template refuses this: no bad words",
        "paged: /save needs a file to write to",
        f"paged: /save: {tmp_path}: Is a directory",
        "paged: there is no command '/nothing'; /help lists them, // begins a turn with /",
    ]


CHAT = ("chat", "--chat-template", TEMPLATE, "--max-tokens", "5")


def test_a_chat_samples_less_widely_where_nobody_says_how(run, loaded):
    """/params shows what is in effect and where it comes from, and sets it for the answers from then on."""
    drawn = []
    add_request = loaded.add_request

    def recording(request_id, prompt, params, **more):
        drawn.append(params)
        add_request(request_id, prompt, params, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "add_request", recording)
        lines = [
            "a",
            "/params",
            "/params temperature=0.5 min_p= stop='[\"x y\"]'",
            "a",
            "/params temperature= stop=",
            "a",
            "/params top_p=2",
            "/params n=2",
            "/params seed=1",
            "/params warmth=1",
            "/params temperature",
            "/reset",
            "a",
        ]
        code, out, err = run(*CHAT, stdin="\n".join(lines))
        run(*CHAT, "--top-k", "5", stdin="a")
        run(*CHAT, "--temperature", "1", stdin="a")
    shapes = [(params.temperature, params.min_p, params.top_k, params.stop) for params in drawn]
    plain = (0.8, 0.05, 0, ())
    assert shapes == [plain, (0.5, 0.05, 0, ("x y",)), plain, plain, (1.0, 0.0, 5, ()), (1.0, 0.0, 0, ())]
    assert code == 1
    shown = out.partition("top_p=1.0")[2].splitlines()
    assert re.search(r"^temperature=0\.8 +of a chat$", out, re.M)
    assert re.search(r"^max_tokens=5 +yours$", out, re.M)
    assert shown[1:3] == ["top_k=0", "min_p=0.05              of a chat"]
    for line, part in zip(
        err.splitlines(),
        ["top_p must be", "one answer", "--seed", "no parameter 'warmth'", "NAME=VALUE"],
        strict=True,
    ):
        assert part in line


def test_the_checkpoints_own_sampling_is_kept(run, monkeypatch, tmp_path):
    for name, settings, expected in (
        ("shape", {"top_k": 7}, (1.0, 0.0, 7)),
        ("none", {"repetition_penalty": 1.1}, (0.8, 0.05, 0)),
    ):
        directory = tmp_path / name
        shutil.copytree(DEMO, directory)
        write(directory / "generation_config.json", json.dumps({"eos_token_id": 0, **settings}))
        own = LLMEngine(str(directory), num_blocks=64, device="cpu", max_model_len=60)
        monkeypatch.setattr(common, "start", lambda _, own=own: own)
        _, out, _ = run(*CHAT, stdin="/params\n")
        found = {name: json.loads(value) for name, value in re.findall(r"(?m)^(\w+)=(\S+)", out)}
        assert tuple(found[name] for name in ("temperature", "min_p", "top_k")) == expected
        assert ("top_k=7                 of the checkpoint" in out) == (name == "shape")
    assert chat_defaults("vllm", {}) == {}


@pytest.mark.usefixtures("loaded")
def test_a_retry_is_another_answer(run, tmp_path):
    argv = (*ARGV, "--temperature", "1", "--max-tokens", "8")
    file = tmp_path / "talk.json"
    typed = f"/retry\na\n/retry\n/retry\n/save {file}\n"
    _, out, err = run(*argv, typed=typed)
    first, second, third = (text.strip() for text in out.split(">>> ")[2:5])
    assert len({first, second, third}) == 3
    assert run(*argv, typed=typed)[1] == out
    assert json.loads(file.read_text())[1]["content"].strip() == third
    assert "there is no answer yet to try again" in err


@pytest.mark.usefixtures("loaded")
def test_a_context_that_is_full_is_said(run):
    argv = (*ARGV, "--max-tokens", "1000", "--ignore-eos")
    way_out = "the context has 60 tokens: /reset forgets the conversation, --max-model-len and --num-blocks"
    _, out, err = run(*argv, typed="a\nb\n/reset\na\n")
    _, first, second, _, again, _ = out.split(">>> ")
    assert (first, second) == (again, "")  # the turn that had no room is removed too
    cut, refused, cut_again = err.splitlines()[1:]
    assert cut == cut_again
    assert cut.startswith(f"paged: the answer fills the context; {way_out}")
    assert "more than max_model_len 60; " + way_out in refused
    assert run(*argv, stdin="a\nb\n")[0] == 2
    # Other errors do not suggest a shorter conversation.
    code, _, err = run(*argv, "--stop-token-ids", "9999", stdin="a\n")
    assert code == 2
    assert err.splitlines()[-1] == "paged: --stop-token-ids[0] is 9999; the vocabulary is 0 to 4095"


def test_an_interrupt_ends_the_answer_and_not_the_chat(run, loaded, monkeypatch):
    step, num_steps = loaded.step, 0

    def interrupted_step():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(loaded, "step", interrupted_step)
    code, out, _ = run(*ARGV, "--max-tokens", "20", "--ignore-eos", typed="a\nb\n")
    assert code == 0
    assert num_steps == 3 + 20
    monkeypatch.setattr(loaded, "step", step)
    talk = Talk(loaded, max_tokens=3, ignore_eos=True)
    _, first, second, _ = out.split(">>> ")
    assert first == talk.say("a") + "\n"
    # The interrupted answer stays in the conversation.
    talk.params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert second == talk.say("b") + "\n"


@pytest.mark.usefixtures("loaded")
def test_interrupts_where_a_line_is_typed(run, monkeypatch):
    lines = iter([KeyboardInterrupt, "/system x", KeyboardInterrupt, KeyboardInterrupt])

    def typed(_):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise line
        return line

    monkeypatch.setattr(builtins, "input", typed)
    code, _, err = run(*ARGV)
    assert code == 0
    assert err.count("Ctrl-C again, Ctrl-D or /exit leaves") == 2
    assert next(lines, None) is None


def test_a_request_that_fails_is_no_turn(run, loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(
        loaded.runner, "execute", lambda schedule: StepOutput([None for _ in schedule.requests])
    )
    file = tmp_path / "talk.json"
    code, _, err = run(*ARGV, typed=f"a\n/save {file}\n")
    assert code == 0
    assert err.splitlines()[1:] == ["paged: the model's logits are not finite"]
    assert json.loads(file.read_text()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n", "2"], "--n and --best-of have no place in a chat"),
        (["--best-of", "2"], "--n and --best-of have no place in a chat"),
        (["--logprobs", "1"], "--logprobs has no place in a chat"),
        (["--prompt-logprobs", "1"], "--prompt-logprobs has no place in a chat"),
        (["--no-detokenize"], "--no-detokenize leaves nothing to show"),
        (["--chat-template", "missing.jinja"], "missing.jinja: No such file or directory"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs must be JSON: "),
        (["--chat-template-kwargs", "[]"], "--chat-template-kwargs must be a JSON object, got '[]'"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--foo"], "No such option: --foo (see paged chat --help)"),
    ],
    ids=" ".join,
)
def test_wrong_flags(run, argv, message):
    assert message in run.refused("chat", *argv, code=1 if "No such file" in message else 2)


def test_a_template_is_named_or_that_of_the_checkpoint(run, loaded, tmp_path):
    by_default = run("chat", "--max-tokens", "5", "--temperature", "0", stdin="a\n")
    assert by_default == run(
        "chat", "--max-tokens", "5", "--temperature", "0", "--chat-template", "plain", stdin="a\n"
    )
    assert (
        "'nope' is neither a Jinja template nor the name of one"
        in run("chat", "--chat-template", "nope", stdin="a\n")[2]
    )
    answer = Talk(loaded).say("a")
    file = write(tmp_path / "t.jinja", TEMPLATE)
    assert run("chat", "--chat-template", file, *GREEDY, stdin="a")[1] == answer + "\n"
    (output,) = loaded.generate("import os", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    argv = ("--chat-template", "{{ mood }}", "--chat-template-kwargs", '{"mood": "import os"}')
    assert run("chat", *argv, *GREEDY, stdin="a")[1] == output.outputs[0].text + "\n"


def test_keys_of_a_real_terminal():
    """Ctrl-C reaches the whole foreground group, and the process that renders templates must survive it."""
    master, slave = pty.openpty()
    code = "import fcntl, runpy, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); sys.argv[0] = 'paged'; "
    code += "runpy.run_module('paged', run_name='__main__')"
    argv = ["chat", "--chat-template", "plain", "--ignore-eos", "--max-tokens", "1500", "--num-blocks", "128"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code, *argv, "--device", "cpu"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**environment, "TERM": "dumb"},
    ) as process:
        os.close(slave)
        shown = ""

        def wait_for(pattern):
            nonlocal shown
            deadline = time.monotonic() + 120
            while not (found := re.search(pattern, shown, re.DOTALL)):
                assert time.monotonic() < deadline, shown
                if select.select([master], [], [], 1)[0]:
                    shown += os.read(master, 65536).decode(errors="replace")
            shown = shown[found.end() :]

        wait_for("Ctrl-D leaves.*>>> ")
        for _ in range(2):
            os.write(master, b"def f(x):\n")
            wait_for(r"def f\(x\):\r\n.{20}")
            os.write(master, b"\x03")
            wait_for(">>> ")
        os.write(master, b"\x04")
        assert process.wait(timeout=120) == 0
        os.close(master)


def test_images_are_shown_with_the_next_turn(run, tmp_path, monkeypatch):
    """A wrong image costs its turn, and no advice on contexts; /reset takes back what was not shown yet."""
    wrong, file, talk = tmp_path / "wrong.png", tmp_path / "an image.png", tmp_path / "talk.json"
    wrong.write_bytes(b"%PDF-1.7")
    file.write_bytes(png(picture(1)))
    own = new_engine(seeing("qwen3_vl"), skip_tokenizer_init=False)
    monkeypatch.setattr(common, "start", lambda _: own)
    lines = (f"/image {wrong}", "a", f"/image {file}", "/reset", "b", f"/image {file.as_uri()}", "c")
    _, _, err = run("chat", *GREEDY, typed="\n".join((*lines, f"/save {talk}", "")))
    no_image = "messages[0].content[0] is no image in PNG, JPEG, WEBP or GIF, or its header is damaged"
    assert err.splitlines()[-1].endswith(no_image)
    first, _, second, _ = json.loads(talk.read_text())
    assert first["content"] == "b"
    assert [part["type"] for part in second["content"]] == ["image_url", "text"]
    _, shown, _ = run("generate", "c", "--image", file.as_uri(), *GREEDY)
    assert shown == run("generate", "c", "--image", str(file), *GREEDY)[1]
