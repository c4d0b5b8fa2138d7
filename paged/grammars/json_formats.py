"""Formats of JSON schemas' strings. JSON Schema calls a format an annotation: an unknown one says nothing."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any

from ..base.validation import shown

logger = logging.getLogger(__name__)
MAX_LOGGED = 100  # a stranger may invent any number of formats


@lru_cache(maxsize=1024)
def _is_known(name: str) -> bool:
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "format": name})
    error: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return not error


_logged = set[str]()


def is_known_format(name: Any) -> bool:
    """Return whether the library enforces this format. Log an unenforced format once."""
    if isinstance(name, str) and _is_known(name):
        return True
    text = shown(name)
    if text not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add(text)
        logger.warning("JSON schema: format %s is not known, and is ignored as an annotation", text)
    return False
