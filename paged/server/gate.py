"""Gate: whether a request may use a route, by the key that it bears."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocol.endpoints import Access
from .access.key_file import digest_of
from .access.keys import Keys
from .access.limits import KeyUsage
from .http.failures import HttpError

NO_KEY = (
    "this server needs a key that it knows; send it in the header authorization: Bearer KEY, or to "
    "/v1/messages as x-api-key: KEY"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as identified by its key.

    owner: the tenant of the key, or the number of the key among --api-key; None for the operator, and without
        keys.
    usage: the usage record of a tenant's key.
    """

    owner: str | None = None
    usage: KeyUsage | None = None


class Gate:
    """Checks keys: the keys of a single tenant, the keys of a file, or none.

    api_keys: the keys of the single tenant.
    keys: the keys of the file.
    admin_key: the operator's key; None refuses routes that need it.
    """

    def __init__(self, api_keys: Sequence[str], keys: Keys | None, admin_key: str | None) -> None:
        self._keys = keys
        self._admin = [] if admin_key is None else _digests_of([admin_key])
        self._digests = _digests_of(api_keys)

    def check(self, access: Access, authorization: str | None) -> Caller:
        """Return the sender of a request.

        authorization: the header Authorization; None if it is missing.

        Raises HttpError if the request may not use routes with this access.
        """
        if access == "admin" and not self._admin:
            raise _forbidden("this server has no admin key; start it with --admin-key")
        is_for_keys = access in ("keys", "watch")
        has_keys = self._keys is not None or (is_for_keys and bool(self._digests))
        has_keys |= access == "watch" and bool(self._admin)  # what all requests do is not for all
        if access == "all" or not (has_keys or access == "admin"):
            return Caller()
        kind, _, given = (authorization or "").partition(" ")
        token = given.strip().encode("latin-1") if kind.lower() == "bearer" else b""
        if access != "keys" and _place_among(token, self._admin) is not None:
            return Caller()
        if access == "admin":
            raise _unauthorized("this route needs the admin key")
        if self._keys is None:
            place = _place_among(token, self._digests)
            if place is None:
                raise _unauthorized(NO_KEY)
            return Caller(f"key {place}")
        usage = self._keys.find(token)
        if usage is None:
            raise _unauthorized(NO_KEY)
        if self._keys.has_expired(usage.entry):
            raise _unauthorized("this key is no longer valid; ask the operator of the server for another one")
        if access == "operator":
            raise _forbidden("this route needs the admin key, as it tells of all tenants")
        return Caller(usage.entry.tenant, usage)


def _digests_of(keys: Sequence[str]) -> list[tuple[bytes, bytes]]:
    # In a header, some clients encode what is not ASCII as latin-1, and others as UTF-8.
    return [(digest_of(key.encode("latin-1")), digest_of(key.encode("utf-8"))) for key in keys]


def _place_among(token: bytes, keys: Sequence[tuple[bytes, bytes]]) -> int | None:
    """Return which of these keys a token is. The time it takes tells nothing about others."""
    digest = digest_of(token)
    found = None
    for place, digests in enumerate(keys):  # all of them
        matches = [hmac.compare_digest(digest, known) for known in digests]
        found = place if any(matches) else found
    return found


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, code="not_allowed")


def _unauthorized(message: str) -> HttpError:
    headers = ((b"www-authenticate", b"Bearer"),)
    return HttpError(401, message, code="invalid_api_key", headers=headers)
