"""Give prompts as token ids or dicts."""

from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt


def main():
    llm = LLM(model="facebook/opt-125m", seed=0)
    ids = llm.get_tokenizer().encode("def a():")
    prompts = [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt="def a():"), {"prompt_token_ids": ids}]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1


if __name__ == "__main__":
    main()
