"""Cached prefixes that a user keeps: pinned in memory, or saved to a safetensors file and loaded again.

A file holds blocks, their tokens, and the predecessor of each; for models whose layers keep states, also the
snapshots of them, each behind a block. K and V of a draft model are loaded where that is the same.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike, fsencode
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..architectures.config import ModelConfig
from ..architectures.gguf_paths import gguf_files
from ..architectures.hf_config import check_file
from ..base.errors import CheckpointError, RequestError, UsageError
from ..base.interrupts import HeldInterrupts
from ..base.validation import shown
from ..blocks.manager import BlockManager
from ..blocks.pool import BlockId
from ..blocks.prefix_chain import first_digest, sha256_block, short_digest
from ..model.cache.kv_cache import DRAFT
from ..options.sampling_params import SamplingParams
from ..requests.request import Prompt
from ..scheduler.schedule import Schedule
from ..text.prompt_parser import ParsedPrompt
from .core import EngineCore
from .generation import RequestSource, generate_in_order

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest
    from ..runner.executor import Executor

FORMAT = "paged-prefix-2"
_STATES = "states_"  # begins the names of tensors of snapshots
# a saved block: tokens, index of its predecessor, group, namespace, content
Entry = tuple[bytes, int, int, bytes, bytes]


class SavedSnapshots(NamedTuple):
    """The snapshots of states in a file, the least recently used first.

    places: for each snapshot, the index of the saved block after which the state was taken.
    states: the states, [num_layers, num_snapshots, size], by the names of `StateCache`.
    """

    places: list[int]
    states: dict[str, Tensor]


def require_cache(core: EngineCore) -> None:
    """Raise UsageError if there is no prefix cache."""
    if not core.scheduler.block_manager.enable_prefix_caching:
        is_off = core.factory.text.config.state_snapshots == 0
        option = "state_snapshots=0" if is_off else "enable_prefix_caching=False"
        raise UsageError(f"there is no prefix cache: the engine was made with {option}")


def parse(core: EngineCore, prompt: Prompt, lora_request: LoRARequest | None = None) -> ParsedPrompt:
    """Parse a prompt, in the namespace of an adapter's KV if one is given.

    Raises RequestError for what is wrong with either, UsageError if there is no prefix cache.
    """
    require_cache(core)
    return of_adapter(core, core.factory.prompts.parse(prompt), lora_request)


def of_adapter(core: EngineCore, parsed: ParsedPrompt, lora_request: LoRARequest | None) -> ParsedPrompt:
    """Return a prompt in the namespace of an adapter's KV, if one is given."""
    if lora_request is None:
        return parsed
    adapters = core.factory.adapters
    if adapters is None:
        from ..options.lora_request import NO_LORA

        raise RequestError(f"{NO_LORA}, got lora_request {shown(lora_request)}", param="lora_request")
    return replace(parsed, namespace=adapters.namespace_of(lora_request) + parsed.namespace)


def saved_prompt(
    core: EngineCore, prompt: Prompt | None, lora_request: LoRARequest | None
) -> ParsedPrompt | None:
    """Return the prompt that `LLMEngine.save_prefix` is given; None for all cached blocks."""
    if prompt is not None:
        return parse(core, prompt, lora_request)
    require_cache(core)
    if lora_request is not None:
        raise RequestError(
            "lora_request needs a prompt; without one, save_prefix writes the blocks of all adapters",
            param="lora_request",
        )
    return None


def pin(core: EngineCore, prompt: Prompt, lora_request: LoRARequest | None = None) -> int:
    """Compute the uncached part of a prompt, and pin its full blocks; see `LLMEngine.pin_prefix`."""
    parsed = parse(core, prompt, lora_request)
    _check_pin(core, parsed)
    params = SamplingParams(max_tokens=1, temperature=0)
    source = RequestSource([prompt], params, lora_request=lora_request)
    _ = [*generate_in_order(core, source, use_tqdm=False)]
    return pin_cached(core, parsed)


def _check_pin(core: EngineCore, parsed: ParsedPrompt) -> int:
    """Return the number of tokens in a prompt's full blocks. Raises as `pin_cached` does."""
    manager = core.scheduler.block_manager
    size = manager.block_size
    num_full = len(parsed.token_ids) // size * size
    if not num_full:
        raise RequestError(f"the prompt has {len(parsed.token_ids)} tokens and fills no block of {size}")
    if _pin_name(parsed) in manager.pins:
        raise UsageError("this prompt is pinned already")
    return num_full


