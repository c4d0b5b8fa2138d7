"""Shared: what all front ends of a server have in common, whatever models they serve."""

from __future__ import annotations

from dataclasses import dataclass

from .access.keys import Keys, keys_of
from .gate import Gate
from .http.budgets import MAX_BODY_BYTES_IN_PROGRESS, BodyBudget, ResponseBudget
from .http.streams import KeepAlive
from .options import ServeOptions
from .responses import Responses


@dataclass(frozen=True, slots=True)
class Shared:
    """The keys of a server, its memory for bodies and responses, and its stored responses.

    keys: the keys of the tenants; None if there are none.
    gate: decides which requests may use which routes.
    keep_alive: sends blank lines to idle streams.
    body_budget: the memory for bodies of requests in progress.
    response_budget: the memory for whole responses that are being sent.
    responses: the stored responses, and those in progress.
    """

    keys: Keys | None
    gate: Gate
    keep_alive: KeepAlive
    body_budget: BodyBudget
    response_budget: ResponseBudget
    responses: Responses

    @classmethod
    def of(cls, options: ServeOptions, scheduling_policy: object) -> Shared:
        """Return what the options say. Raises ConfigError for a wrong keys file."""
        keys = keys_of(
            options.api_keys,
            scheduling_policy=scheduling_policy,
            default_reservation=options.default_reservation,
        )
        return cls(
            keys,
            Gate(options.api_key, keys, options.admin_key),
            KeepAlive(),
            BodyBudget(max(MAX_BODY_BYTES_IN_PROGRESS, 2 * (options.max_request_bytes or 0))),
            ResponseBudget(),
            Responses(options.response_store),
        )
