"""Stream the outputs of several prompts as their tokens come."""

from paged import LLMEngine, RequestOutputKind, SamplingParams

engine = LLMEngine("demo")

# A delta holds what is new; the default, CUMULATIVE, holds all text so far.
params = SamplingParams(max_tokens=48, seed=1, output_kind=RequestOutputKind.DELTA)

for output in engine.stream("def fibonacci(n):", params):
    print(output.outputs[0].text, end="", flush=True)
print("\n---")

# Several prompts come in turns: request_id tells them apart, and rises in the order of the prompts.
texts: dict[str, str] = {}
for output in engine.stream(["import ", "class "], params):
    texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].text
for text in texts.values():
    print(repr(text))
