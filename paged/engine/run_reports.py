"""Run the requests for reports of one call."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from ..requests.request import Outbox, Prompt, RequestGroup
from ..text.prompt_parser import PromptParser
from .core import EngineCore
from .embedding import Embedder, EmbeddingOptions, EmbeddingSpec
from .generation import Progress, call_with_error_prefix, progress_bar, queue
from .model_text import ModelText
from .reports import ReportSpec, ReportTerms, new_report

T = TypeVar("T")


def run_reports(
    core: EngineCore,
    name: str,
    specs: Sequence[ReportSpec[T]],
    terms: ReportTerms,
    *,
    use_tqdm: Progress,
) -> list[T]:
    """Compute prompts without generating tokens. Return the output of each prompt's report, in order.

    name: the name of the argument that holds the prompts, for error messages.
    """
    groups = list[RequestGroup]()
    outbox = Outbox()
    try:
        for i, spec in enumerate(specs):
            now = core.scheduler.clock()
            given = core.factory, core.next_id(), spec, terms, now
            group = call_with_error_prefix(f"{name}[{i}]", new_report, *given)
            core.register(group, outbox)
            groups.append(group)
        pending = deque(groups)
        num_left = len(groups)
        with progress_bar(use_tqdm, num_left, "Computing", "prompt") as bar:
            while num_left:
                queue(core, pending)
                core.step()
                num_finished = len(outbox.take())
                num_left -= num_finished
                bar.update(num_finished)
    finally:
        for group in groups:
            core.abort(group.request_id)
    return [spec.output(group.samples[0]) for spec, group in zip(specs, groups, strict=True)]


def specs_of(
    text: ModelText, parser: PromptParser, prompts: Sequence[Prompt], options: Sequence[EmbeddingOptions]
) -> list[EmbeddingSpec]:
    """Return the spec of each prompt's embedding. Raises RequestError, which names the prompt."""
    return [
        call_with_error_prefix(f"prompts[{i}]", Embedder(text, parser, own).spec, prompt)
        for i, (prompt, own) in enumerate(zip(prompts, options, strict=True))
    ]
