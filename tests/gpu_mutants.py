"""Mutation tests of the CUDA path: seeded bugs that the engine's steps on fake devices must show.

    python -m tests.gpu_mutants          # all of them: a table, and exit code 1 if one survives
    python -m tests.gpu_mutants item     # only mutants with one of these words in their names
    python -m tests.gpu_mutants --share 1   # one of SHARES shares; the tests try the first

A mutant replaces one text, which must occur exactly once, by another. Its case runs in a process that imports
the changed module. A bug shows as an error, or as a row or a place that `kernels/gpu/STEPS.md` does not have.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import linecache
import multiprocessing
import sys
import time
from typing import Any, NamedTuple

# What is imported here, the processes of all mutants share.
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config  # noqa: F401

from tests.mutants import ROOT, planted
from tests.support.fake_cuda import load_guard

SHARES = 12


class Mutant(NamedTuple):
    """A bug: in `file`, `old` becomes `new`. The case of `tests.steps` that must show it."""

    name: str
    case: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "weights are quantised on the CPU",
        "weights int4",
        "model/weights/gpu_codes",
        "dtype=torch.uint8, device=weight.device",
        "dtype=torch.uint8",
    ),
    Mutant(
        "the order of inputs stays on the CPU",
        "weights gptq",
        "model/weights/gpu_codes",
        "weight.order.to(weight.stored.device)",
        "weight.order",
    ),
    Mutant(
        "a tensor of seeds is made on the CPU",
        "base",
        "sampling/parameters",
        "self._seeds.tensor,",
        "torch.from_numpy(self._seeds.numbers),",
    ),
    Mutant(
        "pairs of blocks to copy stay on the CPU",
        "fork",
        "runner/part_runner",
        "cache.copy_blocks(copies.tensor, kernels)",
        "cache.copy_blocks(torch.from_numpy(copies.numbers), kernels)",
    ),
    Mutant(
        "host memory for swapping is pageable",
        "preemption by swap",
        "model/cache/kv_cache",
        'pinned = device.type == "cuda" and num_host_blocks > 0',
        "pinned = False",
    ),
    Mutant(
        "a list is an index",
        "logprobs",
        "sampling/sampler",
        "return self.kernels.take_rows(logits, self._asked_rows.tensor, self._raw)",
        "return logits[self.asked]",
    ),
    Mutant(
        "item() in the sampler",
        "base",
        "sampling/sampler",
        "self._tokens = download.get(tokens)",
        "[token.item() for token in tokens]\n        self._tokens = download.get(tokens)",
    ),
    Mutant(
        "a truth value is read in a greedy step",
        "temperature 0",
        "sampling/sampler",
        "if batch.parameters is None and not (is_edited or batch.asked):",
        "if batch.parameters is None and not (is_edited or batch.asked) and (best[1] < 9).all():",
    ),
    Mutant(
        "a layer uploads, without a wait",
        "base",
        "model/decoder",
        "residual: Tensor = self.embedding(batch.token_ids)",
        "residual = self.embedding(batch.token_ids)\n"
        "        torch.zeros(1).to(residual.device, non_blocking=True)",
    ),
    Mutant(
        "the upload of a step blocks",
        "base",
        "device/transfers",
        "memory = staging.to(self.device, non_blocking=True)",
        "memory = staging.to(self.device)",
    ),
    Mutant(
        "a step's buffers are pageable",
        "base",
        "device/transfers",
        ", pin_memory=True)",
        ")",
    ),
    Mutant(
        "the seats of tokens are uploaded after the draw",
        "base",
        "runner/batches/seats",
        "self.last_tokens.index_copy_(0, step.sampled_seats.tensor, tokens)",
        "self.last_tokens.index_copy_(0, torch.arange(len(tokens)).to(tokens.device), tokens)",
    ),
    Mutant(
        "a step launches outside the device context",
        "cuda:1 while cuda:0 is current",
        "runner/model_runner",
        "with self._on_device, TrustedContents():\n            try:",
        "with TrustedContents():\n            try:",
    ),
    Mutant(
        "a norm is launched twice",
        "base",
        "model/decoder",
        "        out = self.mlp(hidden)\n",
        "        hidden = add_and_norm(hidden, residual, self.before_mlp)\n        out = self.mlp(hidden)\n",
    ),
    Mutant(
        "attention is planned for each layer",
        "base",
        "model/layers/attention",
        "plan = queries.plans.get(key := (*self.plan_key, query.stride(0), table.shape[1]))",
        "plan = queries.plans.get(key := (self.layer, query.stride(0), table.shape[1]))",
    ),
    Mutant(
        "the host reads how many rows experts have",
        "model mixtral",
        "kernels/gpu/experts/grouped_linear",
        "num_rows = len(x) if sources is None else len(sources)",
        "num_rows = int(offsets[-1])",
    ),
    Mutant(
        "each expert has a product of its own",
        "model mixtral",
        "model/weights/forms",
        "if not kernels.has_grouped_linear or len(plain) < len(forms):",
        "if kernels.has_grouped_linear or len(plain) < len(forms):",
    ),
    Mutant(
        "each expert in codes has a product of its own",
        "weights of experts int8",
        "model/weights/gpu_codes",
        "if len(alike) < len(forms):",
        "if alike:",
    ),
    Mutant(
        "shares of experts are made on the CPU",
        "model mixtral",
        "kernels/gpu/experts/route",
        "weights = logits.new_empty(len(logits), options.num_chosen)",
        "weights = torch.empty(len(logits), options.num_chosen)",
    ),
    Mutant(
        "offsets of experts are made on the CPU",
        "model mixtral",
        "kernels/gpu/experts/sort_by_expert",
        "offsets = experts.new_empty(num_experts + 1)",
        "offsets = torch.empty(num_experts + 1, dtype=torch.int32)",
    ),
    Mutant(
        "rows are sorted by torch",
        "model mixtral",
        "kernels/gpu/backend",
        "from .experts.sort_by_expert import sort_by_expert",
        "from ..plain.backend import sort_by_expert",
    ),
]


def found_in(case: str, file: str | None = None, text: str = "") -> list[str]:
    """Return what is wrong in the steps of a case if a file of the package has this text."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_look, args=(there, case, file, text))
    process.start()
    there.close()
    try:
        found: list[str] = here.recv()
    except EOFError as error:
        raise RuntimeError(f"the process of case {case!r} ended without a result") from error
    process.join()
    return found


