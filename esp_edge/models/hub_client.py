"""Models of the Hugging Face hub: from its cache, or over the network with resume.

Files go through huggingface_hub's cache, so other programs share them, and ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``
and ``HF_HUB_OFFLINE`` mean what they mean elsewhere. Its own download cannot be continued by a later call (it deletes
partial files), so the bytes are fetched here into ``blobs/<etag>.incomplete`` and handed to the cache when complete.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import http_get

from esp_edge.errors import EspEdgeError, ModelDownloadError
from esp_edge.models.gguf_checks import one_line
from esp_edge.models.hub import Progress, choose

__all__ = ["find"]

_PATIENCE_S = 15.0  # for a hub that accepts the connection and then says nothing


hub_utils: Any = importlib.import_module("huggingface_hub.utils")  # its names are public but not marked as exported
MAX_HTTP_FILE = 50_000_000_000  # beyond this the hub only speaks Xet


def find(repo: str, quant: str | None, progress: Progress | None, offline: bool | None) -> Path:
    """First file of a model of the hub; see :func:`esp_edge.models.hub.resolve`."""
    try:
        if constants.HF_HUB_OFFLINE if offline is None else offline:
            return _from_cache(repo, quant)
        return _from_hub(repo, quant, progress)
    except EspEdgeError:
        raise
    except Exception as error:  # the hub's HTTP library, and with it its exceptions, changes from version to version
        raise _translated(repo, error) from error


# ----------------------------------------------------------------------------------------------------- from the cache


def _cache_dir() -> Path:
    return Path(constants.HF_HUB_CACHE)


def _repo_folder(repo: str) -> Path:
    return _cache_dir() / f"models--{repo.replace('/', '--')}"


def _snapshots(repo: str) -> list[Path]:
    """Snapshots in the cache: that of ``main`` first, then the newest."""
    folder = _repo_folder(repo)
    found: list[Path] = []
    main = ""
    with suppress(OSError):
        found = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        main = (folder / "refs" / "main").read_text("utf-8").strip()
    return sorted(found, key=lambda path: path.name != main)


def _from_cache(repo: str, quant: str | None) -> Path:
    refused: ModelDownloadError | None = None
    for snapshot in _snapshots(repo):
        files: dict[str, int | None] = {
            path.relative_to(snapshot).as_posix(): None for path in snapshot.rglob("*.gguf") if path.exists()
        }
        try:
            return snapshot / choose(repo, quant, files).files[0]
        except ModelDownloadError as error:
            refused = error
    if refused is not None and quant is not None:
        raise ModelDownloadError(f"{refused} in the cache, and the network is off; go online to fetch it")
    raise ModelDownloadError(f"{repo}: is not in the cache, and the network is off; go online once to fetch it")


# ----------------------------------------------------------------------------------------------------- from the hub


def _from_hub(repo: str, quant: str | None, progress: Progress | None) -> Path:
    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(repo, files_metadata=True, timeout=_PATIENCE_S)
    except Exception:  # whatever is wrong over there, what was downloaded before still serves
        with suppress(ModelDownloadError):
            return _from_cache(repo, quant)
        raise
    files = {item.rfilename: item.size for item in info.siblings or []}
    choice = choose(repo, quant, files)
    paths = [
        _fetch(repo, info.sha or "main", name, size, progress)
        for name, size in zip(choice.files, choice.sizes, strict=True)
    ]
    with suppress(OSError):  # what "main" is now, for a later call without network
        reference = _repo_folder(repo) / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(info.sha or "", "utf-8")
    return paths[0]


def _fetch(repo: str, revision: str, name: str, size: int | None, progress: Progress | None) -> Path:
    cached = _repo_folder(repo) / "snapshots" / revision / name
    if cached.exists() and size is not None and cached.stat().st_size != size:
        _forget(cached)  # a damaged copy: fetch it again
    if not cached.exists() and (size is None or size <= MAX_HTTP_FILE):
        _fetch_blob(repo, revision, name, progress)
    found = Path(hf_hub_download(repo, name, revision=revision, cache_dir=_cache_dir(), endpoint=constants.ENDPOINT))
    if size is not None and found.stat().st_size != size:
        here = found.stat().st_size
        _forget(found)
        raise ModelDownloadError(f"{repo}: {name} arrived with {here} of {size} bytes; run the command again")
    return found


def _forget(pointer: Path) -> None:
    with suppress(OSError):
        pointer.resolve().unlink()
    with suppress(OSError):
        pointer.unlink()


def _fetch_blob(repo: str, revision: str, name: str, progress: Progress | None) -> None:
    """Bring a file into the cache's blob folder, continuing where an earlier call stopped."""
    url = hf_hub_url(repo, name, revision=revision, endpoint=constants.ENDPOINT)
    metadata = get_hf_file_metadata(url)
    if not metadata.etag or metadata.size is None or not re.fullmatch(r"[\w.-]+", metadata.etag):
        return  # hf_hub_download knows what to do with such a server
    blob = _repo_folder(repo) / "blobs" / metadata.etag
    lock = _cache_dir() / ".locks" / _repo_folder(repo).name / f"{metadata.etag}.esp-edge.lock"
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with hub_utils.WeakFileLock(lock):
        if blob.exists():
            return
        partial = blob.with_name(f"{blob.name}.incomplete")
        _check_space(repo, partial, metadata.size)
        _download(url, partial, name, metadata.size, progress)
        _check_blob(repo, name, partial, metadata.etag)
        partial.replace(blob)


