"""--max-connections leaves files for what is no connection."""

from __future__ import annotations

import resource

import pytest

from paged.base.errors import ConfigError
from paged.server.http import listener


@pytest.mark.parametrize(("num_files", "most"), [(256, 160), (40, 1), (10**6, 8192), (-1, 8192)])
def test_the_default_is_below_the_limit_of_files(num_files, most, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))
    assert listener.connection_limit(None) == most
    assert listener.connection_limit(1) == 1
    if num_files == 256:
        with pytest.raises(ConfigError, match=r"max_connections must be at most 160, .* 256 files .* 161"):
            listener.connection_limit(161)
