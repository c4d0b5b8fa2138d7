"""Embed a prompt, by either method."""

from vllm import LLM


def main():
    llm = LLM(model="intfloat/e5-small", runner="pooling")
    (output,) = llm.embed("Hello, my name is")
    embeds = output.outputs.embedding
    print(f"Embeddings: {embeds[:3]} (size={len(embeds)})")
    (same,) = llm.encode("Hello, my name is", pooling_task="embed")
    assert same.outputs.embedding == embeds


if __name__ == "__main__":
    main()
