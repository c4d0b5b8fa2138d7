"""transformers as a system of the benchmarks, and as the judge of all others."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.worker import Options, Tokens, in_batches

_STATIC_BATCH = 16  # requests that generate() pads together by default


def load_model(options: Options) -> Any:
    """Load the model with its default attention (SDPA) and without EOS."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Generate:
    """generate(): padded batches of prompts of similar length, each as long as its longest output."""

    def __init__(self, options: Options) -> None:
        self.model = load_model(options)

    def run(
        self, prompts: Tokens, max_tokens: list[int], batch_size: int | None
    ) -> tuple[Tokens, list[float]]:
        """Run one batch after the other."""
        tokens: Tokens = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        for batch in in_batches(prompts, batch_size or _STATIC_BATCH):
            rows = [torch.tensor(prompts[i]) for i in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
            lengths = torch.tensor([len(row) for row in rows])
            clock = _FirstToken()
            out = self.model.generate(
                ids,
                attention_mask=(torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long(),
                max_new_tokens=max(max_tokens[i] for i in batch),
                do_sample=False,
                stopping_criteria=[clock],
            )
            for i, row in zip(batch, out[:, ids.shape[1] :].tolist(), strict=True):
                tokens[i] = row[: max_tokens[i]]
                first[i] = clock.at
        return tokens, first


class _FirstToken:
    """A stopping criterion that never stops and records the time of its first call."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(ids), dtype=torch.bool)


class GenerateBatch:
    """Continuous batching, each request with its own max_new_tokens."""

    def __init__(self, options: Options) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        # A pool that fits the workload. The default takes most of the free memory, and writes to it at the
        # start.
        batching = ContinuousBatchingConfig(
            page_size=options.block_size,
            num_blocks=options.num_tokens // options.block_size + 2 * options.num_requests,
            max_batch_tokens=options.max_batched_tokens,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1)
        self.manager = load_model(options).init_continuous_batching(
            generation_config=greedy, continuous_batching_config=batching
        )
        self.manager.start()

    def run(
        self,
        prompts: Tokens,
        max_tokens: list[int],
        batch_size: int | None,  # noqa: ARG002  (it batches as it likes)
    ) -> tuple[Tokens, list[float]]:
        """Run all requests at once."""
        found: dict[str, Any] = {}
        for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True)):
            self.manager.add_request(
                prompt, request_id=str(i), max_new_tokens=n, eos_token_id=-1, record_timestamps=True
            )
        while len(found) < len(prompts):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                found[result.request_id] = result
            assert result is not None or self.manager.is_running(), "continuous batching stopped"
        outputs = [found[str(i)] for i in range(len(prompts))]
        return [output.generated_tokens for output in outputs], [output.timestamps[0] for output in outputs]


class Judge:
    """The model in float32, which judges the tokens of all ways."""

    def __init__(self, options: Options) -> None:
        self.model = load_model(options)

    @torch.inference_mode()
    def gaps(self, prompts: Tokens, tokens: Tokens) -> list[float]:
        """Return how far each token's logit is below the best one, in standard deviations of the logits.

        0 for every token means that these are the greedy tokens. In another precision a near tie may fall the
        other way; the tokens after it are judged given their actual prefix. A random token is about 4 away.
        """
        found: list[float] = []
        for prompt, out in zip(prompts, tokens, strict=True):
            ids = torch.tensor([prompt + out])
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(out)[:, None])[:, 0]
            found += ((logits.max(1).values - chosen) / logits.std(1)).tolist()
        return found
