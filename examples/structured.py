"""Make outputs match a JSON schema, a choice or a regular expression, and call tools by them."""

import json

from paged import LLMEngine, SamplingParams, StructuredOutputsParams

engine = LLMEngine("demo")


def constrained(prompt: str, **structure: object) -> str:
    params = SamplingParams(max_tokens=200, seed=1, structured_outputs=StructuredOutputsParams(**structure))
    return engine.generate([prompt], params, use_tqdm=False)[0].outputs[0].text


person = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 120, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
print(json.loads(constrained("A person: ", json=person)))
print(constrained("The sentiment is ", choice=["positive", "negative", "neutral"]))
print(constrained("The date is ", regex=r"20[0-9]{2}-(0[1-9]|1[0-2])"))

# A tool call is a JSON object of one of several schemas. For calls in a model's own form see agent.py.
tools = {"add": lambda a, b: a + b, "negate": lambda a: -a}
number = {"type": "integer", "minimum": -99, "maximum": 99}
call = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"const": name}, **dict.fromkeys(arguments, number)},
            "required": ["tool", *arguments],
            "additionalProperties": False,
        }
        for name, arguments in (("add", ["a", "b"]), ("negate", ["a"]))
    ]
}
arguments = json.loads(constrained("Compute: ", json=call))
print(arguments, "=", tools[arguments.pop("tool")](**arguments))
