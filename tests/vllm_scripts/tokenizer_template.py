"""Apply the chat template oneself, or have it applied."""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model="Qwen/Qwen2.5-1.5B-Instruct")
    tokenizer = llm.get_tokenizer()
    messages = [[{"role": "user", "content": prompt}] for prompt in ("Hi", "What is 2 + 2?")]
    texts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(temperature=0, max_tokens=8)
    by_hand = [output.outputs[0].text for output in llm.generate(texts, params)]
    assert by_hand == [output.outputs[0].text for output in llm.chat(messages, params)]


if __name__ == "__main__":
    main()
