# ruff: noqa: E501
"""Chat templates with the structure of published checkpoints' own: what stands around turns, calls and reasoning.

Their texts are rewritten; the marks, the order of the parts and the blanks are those of the checkpoints.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Published(NamedTuple):
    """A template and what is found out from it.

    calls, reasoning: the names of the formats; None for none.
    ends: the texts that end an assistant's turn.
    keeps: whether the template renders the reasoning of a turn that calls tools.
    """

    text: str
    calls: str | None
    reasoning: str | None
    ends: tuple[str, ...]
    keeps: bool = False


_CHATML_TOOLS = """{%- if tools %}<|im_start|>system
# Tools

Call functions, whose signatures are within <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
"""
_CHATML_TURNS = """{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}{%- if (loop.first and m.content) or not loop.first %}{{- '\n' }}{%- endif %}
@CALL@
{%- endfor %}{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n@THINK@' }}{%- endif %}"""
_HERMES_CALL = """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}"""
_HERMES_SAYS = """For each call write <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}"""
_CODER_CALL = """{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\n' }}
{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}{%- endfor %}
{{- '</function>\n</tool_call>' }}"""
_CODER_SAYS = """Reply with <tool_call>
<function=example>
<parameter=key>
value
</parameter>
</function>
</tool_call><|im_end|>
{% endif %}"""


def _chatml(says: str, call: str, think: str = "") -> str:
    return _CHATML_TOOLS + says + _CHATML_TURNS.replace("@CALL@", call).replace("@THINK@", think)


def _granite4() -> str:
    """Return Granite 4's turns: those of ChatML with other marks."""
    text = _chatml(_HERMES_SAYS, _HERMES_CALL).replace(_NO_THINK, "").replace("<|im_end|>", "<|end_of_text|>")
    text = re.sub(r"<\|im_start\|>(\w+)\n", r"<|start_of_role|>\1<|end_of_role|>", text)
    return text.replace("'<|im_start|>' + m.role + '\n'", "'<|start_of_role|>' + m.role + '<|end_of_role|>'")


_GLM45 = """[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{function-name}
<arg_key>{key}</arg_key>@BREAK@<arg_value>{value}</arg_value>
</tool_call>{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name + '@BREAK@' }}
{%- for key, value in call.function.arguments | items %}{{- '<arg_key>' + key + '</arg_key>@BREAK@<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>@BREAK@' }}{%- endfor %}
{{- '</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}{{- '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{- '<|system|>\n' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
_MINIMAX = """{%- if tools %}]~!b[]~b]system
# Tools
{% for tool in tools %}<tool>{{ tool.function | tojson }}</tool>
{% endfor %}Write
<minimax:tool_call>
<invoke name="tool"><parameter name="key">value</parameter></invoke>
</minimax:tool_call>[e~[
{% endif %}
{%- for m in messages %}{%- if m.role == 'assistant' %}{{- ']~b]ai\n' }}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content or '' }}
{%- if m.tool_calls %}{{- '\n<minimax:tool_call>\n' }}{%- for call in m.tool_calls %}
{{- '<invoke name="' + call.function.name + '">\n' }}
{%- for key, value in call.function.arguments | items %}{{- '<parameter name="' + key + '">' }}
{{- value if value is string else value | tojson }}{{- '</parameter>\n' }}{%- endfor %}{{- '</invoke>\n' }}{%- endfor %}
{{- '</minimax:tool_call>' }}{%- endif %}{{- '[e~[\n' }}
{%- elif m.role == 'tool' %}{{- ']~b]tool\n<response>' + m.content + '</response>[e~[\n' }}
{%- else %}{{- ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}"""
_GEMMA4 = """{%- macro put(value) -%}{%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
{%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
{%- elif value is mapping -%}{{- '{' -}}{%- for key, part in value | dictsort -%}
{{- key -}}:{{- put(part) -}}{{- '' if loop.last else ',' -}}{%- endfor -%}{{- '}' -}}
{%- elif value is sequence -%}{{- '[' -}}{%- for part in value -%}{{- put(part) -}}{{- '' if loop.last else ',' -}}
{%- endfor -%}{{- ']' -}}{%- elif value is none -%}null{%- else -%}{{- value -}}{%- endif -%}{%- endmacro -%}
{{- '<bos>' }}{%- if tools or enable_thinking %}{{- '<|turn>system\n' + ('<|think|>\n' if enable_thinking else '') }}
{%- for tool in tools or [] %}{{- '<|tool>declaration:' + tool.function.name + '<tool|>' }}{%- endfor %}{{- '<turn|>\n' }}
{%- endif %}{%- set ns = namespace(after_result=false) %}
{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|tool_response>response:f{value:' + put(m.content) + '}<tool_response|>' }}{%- set ns.after_result = true %}
{%- else %}{%- if not ns.after_result %}{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{%- endif %}
{%- set ns.after_result = false %}
{%- if m.reasoning_content and m.tool_calls %}{{- '<|channel>thought\n' + m.reasoning_content + '<channel|>' }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '<|tool_call>call:' + call.function.name + put(call.function.arguments) }}
{{- '<tool_call|>' }}{%- endfor %}{{- m.content or '' }}
{%- if not m.tool_calls %}{{- '<turn|>\n' }}{%- endif %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{%- if not ns.after_result %}{{- '<|turn>model\n' }}{%- endif %}
{%- if not enable_thinking %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}{%- endif %}"""
_GPT_OSS = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools or messages[0].role in ['developer', 'system'] %}{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role in ['developer', 'system'] %}{{- '# Instructions\n\n' + messages[0].content }}{%- endif %}
{%- for tool in tools or [] %}{{- '\ntype ' + tool.function.name + ' = (_: any) => any;' }}{%- endfor %}{{- '<|end|>' }}
{%- endif %}{%- set last = namespace(name=none) %}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}{%- if m.content and m.thinking %}
{{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{%- endif %}
{%- set thought = m.content or m.thinking %}
{%- if thought %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{%- endif %}
{%- set call = m.tool_calls[0].function %}{%- set last.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- else %}{%- set last.name = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- elif m.role == 'tool' %}{%- if last.name is none %}
{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}{%- endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
_LLAMA3 = """{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n' }}
{%- for tool in tools or [] %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- 'Respond in the format {"name": function name, "parameters": its arguments}.<|eot_id|>' }}
{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{%- for call in m.tool_calls %}{{- '' if loop.first else '; ' }}
{{- '{"name": "' + call.function.name + '", "parameters": ' }}{{- call.function.arguments | tojson }}{{- '}' }}
{%- endfor %}{%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
_PYTHONIC = """{%- macro put(value) -%}{%- if value is string -%}{{- value | tojson -}}
{%- elif value is boolean -%}{{- 'True' if value else 'False' -}}{%- elif value is none -%}None
{%- elif value is mapping -%}{{- '{' -}}{%- for key, part in value | items -%}
{{- key | tojson -}}: {{ put(part) -}}{{- '' if loop.last else ', ' -}}{%- endfor -%}{{- '}' -}}
{%- elif value is sequence -%}{{- '[' -}}{%- for part in value -%}{{- put(part) -}}{{- '' if loop.last else ', ' -}}
{%- endfor -%}{{- ']' -}}{%- else -%}{{- value -}}{%- endif -%}{%- endmacro -%}
{%- macro call_of(call) -%}{{- call.function.name + '(' -}}{%- for key, value in call.function.arguments | items -%}
{{- key -}}={{- put(value) -}}{{- '' if loop.last else ', ' -}}{%- endfor -%}{{- ')' -}}{%- endmacro -%}"""
_LLAMA_PYTHONIC = (
    _PYTHONIC
    + """{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n' }}
{%- for tool in tools or [] %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- 'Use the format of [func_name1(params_name1=params_value1), func_name2(params)].<|eot_id|>' }}
{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{{- '[' }}{%- for call in m.tool_calls %}{{- '' if loop.first else ', ' }}{{- call_of(call) }}
{%- endfor %}{{- ']' }}{%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
)
_OLMO3 = (
    _PYTHONIC
    + """{{- '<|im_start|>system\nOutput any function calls within <function_calls></function_calls> XML tags.' }}
{%- for tool in tools or [] %}{{- '<functions>' + tool | tojson + '</functions>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' + (m.content or '') }}
{%- if m.tool_calls %}{{- '<function_calls>' }}{%- for call in m.tool_calls %}{{- '' if loop.first else '\n' }}
{{- call_of(call) }}{%- endfor %}{{- '</function_calls>' }}{%- endif %}{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n@THINK@' }}{%- endif %}"""
)
_LFM2 = (
    _PYTHONIC
    + """{%- if tools %}{{- '<|im_start|>system\nList of tools: <|tool_list_start|>' + tools | tojson }}
{{- '<|tool_list_end|><|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'tool' %}
{{- '<|tool_response_start|>' + m.content + '<|tool_response_end|>' }}{%- else %}{{- m.content or '' }}{%- endif %}
{%- if m.tool_calls %}{{- '<|tool_call_start|>[' }}{%- for call in m.tool_calls %}{{- '' if loop.first else ', ' }}
{{- call_of(call) }}{%- endfor %}{{- ']<|tool_call_end|>' }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)
# Marks of lists of tools are no more, the template says what is for training, and texts have single quotes.
_LFM2_5 = """{{- bos_token }}{%- macro put(value) -%}{%- if value is string -%}{{- "'" + value + "'" -}}
{%- elif value is mapping -%}{{- value | tojson -}}{%- else -%}{{- value | string -}}{%- endif -%}{%- endmacro -%}
{%- if tools %}{{- '<|im_start|>system\nToday: ' + strftime_now('%Y-%m-%d') + '\nTools: ' + tools | tojson }}
{{- '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}{%- generation %}
{%- if m.thinking is defined %}{{- '<think>' + m.thinking + '</think>' }}{%- endif %}{{- m.content or '' }}
{%- if m.tool_calls %}{{- '<|tool_call_start|>[' }}{%- for call in m.tool_calls %}{{- '' if loop.first else ', ' }}
{{- call.function.name + '(' -}}{%- for key, value in call.function.arguments | items -%}
{{- key -}}={{- put(value) -}}{{- '' if loop.last else ', ' -}}{%- endfor -%}{{- ')' }}{%- endfor %}
{{- ']<|tool_call_end|>' }}{%- endif %}{{- '<|im_end|>\n' }}{%- endgeneration %}
{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_NEMOTRON_NANO_2 = """{{- '<SPECIAL_10>System\n' }}{%- if tools %}{{- '<AVAILABLE_TOOLS>' + tools | tojson }}
{{- '</AVAILABLE_TOOLS>\nCall tools by <TOOLCALL>[{"name": name, "arguments": {}}]</TOOLCALL>' }}{%- endif %}{{- '\n' }}
{%- for m in messages %}{%- if m.role == 'user' %}{{- '<SPECIAL_11>User\n' + m.content + '\n' }}
{%- elif m.role == 'tool' %}{{- '<SPECIAL_11>User\n<TOOL_RESPONSE>[' + m.content + ']</TOOL_RESPONSE>\n' }}
{%- elif m.role == 'assistant' %}{{- '<SPECIAL_11>Assistant\n' + (m.content or '').split('</think>')[-1] }}
{%- if m.tool_calls %}{{- '<TOOLCALL>[' }}{%- for call in m.tool_calls %}{{- '' if loop.first else ', ' }}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}' }}
{%- endfor %}{{- ']</TOOLCALL>' }}{%- endif %}{{- '\n<SPECIAL_12>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<SPECIAL_11>Assistant\n<think>\n' }}{%- endif %}"""
_GLM4 = """[gMASK]<sop>{%- if tools %}<|system|>
# Tools
{%- for tool in tools %}
## {{ tool.function.name }}
{{ tool.function | tojson }}
{%- endfor %}{%- endif %}
{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}{%- for call in m.tool_calls %}
{{- ('<|assistant|>' if loop.first else '') + call.function.name + '\n' }}{{- call.function.arguments | tojson + '\n' }}
{%- endfor %}{%- elif m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
_MISTRAL = """{{- '<s>' }}{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}
{%- if m.reasoning_content and @THINKS@ %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}{{- m.content or '' }}
{%- if m.tool_calls %}@CALLS@{%- endif %}{{- '</s>' }}
{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{%- endif %}{%- endfor %}"""
_MISTRAL_LIST = """{{- '[TOOL_CALLS]@BLANK@[' }}{%- for call in m.tool_calls %}{{- '' if loop.first else ', ' }}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- ', "id": "abcdefghi"}' }}{%- endfor %}{{- ']' }}"""
_MISTRAL_NAMED = """{%- for call in m.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name + '@ID@[ARGS]' }}
{{- call.function.arguments | tojson }}{%- endfor %}"""


def _mistral(calls: str, *, thinks: bool = False) -> str:
    return (
        _MISTRAL.replace("@CALLS@", calls)
        .replace("@THINKS@", "true" if thinks else "false")
        .replace("" if thinks else "{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}", "")
    )


_GRANITE = """{{- '<|start_of_role|>system<|end_of_role|>You are Granite. @SAYS@' }}
{{- 'When a tool is required, respond only with <|tool_call|> followed by a JSON list of tools.<|end_of_text|>\n' }}
{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson + '<|end_of_text|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' }}
{{- m.content or '' }}{%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for call in m.tool_calls %}
{{- '' if loop.first else ', ' }}{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}' }}{%- endfor %}{{- ']' }}{%- endif %}{{- '<|end_of_text|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
_PHI4_MINI = """{%- if tools %}{{- '<|system|><|tool|>' + tools | tojson + '<|/tool|><|end|>' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<|tool_response|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|' + m.role + '|>' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{- '<|tool_call|>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}<|/tool_call|>' }}{%- endfor %}{{- '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
_DEEPSEEK = """{{- '<s>' }}{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<｜Assistant｜>@CLOSED@' + (m.content or '') }}
{{- '<｜tool▁calls▁begin｜>' }}{%- for call in m.tool_calls %}@CALL@{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>@CLOSED@' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜>@THINK@' }}{%- endif %}"""
_DEEPSEEK_FENCED = """{{- '' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson }}{{- '\n```<｜tool▁call▁end｜>' }}"""
_DEEPSEEK_PLAIN = """{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson }}{{- '<｜tool▁call▁end｜>' }}"""


def _deepseek(call: str, think: str, closed: str = "") -> str:
    return _DEEPSEEK.replace("@CALL@", call).replace("@THINK@", think).replace("@CLOSED@", closed)


_SMOLLM2 = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_IM_END = ("<|im_end|>\n",)
_NO_THINK = (
    "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
)

PUBLISHED = {
    "Qwen2.5-7B-Instruct": Published(
        _chatml(_HERMES_SAYS, _HERMES_CALL).replace(_NO_THINK, ""), "hermes", None, _IM_END
    ),
    "Qwen3-8B": Published(_chatml(_HERMES_SAYS, _HERMES_CALL), "hermes", "think", _IM_END, True),
    "Qwen3-30B-A3B-Thinking-2507": Published(
        _chatml(_HERMES_SAYS, _HERMES_CALL, "<think>\\n"), "hermes", "think", _IM_END, True
    ),
    "SmolLM3-3B": Published(_chatml(_HERMES_SAYS, _HERMES_CALL), "hermes", "think", _IM_END, True),
    "granite-4.0-micro": Published(_granite4(), "hermes", None, ("<|end_of_text|>\n",)),
    "Qwen3-Coder-30B-A3B": Published(
        _chatml(_CODER_SAYS, _CODER_CALL).replace(_NO_THINK, ""), "qwen3_coder", None, _IM_END
    ),
    "Qwen3-Next-80B-A3B-Thinking": Published(
        _chatml(_HERMES_SAYS, _HERMES_CALL, "<think>\\n"), "hermes", "think", _IM_END, True
    ),
    "Qwen3.5-35B-A3B": Published(
        _chatml(_CODER_SAYS, _CODER_CALL, "<think>\\n"), "qwen3_coder", "think", _IM_END, True
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": Published(
        _chatml(_CODER_SAYS, _CODER_CALL, "<think>\\n"), "qwen3_coder", "think", _IM_END, True
    ),
    "NVIDIA-Nemotron-Nano-9B-v2": Published(
        _NEMOTRON_NANO_2, "nemotron_json", "think", ("\n<SPECIAL_12>\n",)
    ),
    "LFM2-1.2B": Published(_LFM2, "lfm2", None, _IM_END),
    "LFM2.5-8B-A1B": Published(_LFM2_5, "lfm2", "think", _IM_END, True),
    "Falcon-H1-7B-Instruct": Published(
        _chatml(_HERMES_SAYS, _HERMES_CALL).replace(_NO_THINK, ""), "hermes", None, _IM_END
    ),
    "GLM-4.5-Air": Published(_GLM45.replace("@BREAK@", "\\n"), "glm45", "think", ("",), True),
    "GLM-4.7": Published(_GLM45.replace("@BREAK@", ""), "glm45", "think", ("",), True),
    "MiniMax-M2": Published(_MINIMAX, "minimax_m2", "think", ("[e~[\n",), True),
    "gpt-oss-20b": Published(_GPT_OSS, "harmony", "harmony", ("<|call|>", "<|end|>"), True),
    "gemma-4-26B-A4B-it": Published(_GEMMA4, "gemma4", "gemma4", ("<turn|>\n", ""), True),
    "Llama-3.1-8B-Instruct": Published(_LLAMA3, "llama3_json", None, ("<|eot_id|>",)),
    "Llama-3.2-3B-Instruct, of Python's calls": Published(
        _LLAMA_PYTHONIC, "llama_pythonic", None, ("<|eot_id|>",)
    ),
    "Olmo-3-7B-Instruct": Published(_OLMO3.replace("@THINK@", ""), "olmo3", None, _IM_END),
    "Olmo-3-7B-Think": Published(_OLMO3.replace("@THINK@", "<think>"), "olmo3", "think", _IM_END),
    "GLM-4-9B-0414": Published(_GLM4, "glm4", None, ("",)),
    "Mistral-7B-Instruct-v0.3": Published(
        _mistral(_MISTRAL_LIST.replace("@BLANK@", " ")), "mistral", None, ("</s>",)
    ),
    "Mistral-Nemo-Instruct-2407": Published(
        _mistral(_MISTRAL_LIST.replace("@BLANK@", "")), "mistral", None, ("</s>",)
    ),
    "Mistral-Small-3.2": Published(
        _mistral(_MISTRAL_NAMED.replace("@ID@", "[CALL_ID]abcdefghi")), "mistral", None, ("</s>",)
    ),
    "Magistral-Small-2509": Published(
        _mistral(_MISTRAL_NAMED.replace("@ID@", ""), thinks=True), "mistral", "mistral", ("</s>",), True
    ),
    "granite-3.1-8b-instruct": Published(
        _GRANITE.replace("@SAYS@", ""), "granite", None, ("<|end_of_text|>\n",)
    ),
    "granite-3.2-8b-instruct": Published(
        _GRANITE.replace("@SAYS@", 'Begin with "Here is my thought process:" and "Here is my response:".'),
        "granite",
        "granite",
        ("<|end_of_text|>\n",),
    ),
    "granite-3.3-8b-instruct": Published(
        _GRANITE.replace("@SAYS@", "Think in <think></think>, answer in <response></response>."),
        "granite",
        "granite_tags",
        ("<|end_of_text|>\n",),
    ),
    "Phi-4-mini-instruct": Published(_PHI4_MINI, "phi4_mini", None, ("<|end|>",)),
    "DeepSeek-R1-Distill-Qwen-7B": Published(
        _deepseek(_DEEPSEEK_FENCED, "<think>\\n"), "deepseek_v3", "think", ("<｜end▁of▁sentence｜>",)
    ),
    "DeepSeek-V3.1": Published(
        _deepseek(_DEEPSEEK_PLAIN, "</think>", "</think>"),
        "deepseek_v31",
        "think",
        ("<｜end▁of▁sentence｜>",),
    ),
    "SmolLM2-135M-Instruct": Published(_SMOLLM2, "json", None, _IM_END),
}
