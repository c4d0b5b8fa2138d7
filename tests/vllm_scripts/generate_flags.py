"""Take the options of the engine as flags in a group, and complete."""

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def main(args):
    temperature = args.pop("temperature")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    if temperature is not None:
        params.temperature = temperature
    params.max_tokens = 6
    prompts = ["class A:", "def b():"]
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        assert len(output.outputs[0].token_ids) <= 6


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="meta-llama/Llama-3.2-1B-Instruct")
    parser.add_argument("--temperature", type=float)
    flags = ["--max_model_len", "128", "--trust-remote-code", "--temperature=0", "--runner", "generate"]
    main(vars(parser.parse_args(flags)))
