"""Gate: whether a request may use a route, by the key that it bears."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from ..protocol.endpoints import Access
from .access.key_file import digest_of
from .access.keys import Keys
from .access.limits import KeyUsage
from .http.failures import HttpError

NO_KEY = "this server needs a key; send it in the header authorization: Bearer KEY"


class Gate:
    """Knows the server's keys: those of one tenant, those of a file of tenants, or none.

    api_keys: of one tenant.
    keys: of a file.
    admin_key: of the operator; None refuses what needs it.
    """

    def __init__(self, api_keys: Sequence[str], keys: Keys | None, admin_key: str | None) -> None:
        self._keys = keys
        self._admin = [] if admin_key is None else _digests_of([admin_key])
        self._digests = _digests_of(api_keys)

    def check(self, access: Access, authorization: str | None) -> KeyUsage | None:
        """Return what belongs to the key of a request, where keys are tenants'.

        authorization: the header; None without it.

        Raises HttpError if the request may not use a route of this access.
        """
        if access == "admin" and not self._admin:
            raise _forbidden("this server has no admin key; start it with --admin-key")
        is_for_keys = access in ("keys", "watch")
        has_keys = self._keys is not None or (is_for_keys and bool(self._digests))
        has_keys |= access == "watch" and bool(self._admin)  # what all requests do is not for all
        if access == "all" or not (has_keys or access == "admin"):
            return None
        kind, _, given = (authorization or "").partition(" ")
        token = given.strip().encode("latin-1") if kind.lower() == "bearer" else b""
        if access != "keys" and _is_one_of(token, self._admin):
            return None
        if access == "admin":
            raise _unauthorized("this route needs the admin key")
        if self._keys is None:
            if not _is_one_of(token, self._digests):
                raise _unauthorized(NO_KEY)
            return None
        usage = self._keys.find(token)
        if usage is None:
            raise _unauthorized(NO_KEY)
        if self._keys.has_expired(usage.entry):
            raise _unauthorized("this key is no longer valid; ask the operator of the server for another one")
        if access == "operator":
            raise _forbidden("this route needs the admin key, as it tells of all tenants")
        return usage


def _digests_of(keys: Sequence[str]) -> list[bytes]:
    # In a header, some clients encode what is not ASCII as latin-1, and others as UTF-8.
    return [digest_of(key.encode(coding)) for key in keys for coding in ("latin-1", "utf-8")]


def _is_one_of(token: bytes, digests: Sequence[bytes]) -> bool:
    """Return whether a token has one of these digests. The time it takes tells nothing about them."""
    digest = digest_of(token)
    matches = [hmac.compare_digest(digest, known) for known in digests]  # all of them
    return any(matches)


def _forbidden(message: str) -> HttpError:
    return HttpError(403, message, code="not_allowed")


def _unauthorized(message: str) -> HttpError:
    headers = ((b"www-authenticate", b"Bearer"),)
    return HttpError(401, message, code="invalid_api_key", headers=headers)
