"""Embed a few prompts."""

from vllm import LLM

prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]


def main():
    llm = LLM(model="intfloat/e5-small", runner="pooling", enforce_eager=True)
    outputs = llm.embed(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        embeds = output.outputs.embedding
        print(f"{prompt!r}: {embeds[:4]}... (size={len(embeds)})")
    assert len({len(output.outputs.embedding) for output in outputs}) == 1


if __name__ == "__main__":
    main()
