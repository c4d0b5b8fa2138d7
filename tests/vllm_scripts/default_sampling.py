"""Change some of the model's default parameters."""

from vllm import LLM


def main():
    llm = LLM(model="Qwen/Qwen2.5-0.5B-Instruct")
    params = llm.get_default_sampling_params()
    params.temperature = 0.5
    params.max_tokens = 100
    params.stop = ["\n\n"]
    params.stop_token_ids = None
    outputs = llm.generate(["import os\n", "x = ["], params)
    assert all(sample.finished() for output in outputs for sample in output.outputs)


if __name__ == "__main__":
    main()
