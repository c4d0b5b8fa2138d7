"""DraftModel: a second model that guesses the next tokens, with K and V in the blocks of the requests."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..architectures.config import ModelConfig
from ..base.errors import CheckpointError, ConfigError, UnsupportedModelError, UsageError
from ..blocks.manager import BlockManager
from ..device.transfers import Sent, Transfers, Upload
from ..drafting.drafter import Draft
from ..kernels.checks import TrustedContents
from ..model.cache.kv_cache import KVCache
from ..options.sampling_params import SamplingParams
from ..requests.request import Request, RequestInputs, SamplingState
from ..sampling.sampler import Draw, Sampler
from ..scheduler.schedule import Schedule
from .draft_sizes import draft_sizes
from .load import load_model, new_kernels, open_model
from .passes import compute, new_batches, new_graphs
from .plan import IN_SEAT, ComputedPart, SeatChange
from .sizes import Sizes

if TYPE_CHECKING:
    from ..sampling.seat_parameters import SeatParameters
    from .decode_graphs import DecodeGraphs
    from .step_graphs import StepGraphs

MOST_ROWS = 64  # of logits in a pass that computes several tokens of a request
# The parameters by which a guess is drawn as the token is: those that depend on no earlier token.
DRAWN_BY = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma"),
    *("logit_bias", "allowed_token_ids"),
)


class DraftCheckpoint(NamedTuple):
    """The checkpoint of a draft model."""

    directory: Path
    config: ModelConfig


@contextmanager
def naming_draft_model() -> Iterator[None]:
    """Add the option that names the draft model to errors raised inside this context."""
    try:
        yield
    except (ConfigError, CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"speculative_config['model']: {error}") from error


def with_draft(sizes: Sizes, device: torch.device, draft: DraftCheckpoint) -> Sizes:
    """Return the sizes of an engine, extended by the sizes of its draft model.

    Raises ConfigError, CheckpointError or UnsupportedModelError if the draft model cannot be loaded. Only the
    headers of its weights are read.
    """
    with naming_draft_model():
        own = draft_sizes(sizes, draft.config, draft.directory)
        kernels = new_kernels(own, device, checked=False)
        with open_model(own, draft.config, device, draft.directory, kernels):
            pass
    return replace(sizes, draft=own)


@dataclass(slots=True)
class _Known:
    """What the draft model remembers of a request.

    drawing: a request whose parameters draw the guesses.
    num_tokens: how many tokens the request had when its guesses were last computed.
    guesses: the guesses that were computed then.
    """

    drawing: Request
    num_tokens: int = 0
    guesses: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """A request of a pass.

    place: its index among the requests that guesses are wanted for.
    drawing: see `_Known`.
    start: how many of its tokens the draft model has computed.
    count: how many tokens the pass computes. Guesses follow if no token is left then.
    num: how many guesses are drawn; 0 if tokens are left.
    """

    place: int
    request: Request
    drawing: Request
    start: int
    count: int
    num: int


class _Pass(NamedTuple):
    """A run of the model: what is sent for it, and the rows whose next guess it draws.

    last: the last token of each row, where the pass computes others as well; None: all tokens are.
    """

    step: Any  # of the batches
    drawing: list[_Row]
    draw: Draw
    last: Sent | None


class DraftModel:
    """A `Drafter` that runs a smaller model with the same vocabulary on the requests' tokens.

    It draws tokens as the engine does, with the same seed, position, temperature and filters. A draft model
    with the same logits would therefore guess every token.

    The draft model's K and V of a token are computed when they are first needed, in chunks of at most a
    step's token budget. Until all are computed, the request gets no guesses. They lie in the blocks of the
    request, so that copies, swaps and cached prefixes include them; `SequenceBlocks.num_drafted` counts the
    tokens that have them. The passes run back to back, without waiting. Where the device makes the batches,
    all passes share one upload, and passes over few tokens are CUDA graphs.

    kv_cache: the draft model's planes of the engine's cache. manager: the block manager. Set both before use.
    """

    def __init__(self, sizes: Sizes, device: torch.device, *, vocab_size: int, group: int) -> None:
        """Load the model.

        vocab_size: the size of the vocabulary of the engine's model. That of the draft model may be padded to
            another size.
        group: the layer group of the engine's model whose block tables it takes.
        """
        self.sizes = sizes
        self.config = sizes.model.for_context(sizes.max_model_len)
        with naming_draft_model():
            self.model = load_model(sizes, self.config, device, Path(sizes.config.model))
        self._on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self.kv_cache: KVCache | None = None
        self.manager: BlockManager | None = None
        self.graphs: StepGraphs | None = None
        self._vocab_size = vocab_size
        self._group = group
        self._transfers = Transfers(device)
        self._batches = new_batches(sizes, self.config, self.model, device)
        self._of_seats = self._new_seat_parameters(device)
        self._sampler = Sampler(self.model.kernels, vocab_size, device, of_seats=self._of_seats)
        self.decode_graphs = self._new_decode_graphs(device)
        self._known: dict[Request, _Known] = {}

    def _new_seat_parameters(self, device: torch.device) -> SeatParameters | None:
        take = self.model.kernels.take_parameters
        if take is None:
            return None
        from ..sampling.seat_parameters import SeatParameters

        return SeatParameters(take, self.sizes.config.num_seats, device)

    def _new_decode_graphs(self, device: torch.device) -> DecodeGraphs | None:
        if device.type != "cuda":
            return None
        from .decode_graphs import new_decode_graphs

        sizes = self.sizes, self.model, self._batches, self._sampler, device, self._vocab_size
        return new_decode_graphs(*sizes, logits=self._logits)

    def prepare(self, num_blocks: int) -> None:
        """Prepare for requests that fit in this many blocks."""
        self.model.prepare(self.sizes.num_tabulated_positions(num_blocks))
        self.graphs = new_graphs(self.sizes, self.model)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a guess for each request; empty if the request is too long or its KV is incomplete."""
        if self.manager is None:
            raise UsageError("the draft model has no blocks yet")
        if len(self._known) > len(requests):
            self._known = {r: known for r, known in self._known.items() if r.finish_reason is None}
        rows = self._rows(requests, limits)
        drafts = [Draft([]) for _ in requests]
        if not rows:
            return drafts
        try:
            # The scheduler's blocks and slots are right, as its invariants say.
            with self._on_device, TrustedContents():
                guesses = self._run(rows)
        except BaseException:
            self._sampler.forget()
            raise
        for row in rows:
            tokens = guesses[row.place]
            known = self._known[row.request]
            known.num_tokens = row.start + row.count
            known.guesses = tokens[:-1]  # the last one is not computed
            self.manager.record_drafted(row.request.blocks, known.num_tokens, len(known.guesses))
            drafts[row.place] = Draft(tokens)
        return drafts

    def rehearse(self, schedule: Schedule, kv_cache: KVCache | None) -> None:
        """Compute the tokens of a step in this cache, and draw a guess for each of its requests.

        The caller measures memory meanwhile, and kernels are compiled.
        """
        rows = [
            _Row(i, request, _drawn_like(request), start, num_new, 1)
            for i, (request, start, num_new) in enumerate(
                zip(
                    schedule.requests,
                    schedule.num_computed_tokens,
                    schedule.num_new_tokens,
                    strict=True,
                )
            )
        ]
        if rows:
            self.kv_cache = kv_cache
            with self._on_device, TrustedContents():
                self._run(rows)
        self._sampler.forget()

    def _rows(self, requests: Sequence[Request], limits: Sequence[int]) -> list[_Row]:
        """Return the requests to compute, those with most guesses first."""
        rows = []
        left = self.sizes.max_num_batched_tokens
        for place, (request, limit) in enumerate(zip(requests, limits, strict=True)):
            blocks = request.blocks
            num_tokens = request.num_tokens
            num = min(limit, self.sizes.max_model_len - num_tokens + 1)
            if num < 1 or not left:
                continue
            known = self._known.get(request)
            if known is None:
                known = self._known[request] = _Known(_drawn_like(request))
            start = min(blocks.num_drafted, _num_right(request, known))
            count = min(num_tokens - start, left)
            left -= count
            if start + count < num_tokens:
                num = 0
            rows.append(_Row(place, request, known.drawing, start, count, num))
        rows.sort(key=lambda row: -row.num)
        return rows

    def _run(self, rows: list[_Row]) -> dict[int, list[int]]:
        """Compute the rows, and draw guesses one after the other. Return them by place."""
        drawn = [tokens for each in self._passes(rows) if (tokens := self._compute(each)) is not None]
        guesses: dict[int, list[int]] = {row.place: [] for row in rows}
        if drawn:
            download = self._transfers.new_download()
            received = download.get(torch.cat(drawn))
            download.send()
            download.wait()
            numbers = iter(received.numbers.tolist())
            for number in range(rows[0].num):
                for row in rows:
                    if row.num > number:
                        guesses[row.place].append(next(numbers))
        return guesses

    def _passes(self, rows: list[_Row]) -> Iterator[_Pass]:
        """Yield the passes. Each must be computed before the next is taken.

        Where the device makes the batches all are sent at once. The host makes each batch with the tokens of
        the one before.
        """
        if self._of_seats is None:
            for number in range(max(1, rows[0].num)):
                upload = self._transfers.new_upload()
                made = self._put(rows, number, upload)
                upload.send()
                yield made
            return
        upload = self._transfers.new_upload()
        passes = [self._put(rows, number, upload) for number in range(max(1, rows[0].num))]
        upload.send()
        self._sampler.write()
        yield from passes

    def _put(self, rows: list[_Row], number: int, upload: Upload) -> _Pass:
        """Add pass `number` to an upload. It draws guess `number` of each row that gets so many."""
        drawing = [row for row in rows if row.num > number]
        part = self._first_part(rows, drawing) if number == 0 else self._next_part(drawing, number)
        step = self._batches.put(part, upload)
        last = None
        if len(part.sampled) > len(drawing):
            last = upload.put([end - 1 for end in accumulate(part.counts)], torch.int64)

        def positions() -> list[int]:
            return [row.start + row.count + number for row in drawing]

        seats = [row.request.seat for row in drawing]
        draw = self._sampler.prepare([row.drawing for row in drawing], positions, upload, seats)
        return _Pass(step, drawing, draw, last)

    def _compute(self, each: _Pass) -> Tensor | None:
        """Run the model once. Return the next guess of each row, on the device; None if there are no rows."""
        replayed = None if self.decode_graphs is None else self.decode_graphs.replay(each.step, each.draw)
        if replayed is None:
            tokens = self._drawn(each, *self._computed(each))
        elif replayed.logits is not None:
            tokens = self._drawn(each, replayed.logits, (replayed.tokens, replayed.highest))
        elif each.last is None:
            tokens = replayed.tokens
        else:
            tokens = replayed.tokens.index_select(0, each.last.tensor)
            self._batches.record(each.step, tokens)
        # The next pass may write its tokens where this one has.
        is_kept = replayed is None and self.graphs is None
        return tokens if tokens is None or is_kept else tokens.clone()

    def _computed(self, each: _Pass) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Run the model without a CUDA graph. Return logits, and their greedy tokens if they are known."""
        assert self.kv_cache is not None, "the draft model has no cache yet"
        batch = self._batches.batch(each.step)
        logits, best, _ = compute(self.model, self.graphs, batch, self.kv_cache)
        if each.drawing and logits.shape[1] != self._vocab_size:
            return self._fitted(logits), None
        return logits, best

    def _drawn(self, each: _Pass, logits: Tensor, best: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """Draw a guess from the last logits of each row."""
        last = each.last
        if last is not None:
            logits = self.model.kernels.take_rows(logits, last.tensor)
            best = best and (best[0][last.tensor], best[1][last.tensor])
        # Its results are not looked at, so that nothing is downloaded before the last pass.
        download = self._transfers.new_download()
        tokens = each.draw.run(logits, download, None, best, self._batches.places(each.step))
        if tokens is not None:
            self._batches.record(each.step, tokens)
        return tokens

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the tokens of the engine's model."""
        logits = self.model.logits(hidden)
        return logits if logits.shape[1] == self._vocab_size else self._fitted(logits)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Cut off the logits of tokens that only the draft model has; add logits of tokens that it lacks."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return pad(logits, (0, missing), value=-torch.inf)
        return logits[:, :missing].contiguous()

    def _first_part(self, rows: list[_Row], drawing: list[_Row]) -> ComputedPart:
        """Plan the pass over the tokens that have no K and V yet, with all of the requests' blocks."""
        requests = [row.request for row in rows]
        part = ComputedPart(
            seats=[request.seat for request in requests],
            starts=[row.start for row in rows],
            counts=[row.count for row in rows],
            rope_lens=self._rope_lens(rows),
            entries=[array("i")],
            sampled=[*range(len(drawing))],
            sampled_seats=[row.request.seat for row in drawing],
        )
        if len(drawing) == len(rows) and sum(part.counts) <= min(MOST_ROWS, self.sizes.max_sampled_rows):
            # As if a token were drawn after each one: such a pass is recorded with its logits.
            part.num_drafting = len(rows)
            part.sampled = [at for at, count in enumerate(part.counts) for _ in range(count)]
        for at, row in enumerate(rows):
            request = row.request
            end = row.start + row.count
            table = self._table(row)[: -(-end // self.sizes.block_size)]
            part.tokens.extend(request.token_ids[row.start : end])
            part.entries[0].extend(table)
            part.changes.append(SeatChange(at, request.seat, row.count, request.token_ids[-1], 0, len(table)))
        return part

    def _next_part(self, rows: list[_Row], number: int) -> ComputedPart:
        """Plan the pass over guess `number`, from 1 on, of each row: the last one that was drawn."""
        seats = [row.request.seat for row in rows]
        starts = [row.start + row.count + number - 1 for row in rows]
        part = ComputedPart(
            num_decodes=len(rows),
            seats=seats,
            starts=starts,
            counts=[1] * len(rows),
            rope_lens=self._rope_lens(rows),
            entries=[array("i")],
            sampled=[*range(len(rows))],
            sampled_seats=seats,
        )
        for at, (row, start) in enumerate(zip(rows, starts, strict=True)):
            index, offset = divmod(start, self.sizes.block_size)
            if not offset:
                part.entries[0].append(self._table(row)[index])
                part.changes.append(SeatChange(at, row.request.seat, IN_SEAT, IN_SEAT, index, 1))
        return part

    def _table(self, row: _Row) -> array[int]:
        return row.request.blocks.tables[self._group]

    def _rope_lens(self, rows: list[_Row]) -> list[int]:
        """Return the length of each row's prompt, or of its request, where the rotary embedding needs it."""
        if self.config.rope.type == "dynamic":
            return [row.request.num_prompt_tokens for row in rows]
        return [] if self.config.long_context is None else [row.request.num_tokens for row in rows]


def _num_right(request: Request, known: _Known) -> int:
    """Return up to which token the request has those that were computed. Others may have been verified."""
    end = known.num_tokens + len(known.guesses)
    tokens = request.token_ids[known.num_tokens : end]
    wrong = (i for i, (ours, guess) in enumerate(zip(tokens, known.guesses, strict=False)) if ours != guess)
    return known.num_tokens + next(wrong, len(tokens)) if known.guesses else request.num_tokens


def _drawn_like(request: Request) -> Request:
    """Return a request for the sampler: with the seed and the parameters that need no history."""
    params = SamplingParams(**{name: getattr(request.inputs.params, name) for name in DRAWN_BY})
    inputs = RequestInputs(prompt_token_ids=[], params=params, max_total_tokens=1)
    return Request(inputs, sampling=SamplingState(request.sampling.seed))
