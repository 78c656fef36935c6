"""Who may call: API keys, host names, origins, slow clients, and what of this machine is served."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from server_fakes import Running, ScriptedEngine, running
from uvicorn.protocols.http.h11_impl import H11Protocol

from esp_edge.cli.serve import _bound, _graceful_server, _listen
from esp_edge.errors import ConfigError
from esp_edge.server import pages
from esp_edge.server.app import create_app, service_of
from esp_edge.server.security import http_protocol
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


# -- host names ------------------------------------------------------------------------------------------------------


def status(server: Running, path: str, host: str) -> int:
    return server.http.get(path, headers={"Host": host}).status_code


def test_a_page_behind_a_name_that_was_pointed_here_reads_nothing(server: Running) -> None:
    """DNS rebinding: to a browser it is a page of this server, so that a GET has no Origin."""
    hosts = ("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@x")
    for path in ("/props", "/metrics", "/v1/models", "/openapi.json", "/", "/no/such/path"):
        for host in hosts:
            response = server.http.get(path, headers={"Host": host})
            assert response.status_code == 403
            error = response.json()["error"]
            assert error["code"] == "host_not_allowed"
            assert "--allowed-host" in error["message"]
    assert server.http.post(CHAT, json=HI, headers={"Host": "evil.example"}).status_code == 403
    assert server.engine.tickets == []


def test_names_and_addresses_of_this_machine_are_served(server: Running) -> None:
    names = ("localhost", "LocalHost:8080", "localhost.", "app.localhost:1", "127.0.0.1:8080", "127.9.9.9", "[::1]:80")
    for host in (*names, "[::1]", "192.168.1.5:8080", ""):  # nobody can point an address elsewhere
        assert status(server, "/v1/models", host) == 200, host
    for host in ("[::1", "::1:x", "[evil.example]", "[]x", "a b"):
        assert status(server, "/v1/models", host) in (400, 403), host


def test_a_client_without_a_host_header_is_no_browser(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_health_is_told_to_every_name(server: Running) -> None:
    assert status(server, "/health", "evil.example") == status(server, "/v1/health", "evil.example") == 200
    assert status(server, "/health/../props", "evil.example") == 403


def test_further_names_are_served_and_their_page_may_call(model: Model) -> None:
    settings = ServerSettings(allowed_hosts=("chat.example", "Other.Example:80"))
    with running(ScriptedEngine(model, lambda _: ["ok"]), settings) as server:
        for host in ("chat.example", "CHAT.example.:8080", "other.example", "localhost"):
            assert status(server, "/props", host) == 200
        assert status(server, "/props", "evil.example") == 403
        assert ask(server, "http://chat.example:8080", Host="chat.example:8080").status_code == 200
        assert ask(server, "http://evil.example", Host="chat.example").status_code == 403


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (ServerSettings(host="0.0.0.0"), 200),  # it has names that we do not know
        (ServerSettings(host="0.0.0.0", allowed_hosts=("chat.example",)), 403),
        (ServerSettings(host="::1"), 403),
        (ServerSettings(host="::1", allowed_hosts=("*",)), 200),
    ],
)
def test_which_servers_tell_names_apart(model: Model, settings: ServerSettings, expected: int) -> None:
    with running(ScriptedEngine(model, lambda _: ["ok"]), settings) as server:
        assert status(server, "/props", "evil.example") == expected
        assert status(server, "/props", f"127.0.0.1:{server.port}") == 200


def test_a_name_that_was_bound_is_served(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: real(host.replace("desk.lan", "127.0.0.1"), *rest, **more)
    )
    with _listen("desk.lan", 0) as listener:
        settings = _bound(ServerSettings(host="desk.lan"), listener)
        monkeypatch.undo()
    assert settings.host == "127.0.0.1"
    with running(ScriptedEngine(model, lambda _: ["ok"]), settings) as server:
        assert [status(server, "/props", host) for host in ("desk.lan:80", "evil.example")] == [200, 403]


@pytest.mark.parametrize("name", ["", " ", "http://chat.example", "a b", "chat.example/x", "me@chat.example"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed-host must be a name"):
        ServerSettings(allowed_hosts=(name,))


# -- slow clients ----------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(model: Model) -> Iterator[Running]:
    protocol = http_protocol(ServerSettings(header_seconds=0.3))
    with running(ScriptedEngine(model, lambda _: ["ok"] * 5, delay=0.1), http=protocol) as server:
        yield server


def until_closed(server: Running, first: bytes, drip: bytes) -> tuple[float, bytes]:
    """How many seconds a connection lives on which ``drip`` is sent every 50 ms, and what comes meanwhile."""
    start, seen = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", server.port), 0.05) as connection:
        connection.sendall(first)
        while time.monotonic() < start + 5:
            try:
                part = connection.recv(1 << 16)
                seen += part
                if not part:
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break
            with suppress(OSError):
                connection.sendall(drip)
    return time.monotonic() - start, seen


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"G",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",  # the second request of a connection
    ],
)
def test_headers_that_never_end_close_the_connection(impatient: Running, first: bytes) -> None:
    seconds, _ = until_closed(impatient, first, b"x" if first else b"")
    assert 0.2 < seconds < 2


def test_the_command_is_as_impatient() -> None:
    settings = ServerSettings(body_seconds=7)
    app = create_app(None, settings)
    protocol = _graceful_server(app, service_of(app), 1).config.http
    assert isinstance(protocol, type)
    assert issubclass(protocol, H11Protocol)
    assert getattr(protocol, "settings", None) is settings


def test_a_slow_answer_and_a_slow_body_are_not_slow_headers(impatient: Running) -> None:
    assert impatient.text() == "ok" * 5  # takes 0.5 s
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x.localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", impatient.port), 5) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:9])
        time.sleep(0.5)
        connection.sendall(body[9:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    with httpx.Client(base_url=impatient.url) as client:
        for _ in range(3):  # one connection, idle for longer than headers may take
            assert client.get("/health").status_code == 200
            time.sleep(0.4)


@pytest.fixture
def short(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server that waits for a body for 0.3 s, and for nothing else for long."""
    monkeypatch.setattr("esp_edge.server.security.LINGER_SECONDS", 0.2)
    settings = ServerSettings(body_seconds=0.3)
    with running(ScriptedEngine(model, lambda _: ["ok"]), settings, http=http_protocol(settings)) as server:
        yield server


