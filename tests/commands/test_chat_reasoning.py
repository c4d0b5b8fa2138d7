"""`paged chat` shows reasoning apart from the answer, and LLM.chat has both in the message."""

from __future__ import annotations

import pytest

from paged import LLMEngine, SamplingParams
from paged.chat.harmony import TOKENS
from paged.commands.answers import ChatAnswer, EngineAnswers
from paged.commands.chat import _print_more
from tests.support.scripted_model import scripted_model

SCRIPT = "<|channel|>analysis<|message|>2+2.<|end|><|start|>assistant<|channel|>final<|message|>Four."
TEMPLATE = {"chat_template": None, "chat_template_kwargs": {}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reasons")
    scripted_model(directory, [SCRIPT], TOKENS, comment=" ".join(TOKENS))
    return LLMEngine(str(directory), num_blocks=64, device="cpu", dtype="float32")


def test_an_answer_in_the_terminal_has_its_reasoning_apart(engine, capsys):
    answers = EngineAnswers(engine, {"temperature": 0}, TEMPLATE)
    growing = [*answers.stream([{"role": "user", "content": "#0 Hi"}])]
    assert growing[-1] == ChatAnswer("Four.", "2+2.")
    shown = ChatAnswer()
    for answer in growing:
        _print_more(answer, shown)
        shown = answer
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("Four.", "2+2.\n")


def test_the_message_of_a_chat(engine):
    params = SamplingParams(temperature=0, max_tokens=200)
    (output,) = engine.chat([{"role": "user", "content": "#0 Hi"}], params, use_tqdm=False)
    (completion,) = output.outputs
    message = completion.message
    assert message is not None
    assert (message["content"], message["reasoning"]) == ("Four.", "2+2.")
    assert (
        completion.text == "analysis2+2.assistantfinalFour."
    )  # without special tokens, as the model wrote it
