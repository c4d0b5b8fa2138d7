"""Every field that the official clients know is honoured, has no effect, or is refused by its name."""

import pytest
from anthropic.types import beta
from anthropic.types import message_count_tokens_params as count
from anthropic.types import message_create_params as create
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta_create
from openai.types import responses, shared_params
from openai.types.responses import response_create_params, response_input_item_param

from paged.base.fields import FieldTable
from paged.protocol.messages import fields as messages
from paged.protocol.responses import fields

TABLES: list[tuple[type, FieldTable]] = [
    (response_create_params.ResponseCreateParamsBase, fields.RESPONSE_TABLE),
    (response_create_params.StreamOptions, fields.STREAM_TABLE),
    (responses.EasyInputMessageParam, fields.MESSAGE_ITEM),
    (responses.ResponseOutputMessageParam, fields.MESSAGE_ITEM),
    (responses.ResponseFunctionToolCallParam, fields.CALL_ITEM),
    (response_input_item_param.FunctionCallOutput, fields.OUTPUT_ITEM),
    (responses.ResponseReasoningItemParam, fields.REASONING_ITEM),
    (response_input_item_param.ItemReference, fields.REFERENCE_ITEM),
    (responses.FunctionToolParam, fields.FUNCTION_TOOL),
    (responses.ResponseTextConfigParam, fields.TEXT_TABLE),
    (responses.ResponseFormatTextJSONSchemaConfigParam, fields.TEXT_FORMATS["json_schema"]),
    (shared_params.Reasoning, fields.REASONING_TABLE),
    (create.MessageCreateParamsBase, messages.MESSAGES_TABLE),
    (beta_create.MessageCreateParamsBase, messages.MESSAGES_TABLE),
    (count.MessageCountTokensParams, messages.COUNT_TABLE),
    (beta_count.MessageCountTokensParams, messages.COUNT_TABLE),
    (beta.BetaTextBlockParam, messages.TEXT_BLOCK),
    (beta.BetaToolUseBlockParam, messages.USE_BLOCK),
    (beta.BetaToolResultBlockParam, messages.RESULT_BLOCK),
    (beta.BetaThinkingBlockParam, messages.THINKING_BLOCK),
    (beta.BetaRedactedThinkingBlockParam, messages.REDACTED_BLOCK),
    (beta.BetaToolParam, messages.CUSTOM_TOOL),
    (beta.BetaThinkingConfigEnabledParam, messages.THINKING_KINDS["enabled"]),
    (beta.BetaThinkingConfigAdaptiveParam, messages.THINKING_KINDS["adaptive"]),
    (beta.BetaOutputConfigParam, messages.OUTPUT_TABLE),
    (beta.BetaMetadataParam, messages.METADATA_TABLE),
]
IN_HEADERS = {"betas"}


@pytest.mark.parametrize(("given", "table"), TABLES, ids=[given.__name__ for given, _ in TABLES])
def test_every_field_of_the_clients_is_in_the_tables(given, table):
    known = {field.name for field in table.fields} | IN_HEADERS
    fields = {name for base in given.__mro__ for name in getattr(base, "__annotations__", ())}
    fields |= getattr(given, "__optional_keys__", frozenset())
    assert fields
    assert not fields - known
