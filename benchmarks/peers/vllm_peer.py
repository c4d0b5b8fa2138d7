"""vLLM for CPUs as a system of the benchmarks."""

from __future__ import annotations

import os
import time

from benchmarks.peers.worker import Options, Tokens

_BLOCK_SIZE = 128  # its default on a CPU


class Vllm:
    """LLMEngine, stepped in this process, so that its memory is measured."""

    def __init__(self, options: Options) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # whole GiB; the number of blocks is set below
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        from vllm import LLM

        llm = LLM(
            options.model,
            dtype=options.dtype,
            skip_tokenizer_init=True,
            max_model_len=options.longest,
            block_size=_BLOCK_SIZE,
            # The last block of every request may be partly filled; vLLM keeps block 0.
            num_gpu_blocks_override=options.num_tokens // _BLOCK_SIZE + options.num_requests + 1,
            max_num_seqs=options.num_requests,
            max_num_batched_tokens=max(options.max_batched_tokens, options.longest),
        )
        self.engine = llm.llm_engine
        self.next_id = 0

    def run(
        self,
        prompts: Tokens,
        max_tokens: list[int],
        batch_size: int | None,  # noqa: ARG002  (it batches as it likes)
    ) -> tuple[Tokens, list[float]]:
        """Run all requests at once."""
        from vllm import SamplingParams

        start = self.next_id
        for prompt, n in zip(prompts, max_tokens, strict=True):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            self.engine.add_request(str(self.next_id), {"prompt_token_ids": prompt}, params)
            self.next_id += 1
        tokens: Tokens = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                i = int(output.request_id) - start
                first[i] = first[i] or time.perf_counter()
                tokens[i] = [*output.outputs[0].token_ids]
        return tokens, first
