"""Take the options of the engine and of sampling as flags, and chat."""

from vllm import LLM, EngineArgs
from vllm.outputs import RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser

CONVERSATION = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is a list?"},
]


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="meta-llama/Llama-3.2-1B-Instruct")
    group = parser.add_argument_group("Sampling parameters")
    for flag, kind in {"--max-tokens": int, "--temperature": float, "--top-p": float, "--top-k": int}.items():
        group.add_argument(flag, type=kind)
    parser.add_argument("--chat-template-path", type=str)
    return parser


def main(args):
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    assert args.pop("chat_template_path") is None
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    params.max_tokens = 8
    params.top_k = 5

    def show(outputs: list[RequestOutput], conversations: list):
        assert len(outputs) == len(conversations)
        for output in outputs:
            print(output.outputs[0].text)
            assert len(output.outputs[0].token_ids) <= 8

    show(llm.chat(CONVERSATION, params, use_tqdm=False), [CONVERSATION])
    show(llm.chat([CONVERSATION] * 4, params, use_tqdm=True), [CONVERSATION] * 4)


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
