"""RestartTerms: what is done when an engine process ends."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.errors import ConfigError
from ..base.validation import check_bool, check_int, check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTerms:
    """The conditions under which engine processes are replaced.

    resume: whether the requests of a process that ends continue in another process.
    max_restarts: maximum number of restarts of one engine within ten minutes. Beyond it, no engine is
        available.
    step_timeout: seconds after which a process counts as hung if its step has not ended.

    Raises ConfigError naming the value and what is allowed.
    """

    resume: bool = True
    max_restarts: int = 5
    step_timeout: float = 300.0

    def __post_init__(self) -> None:
        check_bool(ConfigError, "resume", self.resume)
        check_int(ConfigError, "max_restarts", self.max_restarts, 0)
        check_number(ConfigError, "step_timeout", self.step_timeout, 1.0)


DEFAULT_TERMS = RestartTerms()
