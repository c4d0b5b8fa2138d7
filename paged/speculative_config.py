"""SpeculativeConfig: how tokens are guessed, validated once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from .base.validation import check_bool, check_int, shown
from .errors import ConfigError

METHODS = ("ngram", "suffix", "grammar")
LOOKUP_MIN = 2
LOOKUP_MAX = 5
_MOST = {"num_speculative_tokens": 64, "prompt_lookup_max": 64, "prompt_lookup_min": 64}
_FORM = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How the next tokens of requests are guessed, with vLLM's keys.

    method: "ngram" guesses what followed the last tokens where they occurred before in the request; "suffix"
        looks in its siblings too, and in outputs that ended before, of the same tenant and cache_salt. Both
        guess the tokens that structured_outputs force, where there are some; "grammar" guesses these only.
    num_speculative_tokens: most guesses for a request in a step.
    adaptive: whether steps take only as many guesses as make tokens come faster, by measured times and
        acceptance; False takes all that are made.
    prompt_lookup_max: most tokens of a match that "ngram" compares; of equally long ones the newest counts.
        None takes 5, or prompt_lookup_min if that is more.
    prompt_lookup_min: fewest tokens of a match.

    Raises ConfigError naming the key, its value and what is allowed.
    """

    method: Literal["ngram", "suffix", "grammar"]
    num_speculative_tokens: int = 8
    adaptive: bool = True
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int = LOOKUP_MIN

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _error("method", f"must be one of {', '.join(METHODS)}; got {shown(self.method)}")
        for name, most in _MOST.items():
            if (value := getattr(self, name)) is not None:
                check_int(ConfigError, f"speculative_config[{name!r}]", value, 1, most)
        check_bool(ConfigError, "speculative_config['adaptive']", self.adaptive)
        longest = self.prompt_lookup_max
        if longest is not None and self.method != "ngram":
            raise _error("prompt_lookup_max", "goes with method 'ngram': 'suffix' takes the longest match")
        if self.method == "grammar" and self.prompt_lookup_min != LOOKUP_MIN:
            raise _error(
                "prompt_lookup_min", "goes with methods 'ngram' and 'suffix': 'grammar' looks nothing up"
            )
        if longest is not None and self.prompt_lookup_min > longest:
            raise _error(
                "prompt_lookup_min", f"is {self.prompt_lookup_min}, more than prompt_lookup_max {longest}"
            )

    @property
    def longest_match(self) -> int:
        """The most tokens of a match that "ngram" compares."""
        return self.prompt_lookup_max or max(LOOKUP_MAX, self.prompt_lookup_min)

    @classmethod
    def of(cls, given: object) -> Self | None:
        """Return the config that is given as one, as a dict, or as the JSON of a dict; None for none."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"speculative_config must be JSON such as {_FORM}: {error}") from error
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config must be a dict such as {_FORM}, got {shown(given)}")
        keys = [field.name for field in fields(cls)]
        if unknown := [key for key in given if key not in keys]:
            raise _error(unknown[0], f"is unknown; known keys are {', '.join(keys)}")
        options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if "method" not in options:
            raise _error("method", f"is missing; it must be one of {', '.join(METHODS)}")
        return cls(**options)


def _error(key: str, what: str) -> ConfigError:
    return ConfigError(f"speculative_config[{key!r}] {what}")