def _look(results: Any, case: str, file: str | None, text: str) -> None:
    if file is not None:
        plant(f"paged.{file.replace('/', '.')}", text)
    from tests import steps

    (chosen,) = (known for known in steps.CASES if known.name == case)
    reported, kept = steps.report([chosen]), steps.TABLE.read_text()
    errors = [error.strip().splitlines()[-1] for error in steps.errors(reported)]
    results.send(
        errors + [line for line in steps.rows(reported) + steps.places(reported) if line not in kept]
    )


def plant(module: str, text: str) -> None:
    """Have this process import a module from another text than its file's."""
    assert not any(name == "paged" or name.startswith("paged.") for name in sys.modules)
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def get_planted(self: Any, fullname: str) -> Any:
        return compile(text, self.path, "exec") if fullname == module else get_code(self, fullname)

    loader.get_code = get_planted  # type: ignore[method-assign]
    # Triton compiles the source that `inspect` finds.
    path = str(ROOT / f"{module.replace('.', '/')}.py")
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path


def main() -> None:
    """Try every mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--share", type=int, choices=range(SHARES))
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in m.name for word in given.words)]
    texts = [planted(m.file, m.name, m.old, m.new) for m in chosen]
    if given.share is not None:
        chosen = chosen[given.share :: SHARES]
        texts = texts[given.share :: SHARES]
    load_guard()
    for case in dict.fromkeys(mutant.case for mutant in chosen):
        if wrong := found_in(case):
            sys.exit(f"no bug is planted, and {case!r} has {wrong}; is STEPS.md fresh?")
    survivors = []
    for mutant, text in zip(chosen, texts, strict=True):
        before = time.perf_counter()
        found = found_in(mutant.case, mutant.file, text)
        survivors += [] if found else [mutant.name]
        print(
            f"{mutant.name:44} {time.perf_counter() - before:4.1f} s  {(found or ['SURVIVES'])[0]}",
            flush=True,
        )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    sys.exit(f"not caught: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
