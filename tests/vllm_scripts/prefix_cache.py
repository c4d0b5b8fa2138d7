"""Ask twice about one table, whose KV is computed once."""

import time

from vllm import LLM, SamplingParams

TABLE = "\n".join(f"| {i} | name {i} | {20 + i} |" for i in range(30))


def timed(llm, params, prompts):
    start = time.time()
    output = llm.generate(prompts, sampling_params=params)
    print(output[0].outputs[0].text, time.time() - start)
    return output[0].num_cached_tokens


def main():
    llm = LLM(model="lmsys/longchat-13b-16k", enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=4)
    assert timed(llm, params, TABLE + "Who is 3?") == 0
    assert timed(llm, params, TABLE + "Who is 4?") > 100


if __name__ == "__main__":
    main()
