"""Edit logits by a function."""

from vllm import LLM, SamplingParams


def only_seven(token_ids, logits):
    del token_ids
    kept = logits[7].clone()
    logits[:] = float("-inf")
    logits[7] = kept
    return logits


def main():
    llm = LLM(model="facebook/opt-125m")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    params.logits_processors = [only_seven]
    (output,) = llm.generate("a", params)
    assert list(output.outputs[0].token_ids) == [7] * 3


if __name__ == "__main__":
    main()
