"""A server of a small random model of Qwen3's shape, with a chat template, tool calls and reasoning."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paged.server.engine_client import EngineClient
from tests.support.chat_checkpoints import chat_checkpoint
from tests.support.served import Served, serving
from tests.text.test_chat_template import CHATML

MODEL = "m"  # the served name
ENGINE = {"num_blocks": 1024, "max_num_seqs": 64, "num_threads": 1, "device": "cpu"}


@contextmanager
def small_server(**options: Any) -> Iterator[Served]:
    """Yield the server: the front end in a thread of this process, the engine in another process.

    options: of `paged serve`.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = chat_checkpoint(Path(directory), CHATML, max_position_embeddings=1024)
        with serving(
            EngineClient(str(model), **ENGINE),
            closes=True,
            served_model_name=MODEL,
            tool_call_parser="hermes",
            enable_auto_tool_choice=True,
            reasoning_parser="qwen3",
            **options,
        ) as served:
            yield served
