"""PromptParser: prompts in any form to validated token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..architectures.config import ModelConfig
from ..base.errors import RequestError, about, reject_unknown
from ..base.validation import check_bool, field_of, shown
from ..requests.request import LONG, Prompt, PromptImage
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..blocks.content_chain import Content
    from .images import ImagePrompts, NamedImage

MAX_CONTINUED_TOKENS = 2**22  # of a prompt times its continuations: the engine gets it with each of them
IMAGE_FIELDS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", *IMAGE_FIELDS)


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A prompt as validated token ids.

    namespace: what the KV depends on besides the tokens. Prompts with different namespaces share no blocks.
    images: in the order of their tokens.
    """

    text: str | None
    token_ids: list[int]
    namespace: bytes
    images: tuple[PromptImage, ...] = ()

    @property
    def contents(self) -> Sequence[Content]:
        """What the placeholders among its tokens stand for."""
        return [image.content for image in self.images] if self.images else ()


class PromptParser:
    """Parses prompts for one model whose contexts have at most max_model_len tokens.

    images: reads the images of prompts; None: the model sees none.
    no_images: why it sees none.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        images: ImagePrompts | None = None,
        no_images: str = "this model takes text alone",
    ) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        long = model_config.for_context(max_model_len).long_context
        self.long_from = None if long is None else long.num_tokens  # see RequestInputs
        self.images = images
        self._no_images = no_images
        self._placeholders = dict(model_config.placeholders)

    @about("prompt")
    def parse(self, prompt: Prompt, salt: str | None = None) -> ParsedPrompt:
        """Validate and tokenize a prompt. Raises RequestError.

        salt: the default for prompts without "cache_salt".
        """
        add_special_tokens = True
        images: list[NamedImage] = []
        if isinstance(prompt, Mapping):
            reject_unknown("a prompt dict", map(str, prompt), PROMPT_FIELDS)
            fields = dict(prompt)
            if "prompt" in fields:
                add_special_tokens = fields.pop("add_special_tokens", True)
                check_bool(RequestError, "add_special_tokens", add_special_tokens)
            images = self._images_in({name: fields.pop(name, None) for name in IMAGE_FIELDS})
            salt = fields.pop("cache_salt", salt)
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise RequestError(
                    f"cache_salt must be a non-empty string, got {shown(salt)}", param="cache_salt"
                )
            if len(fields) != 1:
                raise RequestError(
                    f"a prompt dict has either prompt or prompt_token_ids, got {sorted(fields)}"
                )
            ((key, prompt),) = fields.items()
            if isinstance(prompt, str) != (key == "prompt"):
                wanted = "text" if key == "prompt" else "a list of token ids"
                raise RequestError(f"{key} in a prompt dict must be {wanted}, got {shown(prompt)}")
        prompt = _as_list(prompt)
        self._check_before_encoding("the prompt", prompt)
        seen: tuple[PromptImage, ...] = ()
        if images:
            assert self.images is not None, "images were refused"
            text, token_ids, seen = self.images.parse(prompt, images, add_special_tokens=add_special_tokens)
        else:
            text, token_ids = self._encode(prompt, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self._check_length("the prompt", len(token_ids))
        self.check_vocabulary("prompt_token_ids", token_ids)
        token_ids = [int(token_id) for token_id in token_ids]
        self._check_is_text("prompt_token_ids", token_ids, with_images=bool(seen))
        return ParsedPrompt(text, token_ids, self.namespace(salt, len(token_ids)), seen)

    def _images_in(self, given: Mapping[str, Any]) -> list[NamedImage]:
        """Return the images in IMAGE_FIELDS. Raises RequestError, also where the model sees none."""
        if self.images is not None:
            return self.images.given(given)
        for name, value in given.items():
            if value is not None and (value or not isinstance(value, Mapping)):
                raise RequestError(f"{name} is refused: {self._no_images}", param=name)
        return []

    @about("prompt")
    def check_parsed(self, prompt: ParsedPrompt) -> None:
        """Raise RequestError if a prompt that another parser made does not fit this model."""
        token_ids = prompt.token_ids
        if not token_ids:
            raise RequestError("the prompt is empty; it must have at least one token")
        self._check_length("the prompt", len(token_ids))
        if min(token_ids) < 0 or max(token_ids) >= self.model_config.vocab_size:  # quick, as nearly all pass
            self.check_vocabulary("prompt_token_ids", token_ids)
        if prompt.images and self.images is None:
            raise RequestError(f"images are refused: {self._no_images}")
        self._check_is_text("prompt_token_ids", token_ids, with_images=bool(prompt.images))

    def _encode(
        self, prompt: Any, name: str = "a prompt", *, add_special_tokens: bool = True
    ) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"{name} that is text needs the tokenizer, which skip_tokenizer_init=True left out"
                )
            if not prompt:
                return prompt, []
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, name=name)
            return str(prompt), ids
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            return None, [*prompt]
        raise RequestError(
            f"{name} is text or a list of token ids, a prompt may be a dict, got {shown(prompt)}"
        )

    def namespace(self, salt: str | None, num_prompt_tokens: int) -> bytes:
        """Return what a prompt's KV depends on besides the tokens."""
        rope = self.model_config.rope
        trained = self.model_config.max_position_embeddings
        # A prompt beyond the trained context is rotated for its own length: see Batch.rope_lens.
        stretched = num_prompt_tokens if rope.type == "dynamic" and num_prompt_tokens > trained else None
        is_long = self.long_from is not None and num_prompt_tokens >= self.long_from
        if salt is None and stretched is None:
            return LONG * is_long
        return repr((salt, stretched)).encode("utf-8", "surrogatepass") + LONG * is_long

    def parse_continued(self, prompt: Prompt, continuations: Any) -> tuple[ParsedPrompt, list[ParsedPrompt]]:
        """Return the parsed prompt, and the prompt followed by each continuation. Raises RequestError.

        continuations: texts or lists of token ids. Texts are tokenized separately from the prompt, without
            special tokens, so that the prompt's tokens are the same for all continuations.
        """
        parsed = self.parse(prompt)
        if parsed.images:
            raise RequestError("multi_modal_data is for prompts that are completed: scores are of text alone")
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        with about("continuations"):
            return parsed, self._continued(parsed, salt, continuations)

    def _continued(self, parsed: ParsedPrompt, salt: Any, continuations: Any) -> list[ParsedPrompt]:
        if isinstance(continuations, str | bytes) or not isinstance(continuations, Sequence):
            raise RequestError(
                f"continuations must be a list of texts or token ids, got {shown(continuations)}"
            )
        if not continuations:
            raise RequestError("continuations must have at least one entry, got []")
        if (num_tokens := len(parsed.token_ids) * len(continuations)) > MAX_CONTINUED_TOKENS:
            raise RequestError(
                f"continuations has {len(continuations):,} entries, each with the {len(parsed.token_ids):,} "
                f"tokens of the prompt, which makes {num_tokens:,}; {MAX_CONTINUED_TOKENS:,} is the most"
            )
        wholes = []
        for i, continuation in enumerate(continuations):
            name = f"continuations[{i}]"
            self._check_before_encoding(name, continuation)
            _, token_ids = self._encode(continuation, name, add_special_tokens=False)
            if not token_ids:
                raise RequestError(f"{name} is empty; it must have at least one token")
            self.check_vocabulary(name, token_ids)
            token_ids = [int(token_id) for token_id in token_ids]
            self._check_is_text(name, token_ids)
            whole = [*parsed.token_ids, *token_ids]
            self._check_length(f"{name}: the prompt", len(whole))
            wholes.append(ParsedPrompt(None, whole, self.namespace(salt, len(whole))))
        return wholes

    def check_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        """Check that all token ids are in the model's vocabulary. Raises RequestError for the first wrong id.

        name: the name of the argument that holds the ids, for the error.
        """
        vocab_size = self.model_config.vocab_size
        # Of a long prompt, one id after another would take longer than its tokenization.
        if {*map(type, token_ids)} == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return
        for i, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise RequestError(f"{name}[{i}] must be an int, got {shown(token_id)}", param=field_of(name))
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{name}[{i}] is {shown(int(token_id))}; the vocabulary is 0 to {vocab_size - 1}",
                    param=field_of(name),
                )

    def _check_is_text(self, name: str, token_ids: list[int], *, with_images: bool = False) -> None:
        """Raise RequestError for tokens that stand for images, audio or video which did not come."""
        if not self._placeholders or self._placeholders.keys().isdisjoint(token_ids):
            return
        known = self.images.known_ids if self.images is not None and with_images else frozenset[int]()
        unknown = self._placeholders.keys() - known
        at = next((i for i, token_id in enumerate(token_ids) if token_id in unknown), None)
        if at is None:
            return
        key = self._placeholders[token_ids[at]]
        shown_token = str(token_ids[at])
        if self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids[at : at + 1], skip_special_tokens=False)
            shown_token = f"{shown_token} {text!r}"
        why = f"of {self.model_config.architecture} only the text part is loaded"
        if self.images is not None:
            why = "give images as multi_modal_data; audio and video are not supported"
        raise RequestError(
            f"{name}[{at}] is {shown_token}, which stands for an image, audio or video ({key}); {why}",
            param=field_of(name),
        )

    def _check_before_encoding(self, name: str, prompt: Any) -> None:
        """Refuse a prompt that is far too long without reading all of it."""
        if isinstance(prompt, str):
            if self.tokenizer is not None:
                least = self.tokenizer.least_tokens(prompt, self.max_model_len)
                self._check_length(name, least, at_least="at least ")
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            self._check_length(name, len(prompt))

    def _check_length(self, name: str, num_tokens: int, at_least: str = "") -> None:
        if num_tokens > self.max_model_len:
            raise RequestError(
                f"{name} has {at_least}{num_tokens} tokens, more than max_model_len {self.max_model_len}"
            )


def _as_list(prompt: Any) -> Any:
    """Return an array of numpy or torch as a list, anything else unchanged."""
    is_array = not isinstance(prompt, str | bytes | bytearray | memoryview | Sequence | Mapping)
    return prompt.tolist() if is_array and hasattr(prompt, "tolist") else prompt
