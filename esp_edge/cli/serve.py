"""``esp-edge serve``: listen, load the model, answer until SIGINT or SIGTERM."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from esp_edge.cli.answer import load_model
from esp_edge.cli.options import DraftOptions, LoadOptions, ModelName, SamplingOptions, option
from esp_edge.cli.output import note, write_text
from esp_edge.config import DraftConfig
from esp_edge.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

    from esp_edge.engine import Engine
    from esp_edge.server.service import Service
    from esp_edge.server.settings import ServerSettings

__all__ = ["ServeOptions", "config_text", "serve"]

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LAST_SECONDS = 2  # for the messages that tell clients that the server goes
CLOSE_SECONDS = 10
LOAD_SECONDS = 5  # that a load may go on after a signal


def _server(*names: str, text: str, **more: Any) -> Any:
    return option(*names, text=text, panel="Server", **more)


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Where and for whom the server answers: :class:`esp_edge.server.settings.ServerSettings`."""

    host: Annotated[str, _server("--host", text="Address to listen on; 0.0.0.0 = every network.")] = "127.0.0.1"
    port: Annotated[int, _server("--port", text="0 = any that is free.", min=0, max=65535)] = 8080
    parallel: Annotated[int, _server("-np", "--parallel", text="Answers made at the same time.", min=1)] = 4
    max_queue: Annotated[int, _server("--max-queue", text="Requests that may wait; more get a 503.", min=0)] = 64
    api_key: Annotated[list[str] | None, _server("--api-key", text="Key that clients must send; may be repeated.")] = (
        None
    )
    cors_origin: Annotated[
        list[str] | None,
        _server("--cors-origin", text="Web origin that may call, besides this machine's; may be repeated; * = all."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _server("--allowed-host", text="Name that clients may call the server by; may be repeated; * = all."),
    ] = None
    alias: Annotated[str, _server("-a", "--alias", text="Name of the model. (default: of its file)")] = ""
    no_web: Annotated[bool, _server("--no-web", text="No page at /.")] = False
    metrics: Annotated[bool, _server("--metrics/--no-metrics", text="Counters for Prometheus at /metrics.")] = True
    pooling: Annotated[
        str, _server("--pooling", metavar="auto|mean|last|none", text="Of embeddings; auto = as the model file says.")
    ] = "auto"
    max_body_size: Annotated[float, _server("--max-body-size", text="Of a request, in MiB.")] = 8.0
    shutdown_timeout: Annotated[
        int, _server("--shutdown-timeout", text="Seconds that answers may take to end at shutdown.", min=0)
    ] = 10
    log_level: Annotated[str, _server("--log-level", metavar="|".join(LOG_LEVELS), text="Of the log on stderr.")] = (
        "warning"
    )


@dataclasses.dataclass(frozen=True)
class ServeDraftOptions(DraftOptions):
    """Drafting of a server: from every free source, as large as it pays."""

    drafter: Annotated[
        str,
        option(
            "--drafter",
            metavar="NAME",
            panel="Speculation",
            text="auto, esp, none (plain decoding), pld, lade, stand, recycling, suffix, racer or draft-model.",
        ),
    ] = "auto"


def serve(
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
    draft: ServeDraftOptions,
    server: ServeOptions,
    model: ModelName = "smollm2",
    print_config: Annotated[
        bool, option("--print-config", env=False, text="Print all settings as a configuration file, and stop.")
    ] = False,
) -> None:
    """Serve an OpenAI-compatible API and a web page; sampling flags are defaults for requests."""
    drafting, loading = draft.config(), load.config()
    settings = _settings(server, drafting, sampling)
    if print_config:
        sampling = dataclasses.replace(sampling, stop=list(settings.defaults.stop))  # may be from the environment
        write_text(config_text({"model": model}, server, load, draft, sampling))
        return
    _start_log(server.log_level)
    listener = _listen(server.host, server.port)
    settings = _bound(settings, listener)
    if not settings.api_keys and not _is_local(settings.host):
        note(f"warning: everybody who reaches {server.host} can use this server; set --api-key to ask for a key")

    def make() -> Engine:
        from esp_edge.engine import Engine  # noqa: PLC0415 - loads llama.cpp

        loaded = load_model(model, loading)
        loaded.remember = True
        try:
            return Engine(loaded, draft=drafting, n_slots=server.parallel, max_queue=server.max_queue)
        except BaseException:
            loaded.close()
            raise

    _Run(settings, listener, make, server.shutdown_timeout, _url(server.host, listener)).run()


# -- settings --------------------------------------------------------------------------------------------------------


def _settings(server: ServeOptions, draft: DraftConfig, sampling: SamplingOptions) -> ServerSettings:
    from esp_edge.server.settings import ServerSettings  # noqa: PLC0415

    if server.log_level not in LOG_LEVELS:
        raise ConfigError(f"log-level must be one of {', '.join(LOG_LEVELS)}, but {server.log_level!r} was given")
    if not (math.isfinite(server.max_body_size) and 0 < server.max_body_size <= 1024):
        raise ConfigError(f"max-body-size must be above 0 and at most 1024 MiB, but {server.max_body_size} was given")
    return ServerSettings(
        model_id=server.alias,
        host=server.host,
        api_keys=tuple(server.api_key or ()),
        cors_origins=tuple(server.cors_origin or ()),
        allowed_hosts=tuple(server.allowed_host or ()),
        web=not server.no_web,
        metrics=server.metrics,
        max_body_bytes=int(server.max_body_size * (1 << 20)),
        draft=draft,
        defaults=sampling.params(),
        pooling=server.pooling,
    )


def _bound(settings: ServerSettings, listener: socket.socket) -> ServerSettings:
    """With the address that a name turned out to be; the name itself is served as well."""
    address, names = str(listener.getsockname()[0]), settings.allowed_hosts
    if names or _is_local(address):
        names = (*names, settings.host or address)
    return dataclasses.replace(settings, host=address, allowed_hosts=names)


def _is_local(host: str) -> bool:
    from esp_edge.server.settings import is_loopback  # noqa: PLC0415

    return is_loopback(host)


def config_text(values: Mapping[str, Any], *groups: Any) -> str:
    """All settings in TOML, as ``--config`` reads it; unset ones as comments, keys left out."""
    known = dict(values)
    for group in groups:
        known |= {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    lines = []
    for name, value in sorted(known.items()):
        if name == "api_key":
            lines.append(f"# {name}: {len(value or ())} set, not shown")
        else:
            lines.append(f"# {name} is not set" if value in (None, []) else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return str(value)  # TOML writes inf and nan as Python does
    text = str(value)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ConfigError(f"a configuration file is UTF-8, which has no form for {text!r}; rename it")
    # beyond ASCII as TOML's own escapes: JSON's would be pairs of surrogates
    return "".join(c if " " <= c <= "~" else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))


# -- running ---------------------------------------------------------------------------------------------------------


def _start_log(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "esp_edge"):
        logging.getLogger(name).setLevel(level.upper())


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: requests that come while the model loads get an answer.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host must be an address of this machine, but {host!r} is not ({error})") from None
    try:
        if sys.platform != "win32":  # there it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
    except (OSError, OverflowError) as error:
        listener.close()
        hint = "choose another --port, or 0 for any that is free"
        raise ConfigError(f"cannot listen on {host} port {port} ({error}); {hint}") from None
    return listener


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Run:
    """One life of the server: the model loads in a thread while the event loop answers, or says that it loads."""

    def __init__(
        self,
        settings: ServerSettings,
        listener: socket.socket,
        make: Callable[[], Engine],
        timeout: int,
        url: str,
    ) -> None:
        from esp_edge.server.app import create_app, service_of  # noqa: PLC0415

        app = create_app(None, settings)
        self._listener, self._make, self._url = listener, make, url
        self._service = service_of(app)
        self._server = _graceful_server(app, self._service, timeout)
        self._engine: Engine | None = None
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Serve until a signal comes, or until the model turns out not to load."""
        for number in (signal.SIGINT, signal.SIGTERM):  # before uvicorn looks, and once more when it has stopped
            signal.signal(number, self._stop)
        note(f"loading; {self._url}/health says when the model is there")
        loading = threading.Thread(target=self._load, name="load", daemon=True)
        loading.start()
        try:
            self._server.run(sockets=[self._listener])
        finally:
            loading.join(LOAD_SECONDS)
            if loading.is_alive():  # in compiled code, under which the interpreter cannot end in peace
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0 if sys.exc_info()[0] is None else 1)
            if self._engine is not None:
                model = self._engine.model
                self._engine.close(CLOSE_SECONDS)
                model.close()
        if self._failure is not None:
            raise self._failure

    def _stop(self, *_: object) -> None:
        self._server.should_exit = True

    def _load(self) -> None:
        try:
            self._engine = self._make()
            self._service.attach(self._engine)
            write_text(f"listening on {self._url}\n")
        except BaseException as error:  # raised again by the main thread
            self._failure = error
            self._service.fail("the model could not be loaded")
            self._server.should_exit = True


def _graceful_server(app: Any, service: Service, timeout: int) -> uvicorn.Server:
    """A server that takes no more requests at a signal, and after ``timeout`` seconds ends the answers."""
    import asyncio  # noqa: PLC0415 - slow to import, as are the others

    import uvicorn  # noqa: PLC0415
    from sse_starlette.sse import AppStatus  # noqa: PLC0415

    from esp_edge.server.security import http_protocol  # noqa: PLC0415

    class Graceful(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            timer = asyncio.get_running_loop().call_later(timeout, service.stop_answers)
            try:
                await super().shutdown(sockets)
            finally:
                timer.cancel()

    AppStatus.enable_automatic_graceful_drain = False  # streams go on after the signal, to their end or the timeout
    config = uvicorn.Config(
        app,
        loop="asyncio",  # the same everywhere, whether uvloop happens to be installed or not
        http=http_protocol(service.settings),  # h11, the one with a limit on headers
        h11_max_incomplete_event_size=service.settings.max_header_bytes,
        ws="none",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=timeout + LAST_SECONDS,
    )
    return Graceful(config)
