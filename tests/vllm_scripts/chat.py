"""Answer one conversation and a batch of them."""

from vllm import LLM, SamplingParams

conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write a function that adds two numbers."},
]


def main():
    llm = LLM(
        model="meta-llama/Llama-3.2-1B-Instruct", max_model_len=1024, dtype="float", disable_log_stats=True
    )
    sampling_params = llm.get_default_sampling_params()
    (output,) = llm.chat(conversation, sampling_params, False, None)
    print(output.prompt, output.outputs[0].text)
    params = SamplingParams(temperature=0.5, max_tokens=8, stop=None)
    outputs = llm.chat([conversation] * 3, params, use_tqdm=True, chat_template_content_format="auto")
    assert len(outputs) == 3
    # With a template of one's own.
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (output,) = llm.chat(conversation, params, use_tqdm=False, chat_template=template)
    assert output.prompt.startswith("You are a helpful assistant\nHello\n")


if __name__ == "__main__":
    main()
