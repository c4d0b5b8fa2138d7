"""Run an agent: a loop of a model that calls tools, until it answers (pip install openai).

It starts a server of its own, unless OPENAI_BASE_URL names one.
The demo model writes nonsense, so that each call is demanded here; a grammar makes its
arguments match their schema. Ask a trained model with tool_choice="auto", until it calls no tool any more.
"""

import json
import os
import subprocess
import sys

from openai import OpenAI

CITIES = {"Oslo": 4, "Rome": 19, "Lima": 17}
CELSIUS = {"type": "integer", "minimum": -60, "maximum": 60}
TOOLS = {
    "temperature": (lambda city: CITIES[city], {"city": {"type": "string", "enum": [*CITIES]}}),
    "convert": (lambda celsius: celsius * 9 / 5 + 32, {"celsius": CELSIUS}),
}


def described(name, properties):
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def run(client):
    tools = [described(name, properties) for name, (_, properties) in TOOLS.items()]
    messages = [{"role": "user", "content": "How warm is it in Rome, in Fahrenheit?"}]
    for wanted in ("temperature", "convert", None):
        choice = {"type": "function", "function": {"name": wanted}} if wanted else "none"
        answer = client.chat.completions.create(
            model="demo", messages=messages, tools=tools, tool_choice=choice, max_tokens=64, seed=1
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            result = TOOLS[call.function.name][0](**arguments)
            print(f"{call.function.name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    print("The answer:", messages[-1]["content"])


if "OPENAI_BASE_URL" in os.environ:
    run(OpenAI(api_key=os.environ.get("OPENAI_API_KEY", "none")))
else:
    command = [sys.executable, "-m", "paged", "serve", "demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if "is served at" in line)
            run(OpenAI(base_url=f"{line.split()[-1]}/v1", api_key="none"))
        finally:
            server.terminate()