def pin_cached(core: EngineCore, parsed: ParsedPrompt) -> int:
    """Pin the full blocks of a prompt, which were computed. Return their number of tokens.

    Raises RequestError if they are not cached any more or would leave too little room, UsageError if the
    prompt is pinned already.
    """
    manager = core.scheduler.block_manager
    num_full = _check_pin(core, parsed)
    found = manager.find(parsed.token_ids, parsed.namespace, parsed.contents)
    num_cached = len(found[0]) * manager.block_size
    if num_cached < num_full:
        more = "raise num_blocks" + (" or state_snapshots" if manager.has_states else "")
        raise RequestError(f"of {num_full} tokens only {num_cached} stay cached; {more}")
    name = _pin_name(parsed)
    if not core.scheduler.pin(name, parsed.token_ids, parsed.namespace, core.longest(), parsed.contents):
        raise RequestError(
            f"{num_full} tokens cannot be pinned: the unfinished requests would not fit beside them; "
            "wait for these, or raise num_blocks"
        )
    return num_full


def unpin(core: EngineCore, prompt: Prompt, lora_request: LoRARequest | None = None) -> None:
    """Allow a pinned prompt to be evicted. Raises UsageError if it is not pinned."""
    unpin_parsed(core, parse(core, prompt, lora_request))


def unpin_parsed(core: EngineCore, parsed: ParsedPrompt) -> int:
    """Allow a pinned prompt to be evicted; see `unpin`. Return the number of tokens in its full blocks."""
    manager = core.scheduler.block_manager
    name = _pin_name(parsed)
    if name not in manager.pins:
        raise UsageError(f"this prompt is not pinned; {len(manager.pins)} others are")
    manager.unpin(name)
    return len(parsed.token_ids) // manager.block_size * manager.block_size


def _pin_name(prompt: ParsedPrompt) -> str:
    contents = [content.sha256 for content in prompt.contents]
    return hashlib.sha256(repr((prompt.namespace, prompt.token_ids, contents)).encode()).hexdigest()


# Files


def move_states(core: EngineCore) -> None:
    """Move the states whose moves wait for the next step, so that snapshots can be read and written."""
    if core.scheduler.states is None:
        return
    schedule = Schedule(scheduled_time=core.scheduler.clock())
    core.scheduler.states.take(schedule)
    if not schedule.state_moves:
        return
    with HeldInterrupts():
        try:
            core.runner.execute(schedule)
        except BaseException as error:
            core.recover(error)  # a snapshot whose move is lost must not be found
            raise


