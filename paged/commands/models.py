"""`paged models`: the models that are here. `show`, `rm` and `alias` are about one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import PagedError
from ..options.config import EngineConfig
from ..simulate.report import table
from .common import CliError
from .headings import MODEL, CommandGroup, GroupedCommand
from .moments import ago

if TYPE_CHECKING:
    from ..checkpoints.library.local import LocalModel
    from ..checkpoints.library.models_file import ModelEntry, ModelsFile
    from ..checkpoints.weights_cache.folder import Kept

models = typer.Typer(cls=CommandGroup)
MODELS_FILE_HELP = """The file of models with names of your own.
[default: PAGED_MODELS, else paged/models.toml in the user's configuration, $XDG_CONFIG_HOME]"""
File = Annotated[
    Path | None, typer.Option("--models", help=MODELS_FILE_HELP, show_default=False, rich_help_panel=MODEL)
]
_ARCHITECTURES_HELP = "List the native architectures, and the models of each. [default: off]"
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name that paged models lists.")]


@models.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    architectures: Annotated[bool, typer.Option("--architectures", help=_ARCHITECTURES_HELP)] = False,
    models: File = None,
) -> int:
    """List the models that are here, from the hub's cache and models.toml."""
    if context.invoked_subcommand is not None:
        return 0
    if architectures:
        return _list_architectures()
    file = models_file(models)
    from ..checkpoints.library.local import hub_cache, local_models

    found = local_models()
    packed = packed_weights(found)
    rows = [
        [each.name, each.format, f"{each.num_bytes:,}", ago(each.last_use), _packed(packed[each.name])]
        for each in found
    ]
    rows += [[entry.name, f"names {entry.checkpoint}", "", "", ""] for entry in file.entries.values()]
    if rows:
        print("\n".join(table([["name", "format", "bytes", "last used", "weights kept packed"], *rows])))
    else:
        print("no models yet: `paged pull OWNER/NAME` downloads one, `--model demo` comes with paged")
    print(f"{sum(each.num_bytes for each in found):,} bytes in {hub_cache()}")
    return 0


def _list_architectures() -> int:
    from ..architectures.families.multimodal import NATIVE

    width = max(map(len, NATIVE))
    for name, known in NATIVE.items():
        print(f"{name:{width}}  {known.models}")
    return 0


def models_file(path: Path | None) -> ModelsFile:
    """Return the file of models: the one of --models, else the user's."""
    from ..checkpoints.library.models_file import ModelsFile

    return ModelsFile.of_user() if path is None else ModelsFile(path, must_exist=True)


def packed_weights(found: Sequence[LocalModel]) -> dict[str, list[Kept]]:
    """Return the packed weights of each model by its name, as far as the digests of its files are known."""
    from ..checkpoints.weights_cache.folder import WeightsCache

    result = defaultdict[str, list["Kept"]](list)
    cache = WeightsCache.chosen(None, create=False)
    if cache is None or not cache.kept():
        return result
    from ..checkpoints.open_file import stamp_of
    from ..checkpoints.weights_cache.content import known_digest
    from ..checkpoints.weights_cache.file import listed

    kept = [*listed(cache)]
    for model in found:
        digest = known_digest(cache, [stamp_of(each.stat()) for each in model.files])
        if digest is not None:
            result[model.name] = [each.kept for each in kept if each.content == digest]
    return result


def _packed(kept: Sequence[Kept]) -> str:
    return f"{sum(each.num_bytes for each in kept):,} bytes" if kept else "-"


@models.command(cls=GroupedCommand)
def show(name: Name, models: File = None) -> int:
    """Show a model: its context, format, template, and what a start will take."""
    from ..checkpoints.library.names import entry_of

    entry = entry_of(name, models_file(models))
    for key, value in described(entry):
        print(f"{key:16}{value}")
    return 0


