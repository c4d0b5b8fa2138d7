"""Guess tokens by another model."""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(
        model="Qwen/Qwen3-8B",
        speculative_config={"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 3, "method": "draft_model"},
    )
    for output in llm.generate(["def a():"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)):
        print(output.prompt, output.outputs[0].text)


if __name__ == "__main__":
    main()
