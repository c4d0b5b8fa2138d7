"""Run an agent: a loop of a model that calls tools, until it answers.

Start a server first: paged serve demo. OPENAI_BASE_URL names another one.
The demo model writes nonsense, so that each call is demanded here; a grammar makes its
arguments match their schema. Ask a trained model with tool_choice="auto", until it calls no tool any more.
"""

import json
import os

from openai import OpenAI

CITIES = {"Oslo": 4, "Rome": 19, "Lima": 17}
TOOLS = {
    "temperature": (lambda city: CITIES[city], {"city": {"type": "string", "enum": [*CITIES]}}),
    "convert": (
        lambda celsius: celsius * 9 / 5 + 32,
        {"celsius": {"type": "integer", "minimum": -60, "maximum": 60}},
    ),
}
described = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            },
        },
    }
    for name, (_, properties) in TOOLS.items()
]

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
messages = [{"role": "user", "content": "How warm is it in Rome, in Fahrenheit?"}]
for wanted in ("temperature", "convert", None):
    choice = {"type": "function", "function": {"name": wanted}} if wanted else "none"
    answer = client.chat.completions.create(
        model="demo", messages=messages, tools=described, tool_choice=choice, max_tokens=64, seed=1
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        result = TOOLS[call.function.name][0](**arguments)
        print(f"{call.function.name}({arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
print("The answer:", messages[-1]["content"])