def _check_space(repo: str, partial: Path, size: int) -> None:
    needed = size - (partial.stat().st_size if partial.exists() else 0)
    free = shutil.disk_usage(partial.parent).free
    if free < needed:
        raise ModelDownloadError(
            f"{repo}: {needed / 1e9:.1f} GB are needed but {partial.parent} has {free / 1e9:.1f} GB free; "
            "make room or set HF_HOME to another disk"
        )


def _download(url: str, partial: Path, name: str, size: int, progress: Progress | None) -> None:
    if partial.exists() and partial.stat().st_size > size:
        partial.unlink()
    with partial.open("ab") as file, _quiet():
        here = file.tell()
        counted: Any = _CountedFile(file, here, size, name, progress)
        http_get(url, counted, resume_size=here, headers=hub_utils.build_hf_headers(), expected_size=size)


def _check_blob(repo: str, name: str, partial: Path, etag: str) -> None:
    """Compare a file put together from pieces with its SHA-256, which is the etag of large files on the hub."""
    if not re.fullmatch(r"[0-9a-f]{64}", etag):
        return
    digest = hashlib.sha256()
    with partial.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != etag:
        partial.unlink()
        raise ModelDownloadError(f"{repo}: {name} arrived damaged (its SHA-256 differs); run the command again")


class _CountedFile:
    """A file that reports what is written to it; works with every version of huggingface_hub."""

    def __init__(self, file: IO[bytes], here: int, size: int, name: str, progress: Progress | None) -> None:
        self._file, self._size, self._name, self._progress = file, size, name, progress
        self._report(here)

    def _report(self, here: int) -> None:
        if self._progress is not None:
            self._progress(self._name, here, self._size)

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._file.flush()  # what has arrived survives a kill
        self._report(self._file.tell())
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Progress is shown by the caller, not by huggingface_hub's own bars."""
    was_quiet = hub_utils.are_progress_bars_disabled()
    hub_utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            hub_utils.enable_progress_bars()


# ----------------------------------------------------------------------------------------------------- what went wrong


def _translated(repo: str, error: Exception) -> ModelDownloadError:
    return ModelDownloadError(f"{repo}: {_explained(repo, error)}")


def _explained(repo: str, error: Exception) -> str:
    """Cause and fix."""
    if isinstance(error, GatedRepoError):
        return f"is gated; accept its licence at {constants.ENDPOINT}/{repo} and run 'hf auth login' or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        cause = "is neither a file here nor a repository on Hugging Face that you may see"
        return f"{cause}; check the spelling, or run 'hf auth login' if it is private"
    if isinstance(error, HFValidationError):
        return "is not a valid repository name; write owner/repo[:QUANT]"
    if isinstance(error, HfHubHTTPError):
        return f"the hub answered with HTTP status {getattr(error.response, 'status_code', '?')}; try again later"
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
        cause = "is full" if code in (errno.ENOSPC, errno.EDQUOT) else "may not be written"
        return f"the disk of {_cache_dir()} {cause}; make room or set HF_HOME elsewhere, the download then continues"
    shown = one_line(f"{type(error).__name__}: {error}", 120)
    cause = f"the hub cannot be reached and the model is not in the cache ({shown})"
    return f"{cause}; check the network, an interrupted download continues where it stopped"
