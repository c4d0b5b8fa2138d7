"""`paged cache`: the packed weights that are kept for later starts. `paged cache rm` removes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import ResourceError
from ..simulate.report import table
from .common import CliError
from .headings import MODEL, CommandGroup, GroupedCommand
from .moments import ago

if TYPE_CHECKING:
    from ..checkpoints.weights_cache.file import Listed

cache = typer.Typer(cls=CommandGroup)
_HELP = "The folder. [default: paged/weights in the user's cache ($XDG_CACHE_HOME)]"
Folder = Annotated[
    Path | None, typer.Option("--weights-cache", help=_HELP, show_default=False, rich_help_panel=MODEL)
]
_NAMES_HELP = "Names that paged cache lists, or their beginnings. [default: all]"
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=_NAMES_HELP, show_default=False)]


@cache.callback(invoke_without_command=True)
def root(context: typer.Context, weights_cache: Folder = None) -> int:
    """List the packed weights that are stored, the most recently used first, or remove them."""
    if context.invoked_subcommand is not None:
        return 0
    found = _listed(weights_cache)
    rows = [
        [each.kept.path.stem, f"{each.kept.num_bytes:,}", ago(each.kept.last_use), each.title or "damaged"]
        for each in found
    ]
    if rows:
        print("\n".join(table([["name", "bytes", "last used", "weights"], *rows])))
    print(f"{sum(each.kept.num_bytes for each in found):,} bytes in {_folder(weights_cache)}")
    kept = {each.content for each in found}
    for name, digest in _named(weights_cache).items():
        if digest not in kept:
            _warn(
                f"{name} of models.toml has no packed weights here any more; paged warmup {name} packs them"
            )
    return 0


@cache.command(cls=GroupedCommand)
def rm(
    names: Names = None,
    weights_cache: Folder = None,
) -> int:
    """Remove packed weights. Running engines are not affected."""
    from ..checkpoints.weights_cache.folder import WeightsCache

    found = _listed(weights_cache)
    chosen = {each.kept: None for each in found if not names}
    for name in names or []:
        own = [each.kept for each in found if name and each.kept.path.stem.startswith(name)]
        if not own:
            raise CliError(f"no packed weights are kept as {name!r}; paged cache lists what is")
        chosen |= dict.fromkeys(own)
    named = _named(weights_cache)
    for each in found:
        if each.kept in chosen and (of := [name for name, digest in named.items() if digest == each.content]):
            _warn(
                f"{each.kept.path.stem} is of {', '.join(of)} in models.toml, whose next load packs it again"
            )
    for kept in chosen:
        WeightsCache(kept.path.parent, create=False).remove(kept.path)
    left = [kept for kept in chosen if kept.path.exists()]
    if left:
        raise ResourceError(f"{left[0].path} cannot be removed")
    print(f"removed {len(chosen)} files of {sum(kept.num_bytes for kept in chosen):,} bytes")
    return 0


def _listed(folder: Path | None) -> list[Listed]:
    """Return the packed weights in a folder; nothing if there is no folder. Raises ResourceError."""
    from ..checkpoints.weights_cache.file import listed
    from ..checkpoints.weights_cache.folder import CacheError, WeightsCache

    place = _folder(folder)
    if not place.exists():
        return []
    try:
        return [*listed(WeightsCache(place, create=False))]
    except CacheError as error:
        raise ResourceError(str(error)) from error


def _named(folder: Path | None) -> dict[str, str]:
    """Return the digests of the models of models.toml, as far as they are known, by name."""
    from ..checkpoints.library.named import named_digests
    from ..checkpoints.weights_cache.folder import CacheError, WeightsCache

    place = _folder(folder)
    if not place.exists():
        return {}
    try:
        return named_digests(WeightsCache(place, create=False))
    except CacheError:
        return {}


def _warn(message: str) -> None:
    print(f"paged: warning: {message}", file=sys.stderr)


def _folder(folder: Path | None) -> Path:
    from ..checkpoints.weights_cache.folder import default_place

    place = default_place() if folder is None else folder.expanduser()
    if place is None:
        raise ResourceError("there is no home directory; --weights-cache names a folder")
    return place
