"""Gate: whether a request may use a route, by the key that it bears."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from ...protocol.endpoints import Access
from ..http.failures import HttpError
from .key_file import digest_of
from .keys import Keys
from .limits import KeyUsage

NO_KEY = "this server needs a key; send it in the header authorization: Bearer KEY"


class Gate:
    """Knows the server's keys: those of one tenant, those of a file of tenants, or none.

    api_keys: of one tenant.
    keys: of a file.
    """

    def __init__(self, api_keys: Sequence[str], keys: Keys | None) -> None:
        self._keys = keys
        # In a header, some clients encode what is not ASCII as latin-1, and others as UTF-8.
        self._digests = [digest_of(key.encode(coding)) for key in api_keys for coding in ("latin-1", "utf-8")]

    def check(self, access: Access, authorization: str | None) -> KeyUsage | None:
        """Return what belongs to the key of a request, where keys are tenants'.

        authorization: the header; None without it.

        Raises HttpError if the request may not use a route of this access.
        """
        if access == "all" or (self._keys is None and (access != "keys" or not self._digests)):
            return None
        kind, _, given = (authorization or "").partition(" ")
        token = given.strip().encode("latin-1") if kind.lower() == "bearer" else b""
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
            raise HttpError(403, "this route is the operator's", code="not_allowed")
        return usage


def _is_one_of(token: bytes, digests: Sequence[bytes]) -> bool:
    """Return whether a token has one of these digests. The time it takes tells nothing about them."""
    digest = digest_of(token)
    matches = [hmac.compare_digest(digest, known) for known in digests]  # all of them
    return any(matches)


def _unauthorized(message: str) -> HttpError:
    headers = ((b"www-authenticate", b"Bearer"),)
    return HttpError(401, message, code="invalid_api_key", headers=headers)
