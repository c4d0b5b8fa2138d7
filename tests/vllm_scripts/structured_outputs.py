"""Constrain outputs by a choice, a regular expression, a JSON schema and a grammar."""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 60
schema = {
    "type": "object",
    "properties": {"brand": {"enum": ["a", "b"]}, "doors": {"type": "boolean"}},
    "required": ["brand", "doors"],
    "additionalProperties": False,
}
grammar = """
root ::= "SELECT " column " FROM " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""


def complete(llm, prompt, **language):
    structured_outputs = StructuredOutputsParams(**language)
    params = SamplingParams(structured_outputs=structured_outputs, max_tokens=MAX_TOKENS, temperature=0)
    outputs = llm.generate(prompts=prompt, sampling_params=params, use_tqdm=False)
    return outputs[0].outputs[0].text


def main():
    llm = LLM(model="Qwen/Qwen2.5-3B-Instruct", max_model_len=100)
    assert complete(llm, "Is it good? ", choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert complete(llm, "Mail: ", regex=r"\w{1,4}@\w{1,4}\.com\n").endswith(".com\n")
    assert set(json.loads(complete(llm, "A car: ", json=schema))) == {"brand", "doors"}
    assert complete(llm, "SQL: ", grammar=grammar).startswith("SELECT col_")


if __name__ == "__main__":
    main()
