"""SpeculativeConfig: how tokens are guessed, validated once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from ..base.errors import ConfigError
from ..base.validation import check_bool, check_int, shown

METHODS = ("ngram", "suffix", "grammar", "draft_model")
LOOKUP_MAX = 5
LOOKUP_MIN = 2
_MOST = {"num_speculative_tokens": 64, "prompt_lookup_max": 64, "prompt_lookup_min": 64}
_FORM = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How the next tokens of requests are guessed, with vLLM's keys.

    method: "ngram" finds the request's last tokens earlier in the request, and guesses what followed there;
        "suffix" also searches the request's other samples, and finished outputs of the same tenant and
        cache_salt; "draft_model", the default if `model` is given, has a second, smaller model draw the
        guesses. Every method also guesses tokens that structured_outputs force; "grammar" guesses only these.
    num_speculative_tokens: maximum number of guesses for a request in a step.
    adaptive: whether a step verifies only as many guesses as save time, by measured step times and acceptance
        rates; False verifies all guesses.
    prompt_lookup_max: maximum length of a match of "ngram", in tokens; of equally long matches the newest is
        taken. None takes 5, or prompt_lookup_min if that is more.
    prompt_lookup_min: minimum length of a match, in tokens.
    model: the draft model, as EngineConfig names one. It must have the tokenizer of the engine's model.
    revision: branch, tag or commit of the draft model on the hub.
    quantization: quantize the draft model's weights while loading, to "int8" or "int4"; None takes them as
        they are.

    Raises ConfigError naming the key, its value and what is allowed.
    """

    method: Literal["ngram", "suffix", "grammar", "draft_model"]
    num_speculative_tokens: int = 8
    adaptive: bool = True
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int = LOOKUP_MIN
    model: str | None = None
    revision: str | None = None
    quantization: Literal["int8", "int4"] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _error("method", f"must be one of {', '.join(METHODS)}; got {shown(self.method)}")
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None:
                check_int(ConfigError, f"speculative_config[{name!r}]", value, 1, most)
        check_bool(ConfigError, "speculative_config['adaptive']", self.adaptive)
        self._check_model()
        self._check_lookup()

    def _check_lookup(self) -> None:
        longest = self.prompt_lookup_max
        shortest = self.prompt_lookup_min
        if self.method in ("grammar", "draft_model") and (longest is not None or shortest != LOOKUP_MIN):
            key = "prompt_lookup_min" if longest is None else "prompt_lookup_max"
            raise _error(key, f"goes with methods 'ngram' and 'suffix': {self.method!r} looks nothing up")
        if longest is not None and self.method == "suffix":
            raise _error("prompt_lookup_max", "goes with method 'ngram': 'suffix' takes the longest match")
        if longest is not None and shortest > longest:
            raise _error("prompt_lookup_min", f"is {shortest}, more than prompt_lookup_max {longest}")

    def _check_model(self) -> None:
        for key in ("model", "revision", "quantization"):
            value = getattr(self, key)
            if value is None:
                continue
            if self.method != "draft_model":
                raise _error(key, f"goes with method 'draft_model', not {self.method!r}")
            if not isinstance(value, str) or not value:
                raise _error(key, f"must be a non-empty string, got {shown(value)}")
        if self.method == "draft_model" and self.model is None:
            raise _error("model", "is missing: 'draft_model' needs a directory, a GGUF file or a hub id")
        if self.quantization not in (None, "int8", "int4"):
            raise _error("quantization", f"must be one of int8, int4; got {shown(self.quantization)}")

    @property
    def longest_match(self) -> int:
        """Maximum length of a match of "ngram", in tokens."""
        return self.prompt_lookup_max or max(LOOKUP_MAX, self.prompt_lookup_min)

    @classmethod
    def of(cls, given: object) -> Self | None:
        """Return a config from a SpeculativeConfig, a dict or JSON text; None stays None."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"speculative_config must be JSON such as {_FORM}: {error}") from error
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config must be a dict such as {_FORM}, got {shown(given)}")
        keys = [field.name for field in fields(cls)]
        if unknown := [key for key in given if key not in keys]:
            raise _error(unknown[0], f"is unknown; known keys are {', '.join(keys)}")
        options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if "model" in options:
            options.setdefault("method", "draft_model")
        if "method" not in options:
            raise _error("method", f"is missing; it must be one of {', '.join(METHODS)}")
        return cls(**options)


def _error(key: str, what: str) -> ConfigError:
    return ConfigError(f"speculative_config[{key!r}] {what}")
