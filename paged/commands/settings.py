"""Options of a command from its flags, the environment and a file, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError, reject_unknown
from .option_texts import SHARES, read_texts, stands_for_another
from .vllm_options import without_options
from .written import note_written

ENV_PREFIX = "PAGED_"
# Read by other parts of the project.
OTHER_VARIABLES = ("DEBUG", "NO_WEIGHTS_CACHE", "MODELS")
# What Kubernetes sets in every container if there is a service named paged, or paged-something.
_OF_KUBERNETES = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_URL_OF_KUBERNETES = re.compile(r"(tcp|udp|sctp)://.*")


def from_environment(types: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the options given by environment variables PAGED_NAME.

    types: the types of the options, by name.

    An empty variable sets nothing. If the option is a list, an empty variable is an error, since an empty
    list of keys would let all clients in.

    Raises ConfigError for a value of a wrong type, UnknownArgumentError for a variable that names no option.
    """
    known = {name.upper(): name for name in types}
    variables: dict[str, str | None] = {name.lower(): text for name, text in _variables(environment)}
    # An empty variable that is no option here gives vLLM's default.
    variables |= {name: None for name, text in variables.items() if not text and name not in types}
    given = {
        name.upper(): text for name, text in without_options("the environment", variables, types).items()
    }
    unknown = [ENV_PREFIX + name for name in given if name not in known and name not in OTHER_VARIABLES]
    reject_unknown("the environment", unknown, [ENV_PREFIX + name for name in known])
    for name, text in given.items():
        if text == "" and name in known and types[known[name]] == list[str]:
            raise ConfigError(f"{ENV_PREFIX}{name} is empty; give it a value, or unset it")
    note_written({known[name]: ENV_PREFIX + name for name in given if name in known})
    return {
        known[name]: _read(known[name], types[known[name]], ENV_PREFIX + name, text)
        for name, text in given.items()
        if name in known and text != ""
    }


def _variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable, text in environment.items():
        name = variable.removeprefix(ENV_PREFIX)
        is_link = _OF_KUBERNETES.fullmatch(name) or (
            name.endswith("PORT") and _URL_OF_KUBERNETES.fullmatch(text)
        )
        if name != variable and not is_link:
            yield name, text


def _read(name: str, kind: Any, where: str, text: str) -> Any:
    """Return an option's value from one text, in which commas or JSON separate several values."""
    if kind == list[str] and name not in SHARES and text[:1] not in ("{", "["):  # an object has commas
        return [part.strip() for part in text.split(",")]
    return read_texts(name, kind, where, [text])


def from_file(file: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a YAML file. Their names may have - or _.

    types: the types of the options, by name. A text is read as in the environment if the option is no text.

    Raises ConfigError if the file is not a mapping, UnknownArgumentError for an unknown option, and OSError
    if the file cannot be read.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that refuses a key that is given twice; PyYAML would take the last value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            keys = [self.construct_object(key, deep=True) for key in own]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise ConfigError(f"{file}: {key!r} is given twice; give it once")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        loader = Loader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        given = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not YAML: {error}") from None
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ConfigError(f"{file}: must be a mapping of options to values, such as port: 8000")
    places = {
        key.value.replace("-", "_"): (f"{file}, line {key.start_mark.line + 1}", key.value)
        for key, _ in node.value
    }
    options: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in options:
            raise ConfigError(f"{file}: {key!r} is given twice; give it once")
        options[name] = value
    options = without_options(str(file), options, types)
    for name in options:
        reject_unknown(places[name][0], [name], types)
    written = {name: ": ".join(place) for name, place in places.items()}
    note_written(written)
    return {
        name: _read(name, types[name], written[name], value)
        if isinstance(value, str) and stands_for_another(name, types[name])
        else value
        for name, value in options.items()
        if value is not None
    }