LONG = ["word " * 400] * 100  # more than a connection holds that nobody reads
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("framing", [b"Content-Length: 9000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2328\r\n"])
@pytest.mark.parametrize("drip", [b"", b" "])
def test_a_body_that_never_ends_is_a_408(short: Running, framing: bytes, drip: bytes) -> None:
    """It held its connection for ever."""
    seconds, seen = until_closed(short, POST + framing + b'{"messages": ', drip)
    assert 0.2 < seconds < 3
    head, _, body = seen.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "body", "request_timeout")
    assert "within 0.3 seconds" in error["message"]
    assert short.engine.tickets == []
    assert short.text() == "ok"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n",
    ],
)
def test_a_body_that_nobody_reads_does_not_keep_a_connection(short: Running, head: bytes) -> None:
    """uvicorn forgets its own limit on idle connections as soon as another byte comes."""
    seconds, seen = until_closed(short, head + b"Content-Length: 9000\r\n\r\n", b" ")
    assert 0.2 < seconds < 3
    assert seen.startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize("own", [True, False])
def test_a_client_that_reads_nothing_of_its_stream_is_given_up(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    """Where uvicorn's own protocol listens, the response looks; a traceback in the log was the only trace of it."""
    monkeypatch.setattr("esp_edge.server.stream.LATER", 0.1)
    settings = ServerSettings(send_seconds=0.3)
    engine = ScriptedEngine(model, lambda _: LONG)
    with running(engine, settings, http=http_protocol(settings) if own else "h11") as server:
        server.hold_little()
        body = json.dumps({**HI, "stream": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            deadline = time.monotonic() + 10
            while not engine.tickets or not engine.tickets[0].cancelled.is_set():
                assert time.monotonic() < deadline, "it is still made"
                time.sleep(0.02)
            server.wait_idle()
            if own:
                assert server.server.server_state.connections == set()
        assert server.http.get("/health").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_client_that_reads_again_gets_everything(model: Model) -> None:
    settings = ServerSettings(send_seconds=1)
    engine = ScriptedEngine(model, lambda _: LONG, delay=0.015)
    with running(engine, settings, http=http_protocol(settings)) as server:
        server.hold_little()
        with server.http.stream("POST", CHAT, json={**HI, "stream": True}) as response:
            time.sleep(0.3)  # more is waiting than the connection holds
            data = response.read()
        assert data.endswith(b"data: [DONE]\n\n")
        assert data.count(b"word ") == "".join(LONG).count("word ")


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
