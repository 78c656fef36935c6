"""Who may call: API keys, origins, and what of this machine is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from server_fakes import Running, ScriptedEngine, running

from esp_edge.server import pages
from esp_edge.server.settings import ServerSettings, is_loopback
from esp_edge.session import Model, load

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny()) as model:
        yield model


@pytest.fixture
def server(model: Model) -> Iterator[Running]:
    with running(ScriptedEngine(model, lambda _: ["ok"])) as server:
        yield server


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a page in it, beside a file that is nobody's business."""
    folder = tmp_path / "static"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret", "utf-8")
    for name, text in (("index.html", "<p>hello"), ("app.js", "1"), ("style.css", "p{}"), ("deep/x.svg", "<svg/>")):
        (folder / name).write_text(text, "utf-8")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    routes, paths = pages.routes, pages.page_paths
    monkeypatch.setattr(pages, "routes", lambda: routes(folder))
    monkeypatch.setattr(pages, "page_paths", lambda: paths(folder))
    return folder


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["first", "second-\u00e9"[:6]])
def test_any_of_the_keys_opens(model: Model, page: Path, key: str) -> None:
    del page
    settings = ServerSettings(api_keys=("first", "second"))
    with running(ScriptedEngine(model, lambda _: ["ok"]), settings) as server:
        for headers in ({"Authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"X-Api-Key": key}):
            assert server.http.post(CHAT, json=HI, headers=headers).status_code == 200
        assert server.openai(api_key=key).models.list().data[0].id == "llama"
        for headers in ({}, {"Authorization": key}, {"Authorization": "Bearer firs"}, {"X-Api-Key": ""}):
            response = server.http.post(CHAT, json=HI, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="third").models.list()
        for path in ("/metrics", "/props", "/v1/models", "/openapi.json", "/v1/nothing"):
            assert server.http.get(path).status_code == 401
        for path in ("/health", "/v1/health", "/", "/static/app.js"):
            assert server.http.get(path).status_code == 200
        raw = server.http.post(CHAT, json=HI, headers=[(b"x-api-key", b"\xff\xfe")])
        assert raw.status_code == 401


def test_keys_do_not_show() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


# -- origins ---------------------------------------------------------------------------------------------------------


def ask(server: Running, origin: str, **headers: str) -> httpx.Response:
    return server.http.post(CHAT, json=HI, headers={"Origin": origin, **headers})


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://127.0.0.1:8080", "https://localhost", "http://[::1]:5", "http://app.localhost"],
)
def test_pages_of_this_machine_may_call(server: Running, origin: str) -> None:
    response = ask(server, origin)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "null",
        "http://[broken",
    ],
)
def test_other_pages_may_not(server: Running, origin: str) -> None:
    response = ask(server, origin)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in response.headers
    assert server.engine.tickets == []


def test_a_name_that_points_here_is_not_this_machine(server: Running) -> None:
    assert ask(server, "http://evil.example:80", Host="evil.example:80").status_code == 403
    assert ask(server, "http://192.168.1.5:8080", Host="192.168.1.5:8080").status_code == 200
    assert (
        server.http.get("/props", headers={"Host": "evil.example", "Origin": "http://evil.example"}).status_code == 403
    )


def test_origins_can_be_named(model: Model) -> None:
    settings = ServerSettings(cors_origins=("https://chat.example",))
    with running(ScriptedEngine(model, lambda _: ["ok"]), settings) as server:
        assert ask(server, "https://chat.example").headers["access-control-allow-origin"] == "https://chat.example"
        assert ask(server, "https://evil.example").status_code == 403
        assert ask(server, "http://localhost:1").status_code == 200
    with running(ScriptedEngine(model, lambda _: ["ok"]), ServerSettings(cors_origins=("*",))) as server:
        assert ask(server, "https://evil.example").headers["access-control-allow-origin"] == "*"


def test_a_preflight_is_answered_without_a_key(model: Model) -> None:
    headers = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    settings = ServerSettings(api_keys=("k",))
    with running(ScriptedEngine(model, lambda _: ["ok"]), settings) as server:
        good = server.http.options(CHAT, headers={"Origin": "http://localhost:3000", **headers})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "http://localhost:3000"
        bad = server.http.options(CHAT, headers={"Origin": "https://evil.example", **headers})
        assert "access-control-allow-origin" not in bad.headers


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]", "LOCALHOST.", "a.localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "localhost.com", "", "example.com")))


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files(model: Model, page: Path) -> None:
    del page
    with running(ScriptedEngine(model, lambda _: ["ok"])) as server:
        index = server.http.get("/")
        assert index.text == "<p>hello"
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        assert "frame-ancestors 'none'" in index.headers["content-security-policy"]
        for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("deep/x.svg", "image/svg+xml")):
            response = server.http.get(f"/static/{name}")
            assert response.headers["content-type"].split(";")[0] == kind
            assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../secret.txt",
        "/static/..%2fsecret.txt",
        "/static/%2e%2e/secret.txt",
        "/static/deep/../../secret.txt",
        "/static//etc/passwd",
        "/static/link.txt",
        "/static/deep",
        "/static/",
        "/static/app.js%00",
        "/static/..\\secret.txt",
    ],
)
def test_nothing_else_is_served(model: Model, page: Path, path: str) -> None:
    del page
    with running(ScriptedEngine(model, lambda _: ["ok"])) as server:
        connection = httpx.Client(base_url=server.url)
        request = connection.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert connection.send(request).status_code == 404


def test_without_a_page_there_is_a_word(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    routes = pages.routes
    monkeypatch.setattr(pages, "routes", lambda: routes(tmp_path / "nothing"))
    with running(ScriptedEngine(model, lambda _: ["ok"])) as server:
        response = server.http.get("/")
        assert response.status_code == 404
        assert response.headers["content-type"].startswith("text/plain")
        assert "/v1" in response.text
    with running(ScriptedEngine(model, lambda _: ["ok"]), ServerSettings(web=False)) as server:
        assert server.http.get("/").status_code == 404