def fingerprint(
    directory: Path, config: ModelConfig, dtype: torch.dtype, quantization: str | None, kv_dtype: torch.dtype
) -> str:
    """Return a sha256 of all that KV depends on besides the tokens: config, dtypes and weights."""
    config = replace(config, max_model_len=None)
    digest = hashlib.sha256(f"{config}/{dtype}/{quantization}/{kv_dtype}".encode())
    for file in sorted([*directory.glob("*.safetensors"), *map(directory.joinpath, gguf_files(directory))]):
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def save(
    path: str | Path,
    manager: BlockManager,
    executor: Executor,
    fingerprint: str,
    prompt: ParsedPrompt | None,
    draft_fingerprint: str | None = None,
) -> int:
    """Write all cached blocks, or the blocks of a prompt, to a file. Return how many.

    Raises RequestError if no blocks are cached, or if the file cannot be written.
    """
    path = _check_path(path)
    pool = manager.pool
    known = pool.known_blocks()
    if prompt is not None:
        found = manager.find(prompt.token_ids, prompt.namespace, prompt.contents)
        wanted = {block for blocks in found for block in blocks}
        known = [entry for entry in known if entry[0] in wanted]
    index = {0: -1}
    kept = list[tuple[BlockId, int]]()
    for block, group in known:
        # A block whose predecessor was evicted can never be found.
        if pool.predecessor(block) in index:
            index[pool.serial(block)] = len(kept)
            kept.append((block, group))
    known = kept
    if not known:
        raise RequestError("no full block of this prompt is cached" if prompt else "no block is cached")
    blocks = [block for block, _ in known]
    groups = [group for _, group in known]
    tensors = {
        **{name: tensor.contiguous() for name, tensor in executor.read_blocks(blocks, groups).items()},
        "token_ids": torch.tensor([array("i", pool.tokens(b)).tolist() for b in blocks], dtype=torch.int32),
        "predecessors": torch.tensor([index[pool.predecessor(b)] for b in blocks]),
        "groups": torch.tensor(groups),
    }
    if manager.snapshots is not None:
        kept_states = [(index[serial], slot) for serial, slot in manager.snapshots.items() if serial in index]
        tensors["snapshots"] = torch.tensor([place for place, _ in kept_states], dtype=torch.int64)
        states = executor.read_states([slot for _, slot in kept_states])
        tensors |= {_STATES + name: tensor.contiguous() for name, tensor in states.items()}
    if of_draft := [name for name in tensors if name.startswith(DRAFT)]:
        drafted = torch.tensor([block in pool.drafted for block in blocks])
        for name in of_draft:
            tensors[name][:, ~drafted] = 0  # of whatever was there before
        tensors["drafted"] = drafted
    namespaces = {i: pool.namespace(b).hex() for i, b in enumerate(blocks) if pool.namespace(b)}
    metadata = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "block_size": str(pool.block_size),
        "namespaces": json.dumps(namespaces),
    }
    contents = {i: pool.content(b).hex() for i, b in enumerate(blocks) if pool.content(b)}
    if contents:
        metadata["contents"] = json.dumps(contents)
    if draft_fingerprint is not None:
        metadata["draft_fingerprint"] = draft_fingerprint
    try:
        unfinished = path.with_name(path.name + ".part")
        save_file(tensors, unfinished, metadata)
        unfinished.replace(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be written: {error}") from error
    return len(blocks)


def load(
    path: str | Path,
    manager: BlockManager,
    executor: Executor,
    fingerprint: str,
    draft_fingerprint: str | None = None,
) -> int:
    """Load the blocks of a file into the cache until no block is free. Return how many.

    Raises CheckpointError, and loads nothing, if the file is damaged or was made for another engine.
    """
    path = _check_path(path)
    tensors, metadata = _read(path)
    wanted = {"format": FORMAT, "fingerprint": fingerprint, "block_size": str(manager.block_size)}
    for name, value in wanted.items():
        if metadata.get(name) != value:
            what = "another model, other weights or another dtype" if name == "fingerprint" else name
            raise CheckpointError(
                f"{path} was saved for {what}: its {name} is {metadata.get(name)!r}, this engine's {value!r}"
            )
    # Of no block: they tell what a block is.
    formats = executor.read_blocks([], [])
    own = {name: tensor for name, tensor in formats.items() if not name.startswith(DRAFT)}
    entries = _entries(path, tensors, metadata, own, manager)
    saved = {name: tensors[name] for name in own}
    drafted: list[bool] = []
    if len(formats) > len(own) and metadata.get("draft_fingerprint") == draft_fingerprint:
        of_draft = {name: tensor for name, tensor in formats.items() if name not in own}
        drafted = _drafted(path, tensors, of_draft, len(entries))
        saved |= {name: tensors[name] for name in of_draft}
    snapshots = None
    if manager.snapshots is not None:
        snapshots = _snapshots(path, tensors, executor.read_states([]), tensors["groups"].tolist())
    return _put(entries, saved, drafted, snapshots, manager, executor)


def _put(
    entries: list[Entry],
    saved: dict[str, Tensor],
    drafted: list[bool],
    snapshots: SavedSnapshots | None,
    manager: BlockManager,
    executor: Executor,
) -> int:
    """Copy entries that are not cached yet into free blocks, until none is free. Return how many.

    drafted: which have K and V of the draft model; none if those are not loaded.
    snapshots: the states behind them; None if layers keep none.
    """
    pool = manager.pool
    loaded: list[BlockId] = []
    known: list[BlockId | None] = []
    digests: list[bytes] = []
    try:
        for i, (tokens, predecessor, group, namespace, content) in enumerate(entries):
            previous = first_digest(namespace) if predecessor < 0 else digests[predecessor]
            digests.append(sha256_block(previous, tokens + content))
            parent = None if predecessor < 0 else known[predecessor]
            if (predecessor >= 0 and parent is None) or not pool.num_free:
                known.append(None)
                continue
            allocated = pool.allocate(1)
            assert allocated is not None, "a free block was not allocated"
            loaded += allocated
            # Filled before it can be found: the copy may fail or be interrupted.
            is_drafted = bool(drafted) and drafted[i]
            written = {name: each[:, i] for name, each in saved.items()}
            if not is_drafted:
                written = {name: each for name, each in written.items() if not name.startswith(DRAFT)}
            executor.write_block(allocated[0], group, written)
            if is_drafted:
                pool.drafted.update(allocated)
            serial = 0 if parent is None else pool.serial(parent)
            digest = short_digest(digests[i])
            known.append(pool.adopt(allocated[0], digest, tokens, serial, namespace, group, content))
            if known[-1] != allocated[0]:
                pool.free([loaded.pop()])  # it is cached already
        if snapshots is not None:
            _put_snapshots(snapshots, known, manager, executor)
    finally:
        pool.free(reversed(loaded))
    return len(loaded)


def _put_snapshots(
    saved: SavedSnapshots, known: list[BlockId | None], manager: BlockManager, executor: Executor
) -> None:
    """Copy snapshots behind cached blocks into slots that are not used, the most recently used ones.

    known: the cached block of each entry; None: it is not loaded.
    """
    snapshots = manager.snapshots
    assert snapshots is not None, "the engine has snapshots"
    blocks = [known[place] for place in saved.places]
    serials = [0 if block is None else manager.pool.serial(block) for block in blocks]
    wanted = [i for i, serial in enumerate(serials) if serial and not snapshots.has(serial)]
    for i in wanted[max(0, len(wanted) - snapshots.num_spare) :]:
        slot = snapshots.take()
        assert slot is not None, "a spare snapshot has no slot"
        try:
            executor.write_state(slot, {name: tensor[:, i] for name, tensor in saved.states.items()})
        except BaseException:
            snapshots.release(slot)
            raise
        snapshots.keep(serials[i], slot)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    check_file(path, sys.maxsize)
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as saved prefixes: {error}") from error


def _entries(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    formats: Mapping[str, Tensor],
    manager: BlockManager,
) -> list[Entry]:
    """Return the checked entry of each block in the file. formats: the tensors of no block."""
    try:
        token_ids, *numbers = (tensors[name] for name in ("token_ids", "predecessors", "groups"))
        saved = {name: tensors[name] for name in formats}
        namespaces, contents = (
            {int(i): bytes.fromhex(text) for i, text in json.loads(each).items()}
            for each in (metadata["namespaces"], metadata.get("contents", "{}"))
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    num_blocks = token_ids.shape[:1].numel()
    is_sound = _have_blocks(saved, formats, num_blocks)
    predecessors, groups = (tensor.tolist() for tensor in numbers)
    sound = (
        is_sound
        and list(token_ids.shape) == [num_blocks, manager.block_size]
        and token_ids.dtype == torch.int32
        and all(t.shape == (num_blocks,) and t.dtype == torch.int64 for t in numbers)
        and all(-1 <= previous < i for i, previous in enumerate(predecessors))
        and all(0 <= group < len(manager.windows) for group in groups)
        and all(previous < 0 or groups[previous] == groups[i] for i, previous in enumerate(predecessors))
    )
    if not sound:
        raise CheckpointError(f"{path} is damaged: its tensors do not agree with each other or this cache")
    tokens = [array("i", row).tobytes() for row in token_ids.tolist()]
    salts = [namespaces.get(i, b"") for i in range(num_blocks)]
    of_blocks = [contents.get(i, b"") for i in range(num_blocks)]
    return list(zip(tokens, predecessors, groups, salts, of_blocks, strict=True))


def _drafted(
    path: Path, tensors: dict[str, Tensor], formats: Mapping[str, Tensor], num_blocks: int
) -> list[bool]:
    """Return which blocks of a file have K and V of the draft model. Raises CheckpointError."""
    saved = {name: tensors.get(name, torch.empty(0)) for name in formats}
    drafted = tensors.get("drafted", torch.empty(0))
    is_sound = drafted.dtype == torch.bool and drafted.shape == (num_blocks,)
    if not (is_sound and _have_blocks(saved, formats, num_blocks)):
        raise CheckpointError(
            f"{path} is damaged: its tensors of the draft model do not agree with this cache"
        )
    found: list[bool] = drafted.tolist()
    return found


def _snapshots(
    path: Path, tensors: dict[str, Tensor], formats: Mapping[str, Tensor], groups: list[int]
) -> SavedSnapshots:
    """Return the checked snapshots in a file. formats: the tensors of none. groups: of the entries."""
    places = tensors.get("snapshots", torch.empty(0))
    saved = {name: tensors.get(_STATES + name, torch.empty(0)) for name in formats}
    is_sound = places.dtype == torch.int64 and places.dim() == 1
    if not (
        is_sound
        and _have_blocks(saved, formats, len(places))
        and all(0 <= place < len(groups) and groups[place] == 0 for place in places.tolist())
    ):
        raise CheckpointError(f"{path} is damaged: its tensors of states do not agree with this cache")
    return SavedSnapshots(places.tolist(), saved)


def _have_blocks(saved: Mapping[str, Tensor], formats: Mapping[str, Tensor], num_blocks: int) -> bool:
    """Return whether tensors of a file are so many blocks of these formats."""
    return all(
        saved[name].dtype == tensor.dtype
        and saved[name].shape == (tensor.shape[0], num_blocks, tensor.shape[2])
        for name, tensor in formats.items()
    )


def _check_path(path: Any) -> Path:
    if not isinstance(path, str | PathLike):
        raise RequestError(f"path must be a string or a Path, got {path!r}")
    try:
        fsencode(path)
    except UnicodeEncodeError as error:
        raise RequestError(f"path cannot be the name of a file: {path!r}") from error
    return Path(path)
