"""Warm-up: compile the kernels of a model before the first request."""

from __future__ import annotations

from itertools import pairwise

from tqdm import tqdm

from ..requests.request import Request, RequestInputs
from ..sampling_params import SamplingParams
from ..scheduler.schedule import Schedule
from .model_runner import ModelRunner

# Together these launch every kernel that sampling may need.
EVERY_WAY_TO_SAMPLE = (
    SamplingParams(temperature=0.0),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(top_p=0.9),
    SamplingParams(top_n_sigma=1.0),
)


def warm_up(runner: ModelRunner) -> int:
    """Launch every kernel that steps need, so that no request waits for a compilation.

    Returns the number of kernels compiled: 0 for backends that do not compile at launch. Writes into the KV
    cache, so no request may hold blocks. Triton keeps compiled kernels on disk, for a faster next start.
    """
    kernels = runner.model.kernels
    num_blocks = runner.kv_cache.num_blocks
    if not kernels.compiles_at_launch:
        return 0
    with tqdm(desc="Compiling kernels", unit="kernel", delay=1.0) as bar, kernels.listening(bar.update):
        _run(runner, _end_of_a_prompt(runner, runner.sizes.max_step_tokens, EVERY_WAY_TO_SAMPLE[0]))
        for params in EVERY_WAY_TO_SAMPLE:
            _run(runner, _end_of_a_prompt(runner, 1, params))
        if num_blocks > 1:
            runner.execute(Schedule(copies=[(0, num_blocks - 1)]))
        return int(bar.n)


def _run(runner: ModelRunner, schedule: Schedule) -> None:
    """Run a step, and the same tokens through the draft model if there is one."""
    runner.execute(schedule)
    if runner.draft_model is not None:
        runner.draft_model.rehearse(schedule, runner.kv_cache.draft)


def _end_of_a_prompt(runner: ModelRunner, max_new_tokens: int, params: SamplingParams) -> Schedule:
    """Schedule the last tokens of a prompt that is long enough for attention to split its keys."""
    sizes = runner.sizes
    blocks = sizes.new_block_manager(runner.kv_cache.num_blocks)
    split = runner.model.kernels.split_keys
    length = blocks.longest_fit(min(2 * split, max(1, sizes.max_model_len - 1)))
    if not length:
        return Schedule()  # the pool is too small for any request
    num_new = min(length, max_new_tokens)
    request = Request(
        RequestInputs(prompt_token_ids=[0] * length, params=params, max_total_tokens=length + 1)
    )
    request.num_computed_tokens = length - num_new
    request.blocks = blocks.open(request.token_ids)
    blocks.start(request.blocks, [[] for _ in blocks.windows])
    # In the steps of a real prompt, between which blocks leave the windows.
    step = sizes.max_step_tokens
    for start, end in pairwise([*range(0, length - num_new, step), length - num_new, length]):
        assert blocks.grow(request.blocks, start, end, []), "no room for what fits"
    request.seat = 0
    schedule = Schedule(newcomers=[request])
    schedule.add(request, num_new)
    schedule.sample(request, 0)
    return schedule
