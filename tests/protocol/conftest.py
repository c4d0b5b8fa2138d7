"""Fixtures of the tests of bodies."""

import pytest

from paged.architectures.hf_config import read_config
from paged.checkpoints.model_directory import resolve
from paged.engine.model_text import ModelText
from paged.options.config import EngineConfig


@pytest.fixture(scope="session")
def text() -> ModelText:
    """Return the tokenizer and the templates of the demo model."""
    directory = resolve("demo")
    return ModelText(EngineConfig("demo"), directory, read_config(directory))
