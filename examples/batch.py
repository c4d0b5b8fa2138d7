"""Generate for many prompts at once: all of them share each step."""

from paged import LLMEngine, SamplingParams

engine = LLMEngine("demo")  # or a directory, a GGUF file, or a hub id such as "Qwen/Qwen3-0.6B"

prompts = ["def fibonacci(n):", "class Stack:\n    def push(self, item):", "import os\n", "for i in range("]
params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=48, seed=1)

for output in engine.generate(prompts, params):
    print(output.prompt + output.outputs[0].text)
    print("---", output.outputs[0].finish_reason, len(output.outputs[0].token_ids), "tokens")

# Each prompt may have parameters of its own, and several samples.
several = [SamplingParams(n=3, max_tokens=8, seed=2), SamplingParams(temperature=0, max_tokens=8)]
for output in engine.generate(["return ", "while "], several):
    print(repr(output.prompt), [sample.text for sample in output.outputs])
