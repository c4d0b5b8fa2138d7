"""This engine as a system of the benchmarks."""

from __future__ import annotations

from benchmarks.common import gguf_path
from benchmarks.peers.worker import Options, Tokens, in_batches


class Paged:
    """LLMEngine; int8 and int4 by its option quantization, types of GGUF from llama.cpp's file."""

    def __init__(self, options: Options) -> None:
        from paged import LLMEngine

        model = options.model
        precision = {}
        if options.dtype in ("int8", "int4"):
            precision = {"dtype": "bfloat16", "quantization": options.dtype}
        elif options.dtype in ("float32", "bfloat16"):
            precision = {"dtype": options.dtype}
        else:
            model = str(gguf_path(model, options.dtype))
        self.engine = LLMEngine(
            model,
            block_size=options.block_size,
            # The last block of every request may be partly filled.
            num_blocks=options.num_tokens // options.block_size + options.num_requests,
            max_num_batched_tokens=options.max_batched_tokens,
            max_num_seqs=options.num_requests,
            skip_tokenizer_init=True,
            **precision,
        )

    def run(
        self, prompts: Tokens, max_tokens: list[int], batch_size: int | None
    ) -> tuple[Tokens, list[float]]:
        """Run batches one after the other, or all requests at once if batch_size is None."""
        from paged import SamplingParams

        tokens: Tokens = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        for batch in in_batches(prompts, batch_size):
            params = [SamplingParams(temperature=0, max_tokens=max_tokens[i], ignore_eos=True) for i in batch]
            outputs = self.engine.generate([prompts[i] for i in batch], params, use_tqdm=False)
            for i, output in zip(batch, outputs, strict=True):
                tokens[i] = output.outputs[0].token_ids
                first[i] = output.metrics.first_token_time
        return tokens, first
