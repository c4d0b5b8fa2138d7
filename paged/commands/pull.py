"""`paged pull`: download a model of the hub."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.errors import CheckpointError, ConfigError, UnsupportedModelError
from ..options.config import EngineConfig
from ..runner.sizes import GIB
from .common import complain
from .headings import MODEL

if TYPE_CHECKING:
    from ..checkpoints.library.pull import Progress, RemoteFile, RemoteModel

_HELP = "A model of the hub: owner/name, or for one GGUF file of several owner/name:QUANT such as :Q4_K_M."
_REVISION_HELP = "Branch, tag or commit on the hub. [default: the hub's default branch]"


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_HELP, show_default=False)],
    revision: Annotated[
        str | None, typer.Option(help=_REVISION_HELP, show_default=False, rich_help_panel=MODEL)
    ] = None,
) -> int:
    """Download a model of the hub, with its digests compared. A pull that was cut goes on where it stopped.

    Of several GGUF files it takes the largest that fits this machine.
    """
    from ..checkpoints.library.pull import RemoteModel, without_hub

    repository, _, quantisation = without_hub(model).partition(":")
    remote = RemoteModel(repository, revision)
    if model.endswith(":"):
        raise CheckpointError(f"{model}: give a quantisation behind the colon, or leave the colon out")
    chosen = chosen_quantisation(remote, quantisation or None)
    name = repository if chosen is None else f"{repository}:{chosen}"
    files = remote.files_of(chosen)
    with _Bar(sum(file.size for file in files)) as bar:
        place = remote.pull(files, bar.show)
    print(f"{name}: {sum(file.size for file in files):,} bytes in {place}")
    return 0


def chosen_quantisation(remote: RemoteModel, wanted: str | None) -> str | None:
    """Return the quantisation to take; None for safetensors. Name it in a line where it was chosen here."""
    if wanted is not None or remote.has_safetensors or not remote.quantisations:
        return wanted
    quantisations = remote.quantisations
    if len(quantisations) == 1:
        return next(iter(quantisations))
    found = largest_that_fits(remote.name, quantisations)
    size = sum(file.size for file in quantisations[found])
    complain(
        f"{remote.name} has {len(quantisations)} GGUF files; {found} of {size / GIB:,.2f} GiB is the largest "
        f"that fits here. {remote.name}:QUANT takes another: {', '.join(quantisations)}"
    )
    return found


def largest_that_fits(repository: str, quantisations: Mapping[str, Sequence[RemoteFile]]) -> str:
    """Return the largest quantisation that has room in an engine, by the headers of its file.

    A request of LEAST_CONTEXT tokens must fit, or of the model's own context if that is less.

    Raises CheckpointError with the reason of the last one if none does.
    """
    from ..device.host_memory import free_on_cpu
    from ..runner.planned import LEAST_CONTEXT, footprint_here

    why = ""
    for name, files in quantisations.items():  # the largest first
        size = sum(file.size for file in files)
        if size > _most_bytes(free_on_cpu()):
            why = f"{name} has {size / GIB:,.2f} GiB, and {free_on_cpu() / GIB:,.2f} GiB are free"
            continue
        try:
            footprint = footprint_here(EngineConfig(f"{repository}:{name}"))
        except (UnsupportedModelError, ConfigError, CheckpointError) as error:
            why = f"{name}: {error}"
            continue
        if footprint.longest >= min(LEAST_CONTEXT, footprint.sizes.max_model_len):
            return name
        why = f"{name}: {footprint}"
    raise CheckpointError(
        f"no GGUF file of {repository} fits this machine; {why}. {repository}:QUANT takes one"
    )


def _most_bytes(free: float) -> float:
    """Return how large a file may be that is worth its headers: a GPU may have room that the RAM has not."""
    import torch

    if torch.cuda.is_available():
        return max(free, torch.cuda.mem_get_info()[1])
    return free


class _Bar:
    """A bar on stderr of the bytes of a pull, from the first of them on."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, progress: Progress) -> None:
        """Show how far the pull is."""
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr)
        self._bar.set_description(progress.file.name, refresh=False)
        self._bar.update(progress.done - self._bar.n)
