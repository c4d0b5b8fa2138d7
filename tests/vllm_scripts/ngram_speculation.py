"""Guess tokens from the prompt."""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(
        model="Qwen/Qwen3-8B",
        tensor_parallel_size=1,
        gpu_memory_utilization=0.3,
        disable_log_stats=False,
        max_model_len=512,
        enable_prefix_caching=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    )
    outputs = llm.generate(["a = 1\nb = 1\na = 1\n"], SamplingParams(temperature=0.0, max_tokens=12))
    assert len(outputs[0].outputs[0].token_ids) == 12


if __name__ == "__main__":
    main()
