"""Completions and chat completions, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...protocol.calls import ChatCall, GeneratingCall
from ...protocol.errors import failure_of
from ...requests.request import RequestOutput
from ..front_end import FrontEnd, new_identity
from ..http.exchange import Exchange, until_disconnect
from ..http.failures import HttpError
from ..http.streams import DONE, StreamedResponse, event
from ..served_engine import OutputStream
from .readers import MergedOutputs, finished_outputs
