"""ModelsFile: models.toml, which gives checkpoints short names, options and defaults."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...base.durations import parse_duration
from ...base.errors import ConfigError, PagedError
from ...base.validation import shown
from ...options.config import EngineConfig
from ...options.sampling_params import SamplingParams

VARIABLE = "PAGED_MODELS"  # of the environment: a file in place of the user's
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9][A-Za-z0-9._-]*)?", re.ASCII)
LONGEST_NAME = 128  # of a name
_TEXTS = ("checkpoint", "system", "template")
_TABLES = ("engine", "sampling")
_OWN_KEYS = (*_TEXTS, "keep_alive", *_TABLES)
_ENGINE_KEYS = frozenset(each.name for each in fields(EngineConfig)) - {"model"}
# What only code can give, or what is not a default of requests.
_NO_SAMPLING_KEYS = {"logits_processors", "output_kind", "no_stop_within", "structured_outputs"}
_SAMPLING_KEYS = frozenset(each.name for each in fields(SamplingParams)) - _NO_SAMPLING_KEYS
_HEADER = re.compile(r"\s*\[\s*(?P<key>[^\[\]]+?)\s*\]\s*(#.*)?", re.ASCII)
_PART = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)\s*(\.|$)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model of models.toml.

    name: what commands and requests call it.
    checkpoint: a directory, a GGUF file, a hub id, or "demo".
    system: the system prompt of conversations without one.
    template: a chat template in place of the checkpoint's.
    keep_alive: seconds without a request after which a server unloads it; inf: never; None: the server's own.
    engine: options of `EngineConfig`. sampling: defaults of `SamplingParams`.
    line: the line of its header; 0 for an entry that is in no file.
    """

    name: str
    checkpoint: str
    system: str | None = None
    template: str | None = None
    keep_alive: float | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    line: int = field(default=0, compare=False)


def check_name(name: str) -> str:
    """Return the name if it is valid. Raises ConfigError for other texts, such as a path."""
    if not MODEL_NAME.fullmatch(name) or len(name) > LONGEST_NAME or name == "demo":
        raise ConfigError(
            f"{shown(name)} cannot name a model: take letters, digits, dots, hyphens and underscores, "
            f"perhaps with a tag behind a colon as in qwen:4b, at most {LONGEST_NAME} characters, "
            "and not demo"
        )
    return name