def described(entry: ModelEntry) -> Iterator[tuple[str, str]]:
    """Yield what there is to say about a model. Raises what an engine of it would, but for its memory."""
    from ..architectures.hf_config import read_config
    from ..chat.chat_format import ChatFormat
    from ..checkpoints.model_directory import resolve_headers
    from ..engine.model_text import ModelText
    from ..runner.planned import footprint_here
    from ..simulate.plan import PackedStart

    config = EngineConfig(entry.checkpoint, **entry.engine)
    footprint = footprint_here(config)
    directory = resolve_headers(config.model, config.revision)
    model = read_config(directory)
    yield "name", entry.name
    yield "checkpoint", entry.checkpoint
    yield "architecture", model.architecture
    yield "context", f"{footprint.sizes.max_model_len:,} tokens"
    yield "format", footprint.model.in_files.formats or str(model.dtype)
    yield "template", _template(lambda: ChatFormat.of_model(ModelText(config, directory, model)))
    for key in ("system", "template"):
        if getattr(entry, key) is not None:
            yield f"own {key}", repr(getattr(entry, key))
    for key in ("engine", "sampling"):
        for option, value in getattr(entry, key).items():
            yield f"{key}", f"{option} = {value!r}"
    yield "memory", str(footprint)
    start = PackedStart.of(footprint)
    if start is not None:
        yield (
            "a start",
            "maps packed weights" if start.is_kept else "packs the weights first: see paged warmup",
        )
    if not footprint.fits:
        yield (
            "does not fit",
            f"a request of {footprint.sizes.max_model_len:,} tokens; paged plan says what would",
        )


def _template(format_of: Any) -> str:
    try:
        found = format_of()
    except PagedError as error:
        return f"none: {error}"
    tools = "no calls of tools" if found.tools is None else f"calls of tools as {found.tools.name}"
    return f"of the checkpoint; {tools}"


@models.command(cls=GroupedCommand)
def rm(name: Name, models: File = None) -> int:
    """Remove a model: its files, and the packed weights that no other one uses. Of an alias, the name alone.

    Engines that run go on with it.
    """
    print(removed(name, models_file(models)))
    return 0


def removed(name: str, file: ModelsFile) -> str:
    """Remove a model, or forget a name of models.toml. Return what was done, in words.

    Raises CliError if there is none of this name.
    """
    from ..checkpoints.library.local import find_local, local_models, remove_local
    from ..checkpoints.weights_cache.folder import WeightsCache

    if file.find(name) is not None:
        entry = file.find(name)
        file.remove(name)
        assert entry is not None
        return f"forgot the name {entry.name}; its checkpoint {entry.checkpoint} stays"
    model = find_local(name)
    if model is None:
        raise CliError(f"no model is here as {name!r}; paged models lists what is")
    packed = packed_weights(local_models())
    shared = {each.path for other, kept in packed.items() if other != model.name for each in kept}
    num_bytes = remove_local(model)
    own = [each for each in packed[model.name] if each.path not in shared]
    for each in own:
        WeightsCache(each.path.parent, create=False).remove(each.path)
    more = f", and {sum(each.num_bytes for each in own):,} bytes of its packed weights" if own else ""
    return f"removed {model.name}: {num_bytes:,} bytes{more}"


@models.command(cls=GroupedCommand)
def alias(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A directory, a GGUF file, a hub id, or another name.")
    ],
    models: File = None,
) -> int:
    """Give a checkpoint a name of your own in models.toml. Of another alias the options are copied, too."""
    from ..checkpoints.library.models_file import ModelsFile

    file = ModelsFile(models) if models is not None else ModelsFile.of_user(must_exist=False)
    path = Path(checkpoint).expanduser()
    if checkpoint != "demo" and file.find(checkpoint) is None and path.exists():
        checkpoint = str(path.absolute())  # the name is used elsewhere, too
    elif checkpoint.startswith((".", "/", "~")):
        raise CliError(f"no such directory or GGUF file: {checkpoint}")
    file.set(name, checkpoint)
    print(f"{name} is {file.entries[name.casefold()].checkpoint} in {file.path}")
    return 0
