"""EmbeddingCall and ScoreCall: bodies that ask for embeddings or scores of texts, not for generated text."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, refused
from ...base.json_kinds import Choice, ListOf, OneOf, Text, TokenIds
from ...base.kinds import Boolean, Integer
from ...checkpoints.embedding_files import POOLINGS
from ...engine.embedding import EmbeddingOptions, EmbeddingRequestOutput
from ...engine.scoring import ScoreOutput
from ...requests.request import Prompt
from ..fields.common import ADD_SPECIAL_TOKENS, BASE_FIELDS, ENCODING_FORMAT, PROMPTS
from ..fields.sampling import sampling_field
from ..jobs import finite
from ..limits import MAX_CONTINUATIONS, Limits
from .call import Call, listed_prompts, prompt_of

if TYPE_CHECKING:
    from ...engine.model_text import ModelText

EMBEDDING_TABLE = FieldTable(
    "/v1/embeddings",
    [
        Field("input", PROMPTS, "the text to embed, its token ids, or a list of either", required=True),
        *BASE_FIELDS,
        Field("encoding_format", ENCODING_FORMAT, "numbers, or base64 of little-endian float32"),
        Field(
            "dimensions",
            Integer(1),
            "keep so many of the first numbers of each vector, and normalize these (matryoshka embeddings); "
            "one of config.json's matryoshka_dimensions, or without any of them at most the size of a vector",
        ),
        Field(
            "pooling",
            Choice(POOLINGS),
            "the final hidden state of the last token, the mean over all tokens, or that of the first token; "
            "by default as the checkpoint says, else last",
        ),
        Field(
            "normalize",
            Boolean(),
            "scale each vector to a Euclidean norm of 1, by default as the checkpoint says, else true",
        ),
        Field("use_activation", Boolean(), "vLLM's name of normalize"),
        Field(
            "prompt_name",
            Text(),
            "which of the checkpoint's prompts to put before each text, none for an empty name; by default "
            "that of its default_prompt_name, if there is one",
        ),
        *map(sampling_field, ("priority", "timeout_s", "cache_salt")),
        ADD_SPECIAL_TOKENS,
        *refused("truncate_prompt_tokens truncation_side", "cut the prompt's token ids", -1),
        *refused("messages", "a conversation is not embedded; give its text as input"),
        *refused("embed_dtype", "encoding_format base64 has little-endian float32", "float32"),
    ],
)
_CONTINUATION = OneOf((Text(1), TokenIds(1)))
SCORE_TABLE = FieldTable(
    "/v1/score",
    [
        Field("prompt", _CONTINUATION, "the text before the continuations, or its token ids", required=True),
        Field(
            "continuations",
            ListOf(_CONTINUATION, 1, MAX_CONTINUATIONS),
            "texts or token ids whose log-probability after the prompt is returned. They are tokenized by "
            "themselves, so a space before one must be part of it or of the prompt",
            required=True,
        ),
        *BASE_FIELDS,
        *map(sampling_field, ("priority", "timeout_s", "cache_salt")),
        ADD_SPECIAL_TOKENS,
        *refused(
            "text_1 text_2 queries documents",
            "a score is the log-probability of continuations after a prompt; for similarities compare "
            "embeddings",
        ),
    ],
)


class EmbeddingCall(Call):
    """A body of /v1/embeddings.

    options: the arguments of `LLMEngine.encode`.
    """

    table = EMBEDDING_TABLE
    PROMPT_FIELD = "input"

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        names = ("pooling", "normalize", "dimensions", "prompt_name")
        self.options: dict[str, Any] = {name: self.values.get(name) for name in names}
        if "use_activation" in self.values:
            if "normalize" in self.values:
                raise RequestError(
                    "give either normalize or use_activation, which is another name of it", param="normalize"
                )
            self.options["normalize"] = self.values["use_activation"]
        self._in_base64 = self.values.get("encoding_format") == "base64"
        self.listed = listed_prompts(self.values["input"])

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the prompts to embed.

        Raises RequestError if the model cannot make embeddings with the body's options.
        """
        EmbeddingOptions(**self.options).check(text.embedding)
        return [prompt_of(prompt, self.values) for prompt in self.listed]

    def body(
        self,
        outputs: Sequence[EmbeddingRequestOutput],
        identity: str,
        created: int,
        model: str,
    ) -> dict[str, Any]:
        """Return the response body with the embeddings, in the order of the inputs."""
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        data = [
            {"object": "embedding", "index": i, "embedding": self._vector(output)}
            for i, output in enumerate(outputs)
        ]
        return {
            "id": f"embd-{identity}",
            "object": "list",
            "created": created,
            "model": model,
            "data": data,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _vector(self, output: EmbeddingRequestOutput) -> list[float] | str:
        vector = output.outputs.embedding
        assert vector is not None, "an output that failed has no response"
        if not self._in_base64:
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class ScoreCall(Call):
    """A body of /v1/score.

    continuations: see `LLMEngine.score`.
    """

    table = SCORE_TABLE

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        self.continuations: list[str | list[int]] = self.values["continuations"]

    def prompts(self, text: ModelText) -> Sequence[Prompt]:  # noqa: ARG002
        """Return the prompt of the continuations, in a list."""
        return [prompt_of(self.values["prompt"], self.values)]

    def body(self, outputs: Sequence[ScoreOutput], identity: str, created: int, model: str) -> dict[str, Any]:
        """Return the response body with the scores, in the order of the continuations."""
        data = []
        for i, output in enumerate(outputs):
            assert output.logprob is not None, "an output that failed has no response"
            data.append(
                {
                    "object": "score",
                    "index": i,
                    "score": finite(output.logprob),
                    "mean_logprob": finite(output.logprob / output.num_tokens),
                    "token_ids": output.token_ids,
                    "token_logprobs": [finite(logprob) for logprob in output.token_logprobs],
                    "is_greedy": output.is_greedy,
                }
            )
        num_tokens = sum(output.num_prompt_tokens + output.num_tokens for output in outputs)
        return {
            "id": f"score-{identity}",
            "object": "list",
            "created": created,
            "model": model,
            "data": data,
            "usage": {
                "prompt_tokens": num_tokens,
                "completion_tokens": 0,
                "total_tokens": num_tokens,
                "prompt_tokens_details": None,
            },
        }
