"""RemoteTokenizer: a tokenizer in a process of bounded time and memory, for those not known to be bounded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ..base.errors import RequestError
from .tokenizer_bounds import why_unbounded, why_undecodable
from .tokenizer_files import allowed_roots
from .tokenizer_published import PIPELINE
from .tokenizer_source import Source
from .worker import Worker, WorkerLimits, Workers

# A prompt may take 5 seconds, for which the engine waits. Loading includes importing transformers.
LIMITS = WorkerLimits(time_s=5.0, memory=2 * 2**30)
LOAD_S = 30.0
MOST_ENCODED = 2  # texts at once, each by a process; the second one loads when it is needed


class RemoteTokenizer:
    """Replaces a transformers tokenizer: has the methods that `Tokenizer` uses, and encodes in another
    process.

    Decoding is a part of the engine's steps and would delay all requests. Therefore this process itself
    decodes, unless the tokenizer is written in Python and does not use the library's decoder.

    why_unbounded: why the tokenizer must not run in this process.
    """

    def __init__(self, source: Source, limits: WorkerLimits = LIMITS) -> None:
        """Start the process and load the tokenizer. Raises RequestError if that fails or exceeds a limit."""
        directory = Path(source.directory)
        setup = {
            "source": [*source],
            "roots": [str(root) for root in allowed_roots(directory)],
            "checks_file": "fast_tokenizer_files" not in source.settings,
        }
        module = "paged.text.tokenizer_worker"
        subject = "the tokenizer"
        self._workers = Workers(
            MOST_ENCODED, lambda: Worker(module, subject, limits, setup={"load": setup}, setup_s=LOAD_S)
        )
        loaded = self._workers.first.set_up()
        self.special_tokens_map: dict[str, str] = loaded["special_tokens"]
        self.chat_template: str | dict[str, str] | None = loaded["chat_template"]
        self._size: int = loaded["size"]
        self._special_ids: list[int] = loaded["special_ids"]
        self.backend_tokenizer: Backend | None = None
        # The parts that encode, for what depends on their kind.
        self.description: dict[str, Any] = {}
        self.why_unbounded: str | None = "its class is written in Python"
        if loaded["description"] is not None:
            self._describe(json.loads(loaded["description"]), has_own_decode=loaded["has_own_decode"])

    def _describe(self, description: dict[str, Any], *, has_own_decode: bool) -> None:
        self.why_unbounded = why_unbounded(description)
        self.description = {name: description[name] for name in PIPELINE}
        why = why_undecodable(description)
        if why is not None:
            raise RequestError(f"its time to decode is not bounded: {why}")
        if not has_own_decode:
            self.backend_tokenizer = Backend.from_str(json.dumps(_decoding(description)))

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The special tokens by id."""
        return {token_id: AddedToken("", special=True) for token_id in self._special_ids}

    def __len__(self) -> int:
        return self._size

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        """Encode a text. Raises RequestError if that fails or exceeds a limit."""
        request = {"text": text, "add_special_tokens": add_special_tokens}
        return {"input_ids": self._ask({"encode": request})["ids"]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, **_: Any) -> str:
        """Decode tokens."""
        if self.backend_tokenizer is not None:
            return str(self.backend_tokenizer.decode([*token_ids], skip_special_tokens=skip_special_tokens))
        request = {"token_ids": [*map(int, token_ids)], "skip_special_tokens": skip_special_tokens}
        return str(self._ask({"decode": request})["text"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        # Loading takes a second, in which this process goes on.
        return self._workers.ask(request, "the prompt", restarts=True)

    def close(self) -> None:
        """End the processes."""
        self._workers.close()


def _decoding(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a tokenizer that decodes alike: a table of tokens, without what encodes."""
    vocab = description["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram's, of tokens and their scores
        vocab = {token: token_id for token_id, (token, _) in enumerate(vocab)}
    table = {"type": "WordLevel", "vocab": vocab, "unk_token": ""}
    kept = {name: description[name] for name in ("version", "added_tokens", "decoder")}
    dropped = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
    return {**kept, **dropped, "model": table}