def default_file() -> Path | None:
    """Return the path of the user's file, or the path in PAGED_MODELS; None without a home directory."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    with suppress(RuntimeError):
        # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest
        return (folder if folder.is_absolute() else Path("~/.config").expanduser()) / "paged" / "models.toml"
    return None


class ModelsFile:
    """The models of a file.

    path: the file, which need not exist; None for no file.
    version: of the file that was read, which changes with it; None if there was none. See `version_of`.

    Raises ConfigError, which names the line, for a file that is wrong, and for a named file that is missing.
    """

    def __init__(self, path: Path | None, *, must_exist: bool = False) -> None:
        self.path = path
        self.version = version_of(path)  # before it is read: a later change is seen
        text = ""
        if path is not None:
            try:
                text = path.read_text(encoding="utf-8")
            except (FileNotFoundError, NotADirectoryError):
                if must_exist:
                    raise ConfigError(f"{path}: no such file of models") from None
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise ConfigError(f"{path} cannot be read: {reason}") from None
        self._lines = text.splitlines()
        self.entries = {} if path is None else self._parse(text)

    @classmethod
    def of_user(cls, *, must_exist: bool = True) -> ModelsFile:
        """Return the user's file. must_exist: raise ConfigError if PAGED_MODELS names one that is missing."""
        return cls(default_file(), must_exist=must_exist and VARIABLE in os.environ)

    def find(self, name: str) -> ModelEntry | None:
        """Return the model of this name, in small letters or capitals; None if there is none."""
        return self.entries.get(name.casefold())

    def _parse(self, text: str) -> dict[str, ModelEntry]:
        """Return the entries by their names in small letters."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        found = dict[str, ModelEntry]()
        for name, table in tables.items():
            line = self._line_of((name,))
            where = f"{self.path}, line {line}"
            if not isinstance(table, Mapping):
                raise ConfigError(f"{where}: {shown(name)} is not a table; a model is [{name}] and its keys")
            try:
                check_name(name)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
            if (other := found.get(name.casefold())) is not None:
                raise ConfigError(f"{where}: {name} is the name of a model in line {other.line} already")
            found[name.casefold()] = self._entry(name, table, line)
        for entry in found.values():
            if entry.checkpoint.casefold() in found:
                what = (
                    "its own name"
                    if entry.checkpoint.casefold() == entry.name.casefold()
                    else "another model"
                )
                raise ConfigError(
                    f"{self.path}, line {self._line_of((entry.name, 'checkpoint'))}: the checkpoint of "
                    f"{entry.name} is {shown(entry.checkpoint)}, {what}; give a directory, a file or a hub id"
                )
        return found

    def _entry(self, name: str, table: Mapping[str, Any], line: int) -> ModelEntry:
        self._check_keys((name,), table, _OWN_KEYS)
        values = dict(table)
        for key in _TEXTS:
            value = values.get(key)
            if key in values and (not isinstance(value, str) or not value):
                raise self._wrong((name, key), f"{key} must be a text, got {shown(value)}")
        if "checkpoint" not in values:
            raise ConfigError(f"{self.path}, line {line}: [{name}] has no checkpoint")
        for key, known in (("engine", _ENGINE_KEYS), ("sampling", _SAMPLING_KEYS)):
            part = values.get(key, {})
            if not isinstance(part, Mapping):
                raise self._wrong((name, key), f"{key} must be a table, got {shown(part)}")
            self._check_keys((name, key), part, known)
        try:
            keep_alive = values.pop("keep_alive", None)
            if keep_alive is not None:
                values["keep_alive"] = parse_duration("keep_alive", keep_alive)
        except PagedError as error:
            raise self._wrong((name, "keep_alive"), str(error)) from None
        self._check_values(name, "engine", lambda given: EngineConfig(values["checkpoint"], **given), values)
        self._check_values(name, "sampling", lambda given: SamplingParams(**given), values)
        return ModelEntry(name=name, line=line, **values)

    def _check_values(self, name: str, key: str, make: Any, values: Mapping[str, Any]) -> None:
        given = values.get(key, {})
        try:
            make(given)
        except PagedError as error:
            wrong = next((each for each in given if each in str(error)), None)
            place = (name, key) if wrong is None else (name, key, wrong)
            raise self._wrong(place, str(error)) from None

    def _check_keys(self, place: tuple[str, ...], table: Mapping[str, Any], known: Any) -> None:
        import difflib

        for key in table:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it may have {', '.join(sorted(known))}"
                raise self._wrong((*place, key), f"[{'.'.join(place)}] has no key {shown(key)}; {hint}")

    def _wrong(self, place: tuple[str, ...], message: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {self._line_of(place)}: {message}")

    def _line_of(self, place: tuple[str, ...]) -> int:
        """Return the line of a table's header, or of a key in it; else the nearest line above."""
        header: tuple[str, ...] = ()
        best = 1
        most = 0
        for number, line in enumerate(self._lines, 1):
            found = _header_of(line)
            if found is not None:
                header = found
                path = header
            else:
                key = _PART.match(line.partition("=")[0].strip())
                if "=" not in line or key is None:
                    continue
                path = (*header, *_parts(line.partition("=")[0].strip()))
            same = next((i for i, (a, b) in enumerate(zip(path, place, strict=False)) if a != b), None)
            depth = min(len(path), len(place)) if same is None else same
            if depth > most:
                best, most = number, depth
        return best

    # Changes

    def set(self, name: str, checkpoint: str) -> None:
        """Add a model, or raise ConfigError if the name or the checkpoint cannot be one.

        The checkpoint may be the name of another entry, whose options and defaults are copied.
        """
        check_name(name)
        if checkpoint.casefold() == name.casefold():
            raise ConfigError(f"{name} cannot be an alias of itself; name a directory, a file or a hub id")
        if not checkpoint.isprintable() or not checkpoint:
            raise ConfigError(f"{shown(checkpoint)} is no directory, file or hub id")
        with self._changing() as lines:
            current = type(self)(self.path)
            if (known := current.find(name)) is not None:
                raise ConfigError(
                    f"{name} is the name of a model in {self.path}, line {known.line}, already; "
                    f"paged models rm {known.name} forgets it"
                )
            source = current.find(checkpoint)
            block = _block_of(lines, source.name) if source is not None else []
            if block:
                assert source is not None
                added = [_renamed(line, source.name, name) for line in block]
            else:
                added = [f"[{_key(name)}]", f"checkpoint = {_quoted(checkpoint)}"]
            lines += ["", *added] if lines else added

    def remove(self, name: str) -> bool:
        """Forget a model, whose checkpoint stays. Return whether there was one."""
        with self._changing() as lines:
            entry = type(self)(self.path).find(name)
            if entry is None:
                return False
            kept = [line for line, owner in _owned(lines) if owner != entry.name]
            lines[:] = kept
        return True

    @contextmanager
    def _changing(self) -> Iterator[list[str]]:
        """Let the lines be changed, and write them as a whole if the result is a valid file."""
        if self.path is None:
            raise ConfigError("there is no home directory for models.toml; --models names a file")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_name(f".{self.path.name}.lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
                lines = text.splitlines()
                yield lines
                new = "\n".join(lines).strip("\n")
                new = f"{new}\n" if new else ""
                self._lines = new.splitlines()
                self.entries = self._parse(new)
                written = self.path.with_name(f".{self.path.name}.new")
                written.write_text(new, encoding="utf-8")
                written.replace(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None


def version_of(path: Path | None) -> tuple[int, ...] | None:
    """Return what changes with a file: its inode, size and time; None if there is none."""
    with suppress(OSError):
        status = path.stat() if path is not None else None
        return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
    return None


def _header_of(line: str) -> tuple[str, ...] | None:
    match = _HEADER.fullmatch(line)
    return None if match is None else _parts(match["key"])


def _parts(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key."""
    return tuple(_unquoted(part) for part, _ in _PART.findall(key))


def _unquoted(part: str) -> str:
    if part.startswith('"'):
        with suppress(ValueError):
            return str(json.loads(part))
    return part.strip("'\"")


def _owned(lines: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each line with the name of the model whose table it is in."""
    owner = None
    for line in lines:
        header = _header_of(line)
        if header is not None:
            owner = header[0]
        yield line, owner


def _block_of(lines: list[str], name: str) -> list[str]:
    """Return the lines of a model, without blank ones at the end."""
    block = [line for line, owner in _owned(lines) if owner == name]
    while block and not block[-1].strip():
        block.pop()
    return block


def _renamed(line: str, old: str, new: str) -> str:
    header = _header_of(line)
    if header is None or header[0] != old:
        return line
    return f"[{'.'.join([_key(new), *header[1:]])}]"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
