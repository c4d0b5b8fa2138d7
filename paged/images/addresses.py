"""Where an image may be fetched from: https: URLs of named hosts, at public addresses.

Of a URL only one spelling is taken. A host is compared as text with those that the operator names, which are
names and no addresses; and whatever it resolves to must be a public address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import quote, urljoin

from ..base.errors import RequestError
from ..base.validation import shown
from ..options.media_domains import HOST, HTTPS_PORT

MOST_URL = 8192  # characters; signed URLs have up to about 2,000
# A host with an optional port, a path and a query; a fragment is not sent.
_URL = re.compile(rf"https://({HOST})(?::(\d{{1,5}}))?((?:[/?][^#]*)?)(?:#.*)?", re.IGNORECASE | re.ASCII)
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
_SAFE = "%/:=&?~!$,;'@()*[]+-._"  # stays as it is written
# Of IANA's registries of special addresses, and of clouds: what is not one host on the internet.
_SPECIAL_4 = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24"),
    *("192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
    *("224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
)
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")  # outside of it: mapped IPv4, NAT64, link-local and others
# Teredo and other protocols, documentation, 6to4, AS112, documentation again.
_SPECIAL_6 = ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20")
_NETWORKS_4 = tuple(map(ipaddress.IPv4Network, _SPECIAL_4))
_NETWORKS_6 = tuple(map(ipaddress.IPv6Network, _SPECIAL_6))


class Address(NamedTuple):
    """What a URL names: a host, its port, and the path with the query."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The host, with its port unless that is the usual one."""
        return self.host if self.port == HTTPS_PORT else f"{self.host}:{self.port}"


def is_public(address: str) -> bool:
    """Return whether an address belongs to one host on the internet."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return not any(found in network for network in _NETWORKS_4)
    if found.scope_id is not None or found not in _PUBLIC_6:
        return False
    return not any(found in network for network in _NETWORKS_6)


def place_of(name: str, url: str, domains: Sequence[str]) -> Address:
    """Return what a URL names. Raises RequestError unless it is https: and of one of the domains.

    domains: names of hosts in lower case, with a port if it is not 443.
    """
    if len(url) > MOST_URL:
        raise RequestError(f"{name} has {len(url):,} characters; a URL may have {MOST_URL:,}", param=name)
    if _UNSAFE.search(url):
        raise RequestError(
            f"{name} must have %20 for a blank, and no control characters or backslashes, got {shown(url)}",
            param=name,
        )
    found = _URL.fullmatch(url)
    if found is None:
        raise RequestError(
            f"{name} must be such as https://host.example/image.png: a name of ASCII letters, without a user "
            f"and without a dot at its end; got {shown(url)}",
            param=name,
        )
    host, port, rest = found.groups()
    path = quote(rest, safe=_SAFE)
    place = Address(host.lower(), int(port or HTTPS_PORT), path if path.startswith("/") else f"/{path}")
    if place.authority not in domains:
        raise RequestError(
            f"{name} is at {place.authority}, which is none of allowed_media_domains "
            "(--allowed-media-domains)",
            param=name,
        )
    return place


def redirected(name: str, place: Address, location: str, domains: Sequence[str]) -> Address:
    """Return where a redirect leads, on the same host. Raises RequestError for another one."""
    here = f"https://{place.authority}{place.path}"
    try:
        url = urljoin(here, location)
    except ValueError:  # such as "//[x"
        url = location
    found = place_of(f"{name}: its redirect", url, domains)
    if found.authority != place.authority:
        raise RequestError(
            f"{name}: {place.authority} redirects to another host, {found.authority}; give its own URL",
            param=name,
        )
    return found
