"""Compare a ragged batch with the same prompts one at a time: the tokens are equal, the time is not."""

import random
import time

from paged import LLMEngine, SamplingParams

engine = LLMEngine(
    "demo", enable_prefix_caching=False
)  # the second run must not find the first one's prompts
params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

# Prompts of 1 to 200 tokens. A batch pads none of them.
rng = random.Random(0)
prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(rng.randint(1, 200))]} for _ in range(24)]

engine.generate(prompts, params, use_tqdm=False)  # the first steps of each size compile what they need

started = time.perf_counter()
together = engine.generate(prompts, params, use_tqdm=False)
batch_s = time.perf_counter() - started

started = time.perf_counter()
alone = [engine.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
alone_s = time.perf_counter() - started

for one, other in zip(together, alone, strict=True):
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
num_tokens = sum(len(output.outputs[0].token_ids) for output in together)
print(f"together {num_tokens / batch_s:,.0f} tokens/s, one at a time {num_tokens / alone_s:,.0f} tokens/s")
print(f"{alone_s / batch_s:.1f} times as fast, and every token is the same")
