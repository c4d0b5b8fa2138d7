"""Batch inference over Ray Data: a column of prompts in, columns of results out."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..base.errors import ClusterError, ConfigError, EngineDeadError, PagedError, QueueFullError
from ..base.validation import check_int, shown
from ..options.config import EngineConfig
from ..options.sampling_params import RequestOutputKind, SamplingParams
from ..requests.request import RequestOutput, derived_seed
from .cluster import ROOM_S, Share, share_of
from .late_lines import LateLines
from .retries import MOST_ENDS, BatchRoom, RetryLedger, RowResult

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.data import Dataset

ROWS_OF_BATCH = 8  # many small batches at once: the engine never waits for the last rows of one
ROWS_OF_BLOCK = 4 * ROWS_OF_BATCH  # Ray computes a block again as a whole; so many batches of it run at once
IDS_AT_ONCE = 2**16  # rows whose ids are read together
QUEUE_FULL_S = 0.02  # until a row is sent again that found the engine's queue full

logger = logging.getLogger(__name__)


def generate(
    dataset: Dataset,
    model: str,
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    *,
    id_column: str,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    replicas: int = 1,
    max_restarts: int = 5,
    check_ids: bool = True,
    **options: Any,
) -> Dataset:
    """Return a dataset with the results of each row. They are computed when the dataset is read.

    The dataset has the additional columns text, token_ids, finish_reason and error. error is None for a row
    with a result; for a row that is wrong or that ends engine processes, it is the error. The seed of a row
    comes from its id, so that recomputing a row gives the same tokens.

    If an actor ends, its batch is computed again. After two ends the batch is computed alone in its actor;
    after three, its rows are computed one by one. A row that then ends two actors gets an error.

    sampling_params: the sampling parameters of all rows; n must be 1.
    id_column: a column of unique texts or integers.
    prompt_column: a column of texts or of lists of token ids.
    messages_column: a column of conversations, to be used instead of prompts.
    replicas: the number of actors. Each actor has an engine in a separate process, which is replaced when it
        ends.
    max_restarts: maximum number of restarts of an engine within ten minutes, and of consecutive restarts of
        an actor without a finished row or batch in between. Beyond that the dataset raises an error.
    check_ids: whether to check first that each row has an id and that all ids differ. The check reads the
        column once. Without it, a row without an id gets an error, and rows with equal ids have equal seeds.
    options: the arguments of `LLMEngine`.

    Raises ConfigError and RequestError for wrong arguments, before anything is computed.
    """
    import ray

    check_int(ConfigError, "replicas", replicas, 1)
    config = EngineConfig(model, **options)
    params = _params(sampling_params)
    share = _share(options, replicas)
    schema = dataset.schema()
    columns = [] if schema is None else schema.names
    needed = (id_column, messages_column or prompt_column)
    for name in needed:
        if name not in columns:
            raise ConfigError(f"the dataset has no column {name!r}; it has {', '.join(columns) or 'none'}")
    for name in RowResult._fields:
        if name in columns:
            raise ConfigError(
                f"the dataset has a column {name!r}, which the results would replace; rename it"
            )
    if check_ids:
        _check_ids(dataset, id_column)
    of_engine = share.times(config.num_ranks)  # whose processes are all on the node of its actor
    at_once = max(2, 2 * config.num_seats // ROWS_OF_BATCH)
    engine_options = options if share.num_gpus else {**options, "num_threads": share.num_cpus}
    return dataset.repartition(target_num_rows_per_block=ROWS_OF_BLOCK).map_batches(
        _Generator,
        batch_size=ROWS_OF_BATCH,
        batch_format="pyarrow",
        **_pool(replicas, at_once),
        fn_constructor_kwargs={
            "ledger": ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(RetryLedger).remote(),
            "columns": needed,
            "is_chat": messages_column is not None,
            "params": params,
            "num_places": at_once,
            "options": {"model": model, "max_restarts": max_restarts, **engine_options},
        },
        num_cpus=of_engine.num_cpus,
        num_gpus=of_engine.num_gpus,
    )


def _share(options: Mapping[str, Any], replicas: int) -> Share:
    """Return what each process of an engine gets. Tasks that have just read the dataset may still have it."""
    until = time.monotonic() + ROOM_S
    while True:
        try:
            return share_of(options, replicas, num_reserved=1)  # Ray Data reads and writes with it
        except ClusterError:
            if time.monotonic() > until:
                raise
        time.sleep(ROOM_S / 20)


def _pool(size: int, at_once: int) -> dict[str, Any]:
    """Return the arguments of map_batches for so many actors, each with so many calls at once."""
    from ray.data import ActorPoolStrategy

    limits = {"size": size, "max_tasks_in_flight_per_actor": at_once}
    newer = "max_concurrent_calls_per_actor"  # than Ray 2.49, whose argument newer ones warn of
    if newer in inspect.signature(ActorPoolStrategy).parameters:
        return {"compute": ActorPoolStrategy(**limits, **{newer: at_once})}
    return {"compute": ActorPoolStrategy(**limits), "max_concurrency": at_once}


def _check_ids(dataset: Dataset, column: str) -> None:
    """Raise ConfigError unless each row has an id of its own."""
    import pyarrow
    from pyarrow import compute

    read = dataset.select_columns([column]).iter_batches(batch_size=IDS_AT_ONCE, batch_format="pyarrow")
    chunks = [chunk for batch in read for chunk in batch.column(column).chunks]
    if not chunks:
        return
    ids = pyarrow.chunked_array(chunks)
    if ids.null_count:
        raise ConfigError(
            f"{ids.null_count:,} of {len(ids):,} rows have no {column}, from which seeds follow"
        )
    counts = ids.value_counts()
    numbers = counts.field("counts")
    most = compute.max(numbers).as_py()
    if most > 1:
        value = counts.field("values")[compute.index(numbers, most).as_py()].as_py()
        raise ConfigError(f"{column} must differ from row to row, and {most:,} rows have {shown(value)}")


def _params(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams | None:
    """Return the parameters of all rows. Raises RequestError."""
    if given is None:
        return None
    params = given if isinstance(given, SamplingParams) else SamplingParams(**given)
    if params.n > 1:
        raise ConfigError(f"a row has one text, and n is {params.n}; give each row several times")
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


class _Generator:
    """An actor's function: answers the rows of many batches at once with one engine."""

    def __init__(
        self,
        ledger: ActorHandle[RetryLedger],
        columns: tuple[str, str],
        params: SamplingParams | None,
        options: Mapping[str, Any],
        num_places: int,
        *,
        is_chat: bool,
    ) -> None:
        import ray

        from ..server import supervisor
        from ..server.engine_client import EngineClient

        # Ray 2.49 asks for the loop of this thread, which newer versions of uvloop do not make by themselves.
        asyncio.set_event_loop(asyncio.new_event_loop())
        self._ledger = ledger
        self._actor = ray.get_runtime_context().get_actor_id()
        self._room = BatchRoom(num_places)
        num = ray.get(ledger.start.remote(self._actor))
        if num > options["max_restarts"]:
            raise EngineDeadError(
                f"an actor has ended {num} times in a row with no row done, and max_restarts is "
                f"{options['max_restarts']}; Ray's logs of the actor and of its node say why"
            )
        self._id_column, self._input_column = columns
        self._is_chat = is_chat
        self._engine = EngineClient(**options)
        LateLines(logging.getLogger(supervisor.__name__))
        self._params = self._engine.text.default_params if params is None else params
        self._params = replace(self._params, output_kind=RequestOutputKind.FINAL_ONLY)

    async def __call__(self, batch: Any) -> Any:
        """Return the batch with the columns of results."""
        ids = batch.column(self._id_column).to_pylist()
        inputs = batch.column(self._input_column).to_pylist()
        name = repr(ids)
        num_ends, _ = await self._ledger.known.remote(name)
        alone = num_ends >= MOST_ENDS
        names = [name, f"{name} alone"] if alone else [name]
        async with self._room.place(alone=alone):
            num_ends_alone, _ = await self._ledger.known.remote(names[-1]) if alone else (0, None)
            await self._ledger.begin.remote(self._actor, names)
            if num_ends_alone:
                results = [await self._row_alone(*row) for row in zip(ids, inputs, strict=True)]
            else:
                results = await asyncio.gather(*map(self._row, ids, inputs))
            self._ledger.done.remote(self._actor, names, [*map(repr, ids)] if alone else [])
        return _with_results(batch, results)

    async def _row_alone(self, row_id: Any, given: Any) -> RowResult:
        """Return the results of a row that is computed alone, or its error if it has ended actors so."""
        name = repr(row_id)
        num_ends, kept = await self._ledger.known.remote(name)
        if kept is not None:
            return RowResult(*kept)
        if num_ends >= MOST_ENDS:
            return RowResult(error=f"{num_ends} actors ended while they computed this row and nothing else")
        await self._ledger.begin.remote(self._actor, [name])
        result = await self._row(row_id, given)
        self._ledger.keep.remote(self._actor, name, result)
        return result

    async def _row(self, row_id: Any, given: Any) -> RowResult:
        """Return the results of a row, or its error. Others go on, whatever that is."""
        try:
            output = await self._output(row_id, given)
        except PagedError as error:
            if not self._engine.is_running:
                raise
            return RowResult(error=str(error))
        except Exception as error:
            logger.exception("the row %r failed", row_id)
            return RowResult(error=f"{type(error).__name__}: {error}")
        completion = output.outputs[0]
        if completion.finish_reason in ("error", "abort"):
            return RowResult(error=str(completion.stop_reason or completion.finish_reason))
        return RowResult(completion.text, [*completion.token_ids], completion.finish_reason)

    async def _output(self, row_id: Any, given: Any) -> RequestOutput:
        if row_id is None:
            raise ConfigError(f"the row has no {self._id_column}, from which its seed follows")
        params = self._params
        if params.seed is None:
            seed = derived_seed(self._engine.config.seed, str(row_id))
            params = replace(params, seed=seed >> 1)  # a seed that is given has a sign
        start = self._engine.chat if self._is_chat else self._engine.generate
        while True:
            try:
                last = None
                async for output in start(given, params):
                    last = output
            except QueueFullError:
                await asyncio.sleep(QUEUE_FULL_S)
            else:
                assert last is not None, "a stream ends with an output"
                return last


def _with_results(batch: Any, results: Sequence[RowResult]) -> Any:
    """Return an Arrow table with the columns of results."""
    import pyarrow

    types = (pyarrow.string(), pyarrow.list_(pyarrow.int64()), pyarrow.string(), pyarrow.string())
    for name, kind, values in zip(RowResult._fields, types, zip(*results, strict=True), strict=True):
        batch = batch.append_column(name, pyarrow.array(values, kind))
    return batch
