"""The models that were downloaded: which there are, and how one goes away without touching anything else.

They lie in huggingface_hub's cache, which other programs share: ``models--OWNER--NAME/snapshots/COMMIT/FILE``, each
file a link to ``blobs/HASH``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from esp_edge.errors import ConfigError, ModelDownloadError, ModelFileError

__all__ = [
    "BUNDLED",
    "Download",
    "bundled",
    "delete",
    "delete_unfinished",
    "download_root",
    "downloads",
    "model_names",
    "unfinished",
]

BUNDLED = "smollm2"
_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Download:
    """One model of the download cache.

    Attributes:
        name: what ``-m`` takes, ``owner/repo:QUANT``.
        repo: ``owner/repo``.
        files: its parts in order, as links in the snapshot that ``-m`` takes it from.
        others: links of the same name in other snapshots.
        complete: no part is missing.
    """

    name: str
    repo: str
    files: tuple[Path, ...]
    others: tuple[Path, ...] = ()
    complete: bool = True

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(path.stat().st_size for path in self.files)


# -- what is there ---------------------------------------------------------------------------------------------------


def download_root() -> Path:
    """huggingface_hub's cache, as ``HF_HOME`` and ``HF_HUB_CACHE`` say."""
    from huggingface_hub import constants  # noqa: PLC0415 - not needed for --help

    return Path(constants.HF_HUB_CACHE).absolute()


def model_names() -> list[str]:
    """What ``-m`` takes without a download."""
    return [BUNDLED] * (bundled() is not None) + [found.name for found in downloads() if found.complete]


def bundled() -> Path | None:
    """The file of the bundled model, if it is installed."""
    from esp_edge.models import hub  # noqa: PLC0415 - not needed for --help

    try:
        return hub.resolve(BUNDLED, offline=True)
    except ModelFileError:
        return None


def downloads() -> list[Download]:
    """Every model of the download cache, by name."""
    found: list[Download] = []
    for repo, folder in _repos():
        with suppress(OSError):  # removed meanwhile
            found += _downloads_of(repo, folder)
    return sorted(found, key=lambda download: download.name.lower())


def unfinished() -> list[tuple[str, Path]]:
    """(owner/repo, file) of every download that was interrupted."""
    return [(repo, part) for repo, folder in _repos() for part in sorted((folder / "blobs").glob("*.incomplete"))]


def _repos() -> Iterator[tuple[str, Path]]:
    with suppress(OSError):  # no cache, or one that may not be read
        for folder in sorted(download_root().iterdir()):
            parts = folder.name.split("--")
            if folder.name.startswith(_PREFIX) and len(parts) == 3 and all(parts) and folder.is_dir():
                yield f"{parts[1]}/{parts[2]}", folder


def _snapshots(folder: Path) -> list[Path]:
    """That of ``main`` first, then the newest: the order in which ``-m`` looks through them."""
    main = ""
    with suppress(OSError):
        main = (folder / "refs" / "main").read_text("utf-8", "replace").strip()
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return sorted(found, key=lambda path: (path.name != main, -path.stat().st_mtime, path.name))


def _downloads_of(repo: str, folder: Path) -> Iterator[Download]:
    links: dict[str, list[list[Path]]] = {}  # file without its part number -> parts, a snapshot each
    quants: dict[str, str | None] = {}
    for snapshot in _snapshots(folder):
        for stem, files in _groups(snapshot).items():
            quant, is_model = _choice(repo, files)
            if is_model:
                quants.setdefault(stem, quant)
                links.setdefault(stem, []).append([snapshot / name for name in files])
    taken: set[str | None] = {""}
    for stem, (newest, *older) in links.items():
        quant = quants[stem]
        label = newest[0].name.removesuffix(".gguf") if quant is None or quant in taken else quant
        taken.add(label)
        others = tuple(path for version in older for path in version)
        yield Download(f"{repo}:{label}", repo, tuple(newest), others, quant is not None)


def _groups(snapshot: Path) -> dict[str, list[str]]:
    """File without its part number -> files, all relative to the snapshot; links to nothing are left out."""
    from esp_edge.models import hub  # noqa: PLC0415 - not needed for --help

    groups: dict[str, list[str]] = {}
    for path in sorted(snapshot.rglob("*.gguf")):
        if path.is_file():
            name = path.relative_to(snapshot).as_posix()
            groups.setdefault(hub.PART.sub("", name), []).append(name)
    return groups


def _choice(repo: str, files: Sequence[str]) -> tuple[str | None, bool]:
    """Quantisation that files of one name stand for (None = parts are missing), and whether they are a model."""
    from esp_edge.models import hub  # noqa: PLC0415 - not needed for --help

    try:
        return hub.choose(repo, None, dict.fromkeys(files)).quant, True
    except ModelDownloadError:
        return None, hub.PART.search(files[0]) is not None


# -- removing --------------------------------------------------------------------------------------------------------


def delete(download: Download) -> None:
    """Remove a download: its links, the blobs that nothing else points to, and folders that became empty.

    Raises:
        ConfigError: it really lies outside of the cache.
        OSError: the system does not allow it.
    """
    links = download.files + download.others
    repo = _folder(download.repo)
    inside = repo / "blobs"
    for folder in (*(link.parent for link in links), inside):
        _check_inside(folder)
    blobs = {link.resolve() for link in links}
    for link in links:
        link.unlink()
    for blob in blobs - {path.resolve() for path in _links(repo)}:
        if blob.parent == inside.resolve():  # a link may point to a file of the user's own
            blob.unlink(missing_ok=True)
    _clean(repo)


def delete_unfinished(repo: str) -> None:
    """Remove the interrupted downloads of a repository.

    Raises:
        ConfigError: they really lie outside of the cache.
        OSError: the system does not allow it.
    """
    blobs = _folder(repo) / "blobs"
    _check_inside(blobs)
    for part in blobs.glob("*.incomplete"):
        part.unlink(missing_ok=True)
    _clean(_folder(repo))


def _folder(repo: str) -> Path:
    return download_root() / f"{_PREFIX}{repo.replace('/', '--')}"


def _links(repo: Path) -> Iterator[Path]:
    """Every file of a repository's snapshots, of whatever kind."""
    return (path for path in (repo / "snapshots").rglob("*") if path.is_symlink() or path.is_file())


def _check_inside(path: Path) -> None:
    """Raise ConfigError when something to be removed really lies elsewhere, behind a link to another disk."""
    root = download_root()
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{path} lies outside of the cache {root}, in {path.resolve()}: remove it there yourself")


def _clean(repo: Path) -> None:
    """Remove folders without files, and the whole repository when no file of it is left."""
    if not any(_links(repo)):
        _check_inside(repo)
        shutil.rmtree(repo)
        return
    for folder in sorted((repo / "snapshots").rglob("*"), reverse=True):
        if folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):  # not empty
                folder.rmdir()
