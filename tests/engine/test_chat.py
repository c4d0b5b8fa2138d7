"""engine.chat renders conversations by the checkpoint's template and encodes them without a second BOS."""

from __future__ import annotations

import json
import shutil

import pytest

from paged import LLMEngine, RequestError, SamplingParams
from paged.architectures.config import DEMO
from paged.text.chat_template import PLAIN_TEMPLATE
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content | trim }}\n{% endfor %}"
    "{% if tools %}# {{ tools | length }} tools\n{% endif %}"
    "{% if no_one is defined %}{{ raise_exception('nobody is here') }}{% endif %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
BOS = "<|endoftext|>"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
HELLO = [{"role": "user", "content": "def f(x):"}]
TALK = [*HELLO, {"role": "assistant", "content": "return"}, {"role": "user", "content": "why?"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Make the demo model with a chat template and a tokenizer that puts BOS before every text."""
    directory = tmp_path_factory.mktemp("chatty")
    for file in DEMO.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (directory / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    engine = LLMEngine(str(directory), num_blocks=64, device="cpu")
    yield engine
    assert_all_free(engine)


def test_a_conversation_is_generated_from_its_rendered_text(engine):
    (output,) = engine.chat(HELLO, GREEDY, use_tqdm=False)
    text = "# user\ndef f(x):\n# assistant\n"
    assert output.prompt == BOS + text
    # With special tokens the tokenizer's own BOS would precede the template's.
    ids = engine.tokenizer.encode(text)
    assert ids[0] == 0
    assert output.prompt_token_ids == ids
    (same,) = engine.generate([ids], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    (text_prompt,) = engine.generate(
        {"prompt": BOS + text, "add_special_tokens": False}, GREEDY, use_tqdm=False
    )
    assert text_prompt.prompt_token_ids == ids


def test_several_conversations_each_with_its_parameters(engine):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 3)]
    outputs = engine.chat([HELLO, TALK], params, use_tqdm=False, priority=[0, 0.0], tenant="a", timeout_s=60)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3]
    assert outputs[1].prompt == BOS + "# user\ndef f(x):\n# assistant\nreturn\n# user\nwhy?\n# assistant\n"
    alone = engine.chat(TALK, params[1], use_tqdm=False)[0]
    assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"add_generation_prompt": False}, "# assistant\nreturn\n# user\nwhy?\n"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "# user\nwhy?"),
        ({"tools": [{"type": "function"}]}, "# 1 tools\n# assistant\n"),
        (
            {"chat_template": "{{ messages[-1].content }}{{ end }}", "chat_template_kwargs": {"end": "!"}},
            "why?!",
        ),
        ({"chat_template": "plain"}, "User: why?\nAssistant:"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_options_reach_the_template(engine, options, end):
    assert engine.chat(TALK, GREEDY, use_tqdm=False, **options)[0].prompt.endswith(end)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([HELLO, [{"role": "user"}]], {}, r"conversation 1: messages\[0\]\[\"content\"\] must be text"),
        ([HELLO, "x"], {}, "conversation 1: messages must be a list of messages, got 'x'"),
        ([], {}, "at least one message"),
        (HELLO, {"chat_template_kwargs": {"no_one": 1}}, "the chat template refuses this: nobody is here"),
        (HELLO, {"continue_final_message": True}, "give add_generation_prompt=False"),
        (HELLO, {"chat_template": "{{ '' }}"}, r"prompts\[0\]: the prompt is empty"),
        ([{"role": "user", "content": "\ud800"}], {}, "not valid Unicode"),
        (HELLO, {"priority": "x"}, "priority must be a number"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(engine, messages, options, message):
    with pytest.raises(RequestError, match=message):
        engine.chat(messages, GREEDY, use_tqdm=False, **options)
    assert_all_free(engine)


def test_an_unknown_argument_is_refused(engine):
    with pytest.raises(TypeError, match="templte"):
        engine.chat(HELLO, templte="x")


def test_add_special_tokens_is_checked(engine):
    for prompt, message in [
        ({"prompt": "x", "add_special_tokens": 0}, "add_special_tokens must be True or False, got 0"),
        ({"prompt_token_ids": [1], "add_special_tokens": False}, "either prompt or prompt_token_ids"),
    ]:
        with pytest.raises(RequestError, match=message):
            engine.generate([prompt], use_tqdm=False)


def test_a_chat_needs_a_template_and_a_tokenizer(tmp_path):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    demo = LLMEngine(str(tmp_path), num_blocks=16, device="cpu")
    with pytest.raises(RequestError, match="this checkpoint has no chat template: give a Jinja template as"):
        demo.chat(HELLO)
    with pytest.raises(
        RequestError, match="a chat needs the tokenizer, which skip_tokenizer_init=True left out"
    ):
        new_engine(checkpoint("llama")).chat(HELLO)


def test_the_demo_has_the_plain_template():
    assert (DEMO / "chat_template.jinja").read_text() == PLAIN_TEMPLATE
