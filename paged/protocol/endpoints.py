"""Endpoints: the URL paths whose bodies become calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError
from ..validation import shown
from .calls.call import Call
from .calls.chat import ChatCall
from .calls.completions import CompletionCall
from .calls.generate import GenerateCall
from .calls.tokens import DetokenizeCall, TokenizeCall
from .calls.vectors import EmbeddingCall, ScoreCall
from .limits import Limits

ENDPOINTS: dict[str, type[Call]] = {
    "/v1/chat/completions": ChatCall,
    "/v1/completions": CompletionCall,
    "/v1/embeddings": EmbeddingCall,
    "/v1/score": ScoreCall,
    "/tokenize": TokenizeCall,
    "/detokenize": DetokenizeCall,
    "/generate": GenerateCall,
    "/generate/batch": GenerateCall,
}
DEFAULT_LIMITS = Limits()


def parse_call(url: Any, body: Any, limits: Limits = DEFAULT_LIMITS) -> Call:
    """Parse the body of a request to a URL path.

    Raises RequestError or UnknownArgumentError, whose param is the field that is wrong.
    """
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise RequestError(f"url {shown(url)} is not supported; it is one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, Mapping):
        raise RequestError(f"body must be an object, got {shown(body)}")
    return ENDPOINTS[url](body, limits)
