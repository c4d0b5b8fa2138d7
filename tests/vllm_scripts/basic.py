"""Complete a few prompts."""

from vllm import LLM, SamplingParams

prompts = ["def fibonacci(n):", "import os\n", "class Stack:", "for i in range("]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="facebook/opt-125m", tensor_parallel_size=1, trust_remote_code=False, seed=0)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    assert [output.prompt for output in outputs] == prompts
    assert all(0 < len(output.outputs[0].token_ids) <= 16 for output in outputs)


if __name__ == "__main__":
    main()
