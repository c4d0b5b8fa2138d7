"""Prompts whose blocks stay in the prefix cache, whoever needs memory."""

from __future__ import annotations

import hashlib

from ..errors import RequestError, UsageError
from ..requests.request import Prompt
from ..sampling_params import SamplingParams
from ..text.prompt_parser import ParsedPrompt
from .core import EngineCore
from .generation import Rows, in_order


def pin(core: EngineCore, prompt: Prompt) -> int:
    """Compute a prompt where needed, and pin its full blocks; see `LLMEngine.pin_prefix`."""
    manager, parsed = core.scheduler.block_manager, core.factory.prompts.parse(prompt)
    name, size = _name(parsed), manager.block_size
    num_full = len(parsed.token_ids) // size * size
    if not num_full:
        raise RequestError(f"the prompt has {len(parsed.token_ids)} tokens and fills no block of {size}")
    if name in manager.pins:
        raise UsageError("this prompt is pinned already")
    params = SamplingParams(max_tokens=1, temperature=0)
    rows = Rows([prompt], params, priority=None, tenant="", timeout_s=None)
    _ = [*in_order(core, rows, use_tqdm=False)]
    num_cached = len(manager.find(parsed.token_ids, parsed.namespace)[0]) * size
    if num_cached < num_full:
        raise RequestError(f"of {num_full} tokens only {num_cached} stay cached; raise num_blocks")
    if not core.scheduler.pin(name, parsed.token_ids, parsed.namespace):
        raise RequestError(
            f"{num_full} tokens cannot be pinned: the unfinished requests would not fit beside them; "
            "wait for these, or raise num_blocks"
        )
    return num_full


def unpin(core: EngineCore, prompt: Prompt) -> None:
    """Let go of a pinned prompt. Raises UsageError if it is not pinned."""
    manager, name = core.scheduler.block_manager, _name(core.factory.prompts.parse(prompt))
    if name not in manager.pins:
        raise UsageError(f"this prompt is not pinned; {len(manager.pins)} others are")
    manager.unpin(name)


def _name(prompt: ParsedPrompt) -> str:
    return hashlib.sha256(repr((prompt.namespace, prompt.token_ids)).encode()).hexdigest()
