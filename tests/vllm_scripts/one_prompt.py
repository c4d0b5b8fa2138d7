"""Complete one prompt, with the model's parameters and greedily."""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model="facebook/opt-125m")
    for params in (None, SamplingParams(temperature=0)):
        for output in llm.generate("Hello, my name is", params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
            assert output.finished


if __name__ == "__main__":
    main()
