"""Cut embeddings to a part of their numbers."""

from argparse import Namespace

from vllm import LLM, EngineArgs, PoolingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse_args():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(model="jinaai/jina-embeddings-v3", runner="pooling", trust_remote_code=True)
    return parser.parse_args()


def main(args: Namespace):
    llm = LLM(**vars(args))
    outputs = llm.embed(["white", "blanco", "weiss"], pooling_params=PoolingParams(dimensions=32))
    assert [len(output.outputs.embedding) for output in outputs] == [32] * 3


if __name__ == "__main__":
    main(parse_args())
