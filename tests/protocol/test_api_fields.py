"""Every field of every body does what docs/api-fields.md says: something, nothing, or a refusal."""

import re
from dataclasses import replace

import pytest

from paged import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paged.base.errors import PagedError
from paged.base.fields import Effect
from paged.chat.chat_format import ChatFormat
from paged.protocol.calls.adapters import LoadAdapterCall, UnloadAdapterCall
from paged.protocol.calls.call import AnswerCall, GenerationCall
from paged.protocol.calls.tokens import TextCall
from paged.protocol.calls.vectors import EmbeddingCall
from paged.protocol.endpoints import ENDPOINTS, parse_call
from paged.protocol.limits import Limits
from paged.protocol.llamacpp.fill import FILL_TOKENS
from paged.protocol.ollama.calls import CopyCall, NamedCall
from tests.support.api_fields import BODIES, COMPLETIONS, COUNT, MESSAGES, PAGE, RESPONSES, changes, page

FORMAT = ChatFormat.of(tool_call_parser="hermes", reasoning_parser="think", enable_auto_tool_choice=True)
TRUSTING = Limits(trust_chat_template=True, max_logprobs=-1, chat_format=FORMAT)
# A template that shows the variables which some bodies set by fields of their own.
SHOWING = replace(
    TRUSTING,
    chat_template="{{ messages }}{{ reasoning_effort }}{{ enable_thinking }}{{ a }}",
    max_model_len=2048,
)
OF_SHOWING = (RESPONSES, MESSAGES, COUNT, "/api/chat", "/api/generate", "/api/embed")
PLACES = [{5: Logprob(-1.0, 2, "a"), 6: Logprob(-0.5, 1, "b")}]
ROWS = [(url, field) for url, call in ENDPOINTS.items() for field in call.table.fields]


def of_effect(effect):
    rows = [(url, field) for url, field in ROWS if field.effect is effect]
    return pytest.mark.parametrize(("url", "field"), rows, ids=lambda v: v if isinstance(v, str) else v.name)


class Spelled:
    """The model's templates with a tokenizer that shows the arguments that it gets."""

    def __init__(self, text):
        self.chat_templates, self.render_chat, self.model_config = (
            text.chat_templates,
            text.render_chat,
            text.model_config,
        )
        self.tokenizer = self
        self.special_ids = dict.fromkeys(FILL_TOKENS[0], 0)
        self.added_texts = frozenset()

    def encode(self, prompt, **options):
        return [*map(ord, f"{prompt}{options}")]

    def least_tokens(self, prompt, most):  # noqa: ARG002
        return 0

    def decode(self, tokens, **options):
        return f"{tokens}{options}"

    def token_text(self, token_id, *, first):
        return f"{token_id}{first}"


def outcome(url, body, text):
    """Return what a body asks of the engine, and what becomes of an output; or why it is refused."""
    try:
        call = parse_call(url, body, SHOWING if url in OF_SHOWING else TRUSTING)
        private = {"values", "limits", "sampling", "form_fields", "conversation", "listed"}
        asked = {name: v for name, v in vars(call).items() if name not in private and name[0] != "_"}
        if isinstance(call, NamedCall | CopyCall | LoadAdapterCall | UnloadAdapterCall):
            return call.values
        if isinstance(call, TextCall):
            return asked, call.answer(Spelled(text), 2048)
        asked["prompts"] = call.prompts(Spelled(text) if url == "/infill" else text)
        if isinstance(call, EmbeddingCall):
            return asked, call._vector(EMBEDDED)
        if isinstance(call, GenerationCall):
            asked["params"] = call.params(text)
        if isinstance(call, AnswerCall):
            chunks = call.chunks("i", 0, "m")
            sent = [*chunks.start(0, OUTPUT), *chunks.add(0, OUTPUT), *chunks.finish()]
            return asked, call.body([OUTPUT], "i", 0, "m"), sent
        return asked, None
    except PagedError as error:
        return str(error), error.param


class EMBEDDED:
    class outputs:  # noqa: N801
        embedding = (1.0, 2.0)


OUTPUT = RequestOutput(
    request_id="r",
    prompt="x",
    prompt_token_ids=[4],
    outputs=[CompletionOutput(0, "<think>b</think>a", [5], "length", None, PLACES, -1.0)],
    finished=True,
    num_cached_tokens=0,
    metrics=RequestMetrics(0.0),
    prompt_logprobs=[None],
)


def test_the_page_is_that_of_the_tables():
    assert PAGE.read_text() == page(), "python -m tests.support.api_fields --write"


def test_the_page_claims_for_a_body_the_fields_that_it_honours():
    sections = {
        title: text for title, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## "))
    }
    for url, call in ENDPOINTS.items():
        text = next(text for title, text in sections.items() if url in title.split(" and "))
        line = next((line for line in text.splitlines() if line.startswith("This body also takes ")), "")
        claimed = [*(sections[title] for title in re.findall('"(.*?)"', line)), text]
        names = {name for part in claimed for name in re.findall(r"^\| `(\w+)`", part, re.MULTILINE)}
        assert names == {field.name for field in call.table.with_effect(Effect.HONOURED)}


CHANGED = [*changes()]


@pytest.mark.parametrize(
    ("url", "before", "after"),
    [(url, before, after) for url, _, before, after in CHANGED],
    ids=[f"{url}-{name}" for url, name, _, _ in CHANGED],
)
def test_an_honoured_field_changes_something(text, url, before, after):
    assert outcome(url, after, text) != outcome(url, before, text)


@of_effect(Effect.IGNORED)
def test_a_field_without_effect_is_listed(url, field):
    call = parse_call(url, {**BODIES[url], field.name: "x"}, TRUSTING)
    assert call.ignored == (field.name,)


@of_effect(Effect.REFUSED)
def test_a_refused_field_says_why(url, field):
    with pytest.raises(PagedError) as refused:
        parse_call(url, {**BODIES[url], field.name: [object()]}, TRUSTING)
    assert field.meaning in str(refused.value)
    assert refused.value.param == field.name
    for neutral in field.neutral:
        assert parse_call(url, {**BODIES[url], field.name: neutral}, TRUSTING).ignored == ()


def test_a_nested_field_without_effect_is_listed():
    options = {"include_usage": True, "include_obfuscation": False}
    call = parse_call(COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": options}, TRUSTING)
    assert call.ignored == ("stream_options.include_obfuscation",)
    schema = {"name": "n", "strict": True, "schema": {}}
    asked = {"response_format": {"type": "json_schema", "json_schema": schema}}
    call = parse_call(COMPLETIONS, {"prompt": "x", **asked}, TRUSTING)
    assert call.ignored == tuple(f"response_format.json_schema.{name}" for name in ("name", "strict"))
