"""Limit what an engine takes, and ask how long a text may be."""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model="adept/fuyu-8b", max_model_len=256, max_num_seqs=2, enforce_eager=True)
    assert llm.llm_engine.model_config.max_model_len == 256
    most = llm.llm_engine.model_config.max_model_len - 250
    (output,) = llm.generate("def a():", SamplingParams(max_tokens=most))
    assert len(output.outputs[0].token_ids) <= most


if __name__ == "__main__":
    main()
