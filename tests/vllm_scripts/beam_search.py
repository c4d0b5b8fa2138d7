"""Find the likeliest continuations."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams


def main():
    llm = LLM(model="facebook/opt-125m")
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    params.max_tokens = 4
    outputs = llm.beam_search([{"prompt": "def add(a, b):"}], params)
    for output in outputs:
        print(output.sequences[0].text)
    assert [len(output.sequences) for output in outputs] == [3]


if __name__ == "__main__":
    main()
