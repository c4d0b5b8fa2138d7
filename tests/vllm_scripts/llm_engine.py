"""Drive an engine step by step, with requests that arrive while others run."""

import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def requests() -> list[tuple[str, SamplingParams]]:
    return [
        ("def robot():", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("import", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]


def process(engine: LLMEngine, waiting: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    finished = []
    number = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params = waiting.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        for output in engine.step():
            assert output.lora_request is None
            assert output.finished or not all(sample.finished() for sample in output.outputs)
            if output.finished:
                print(output)
                finished.append(output)
    return finished


def main(args: argparse.Namespace):
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    finished = process(engine, requests())
    assert sorted(len(output.outputs) for output in finished) == [1, 1, 2]


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Drive an engine")
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="facebook/opt-125m")
    main(parser.parse_args())
