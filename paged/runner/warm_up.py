"""Warm-up: run steps before the first request, to compile kernels and to know that the model runs."""

from __future__ import annotations

from itertools import pairwise

from tqdm import tqdm

from ..base.errors import PagedError, RankError, ResourceError, UnsupportedModelError
from ..device.devices import failure_of, is_shortage
from ..options.sampling_params import SamplingParams
from ..requests.request import Request, RequestInputs
from ..scheduler.schedule import Schedule
from .model_runner import ModelRunner

# Together these launch every kernel that sampling may need.
EVERY_WAY_TO_SAMPLE = (
    SamplingParams(temperature=0.0),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(top_p=0.9),
    SamplingParams(top_n_sigma=1.0),
)


REHEARSED_TOKENS = (
    8  # enough for a mixture to choose several experts, and no more than reads the weights once
)


def warm_up(runner: ModelRunner) -> int:
    """Launch every kernel that steps need, so that no request waits for a compilation.

    Backends that do not compile at launch run one small step, so that a model whose steps raise fails at the
    start instead of at the first request.

    Returns the number of kernels compiled. Writes into the KV cache, so no request may hold blocks. Triton
    stores compiled kernels on disk for the next start.

    Raises UnsupportedModelError or ResourceError if a step raises, EngineDeadError if the GPU or a process of
    the model has failed.
    """
    try:
        return _run_steps(runner)
    except Exception as error:
        runner.discard()
        dead = runner.recover(error)
        if dead is not None and (isinstance(error, RankError) or failure_of(runner.device) is not None):
            raise dead from error
        if isinstance(error, PagedError):
            raise
        raise _explained(runner, error) from error


def _explained(runner: ModelRunner, error: Exception) -> PagedError:
    """Return the error of a model that is loaded, but whose first step has raised."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if is_shortage(error):
        return ResourceError(
            f"no memory for a step beside the weights and the KV cache on {runner.device}: lower num_blocks "
            f"or max_num_batched_tokens, or end other processes there; {text}"
        )
    return UnsupportedModelError(
        f"{runner.config.model}: the weights are loaded, but a step of {runner.model_config.architecture} in "
        f"{runner.describe()} fails, so no request could be computed; report it with config.json, or try "
        f"another dtype or attention_backend; {text}"
    )


def _run_steps(runner: ModelRunner) -> int:
    kernels = runner.model.kernels
    num_blocks = runner.kv_cache.num_blocks
    if not kernels.compiles_at_launch:
        _run(runner, _end_of_a_prompt(runner, REHEARSED_TOKENS, REHEARSED_TOKENS, EVERY_WAY_TO_SAMPLE[0]))
        _capture_graphs(runner)
        return 0
    long = 2 * kernels.split_keys  # so that attention splits its keys
    with tqdm(desc="Compiling kernels", unit="kernel", delay=1.0) as bar, kernels.listening(bar.update):
        _run(runner, _end_of_a_prompt(runner, long, runner.sizes.max_step_tokens, EVERY_WAY_TO_SAMPLE[0]))
        for params in EVERY_WAY_TO_SAMPLE:
            _run(runner, _end_of_a_prompt(runner, long, 1, params))
        if runner.config.speculation is not None:
            _run(runner, _with_a_draft(_end_of_a_prompt(runner, long, 2, EVERY_WAY_TO_SAMPLE[0])))
        if num_blocks > 1:
            runner.execute(Schedule(copies=[(0, num_blocks - 1)]))
        _capture_graphs(runner)
        return int(bar.n)


def _capture_graphs(runner: ModelRunner) -> None:
    for graphs, kv_cache in runner.graphs_over(runner.kv_cache):
        graphs.capture_for_good(kv_cache)


def _run(runner: ModelRunner, schedule: Schedule) -> None:
    """Run a step, and the same tokens through the draft model if there is one."""
    runner.execute(schedule)
    if runner.draft_model is not None:
        runner.draft_model.rehearse(schedule, runner.kv_cache.draft)


def _with_a_draft(schedule: Schedule) -> Schedule:
    """Take the last of a prompt's two new tokens for a draft."""
    if schedule.num_new_tokens == [2]:
        schedule.num_new_tokens = [1]
        schedule.num_decode_tokens = 1
        schedule.add_drafts({0: [0]})
    return schedule


def _end_of_a_prompt(
    runner: ModelRunner, most_tokens: int, max_new_tokens: int, params: SamplingParams
) -> Schedule:
    """Schedule the last tokens of a prompt of so many tokens, or of as many as fit."""
    sizes = runner.sizes
    blocks = sizes.new_block_manager(runner.kv_cache.num_blocks)
    length = blocks.longest_fit(min(most_tokens, max(1, sizes.max_model_len - 1)))
    if not length:
        return Schedule()  # the pool is too small for any request
    num_new = min(length, max_new_tokens, sizes.max_step_tokens)
    # Several tokens, for which a router chooses several experts.
    prompt = [i % runner.model_config.vocab_size for i in range(length)]
    request = Request(RequestInputs(prompt_token_ids=prompt, params=params, max_total_tokens=length + 1))
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
