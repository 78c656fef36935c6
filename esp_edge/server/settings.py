"""What the server may do, apart from the model and its engine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.errors import ConfigError

__all__ = ["ServerSettings", "is_loopback"]

DEFAULT_BODY_BYTES = 8 << 20
DEFAULT_HEADER_BYTES = 32 << 10


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: ``localhost``, 127.0.0.0/8 or ::1."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP side.

    Attributes:
        model_id: what ``/v1/models`` calls the model; "" = the name of its file.
        host: the address that is listened on; decides which names are served, see :mod:`esp_edge.server.security`.
        api_keys: any of them opens the API; none = open to everybody who reaches it.
        cors_origins: web origins that may call besides those of this machine; ``*`` = all.
        allowed_hosts: names that a Host header may have besides those of this machine; ``*`` = all.
        web: serve the page at ``/``.
        metrics: serve counters at ``/metrics``.
        max_body_bytes: of a request.
        max_header_bytes: of a request line and all headers.
        header_seconds: how long they may take to arrive.
        body_seconds: how long a body may take.
        max_nesting: brackets that JSON may nest.
        max_choices: answers of one request, prompts times n.
        draft: how drafts are made unless a request says otherwise: what the engine was given.
        defaults: sampling unless a request says otherwise.
        ping_seconds: between two keep-alive comments of a stream; also how long the first token may take before the
            status is sent without it.
        send_seconds: how long a client may leave an answer unread.
        pooling: of embeddings: ``auto`` (what the model file says), ``mean``, ``last`` or ``none`` (switched off).
    """

    model_id: str = ""
    host: str = "127.0.0.1"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    web: bool = True
    metrics: bool = True
    max_body_bytes: int = DEFAULT_BODY_BYTES
    max_header_bytes: int = DEFAULT_HEADER_BYTES
    header_seconds: float = 20.0
    body_seconds: float = 60.0
    max_nesting: int = 200
    max_choices: int = 256
    draft: DraftConfig = field(default_factory=DraftConfig)
    defaults: GenerationParams = field(default_factory=GenerationParams)
    ping_seconds: float = 15.0
    send_seconds: float = 60.0
    pooling: str = "auto"

    def __post_init__(self) -> None:
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("an API key must be non-empty ASCII text, but another one was given")
        wrong = next((name for name in self.allowed_hosts if not name.strip() or {*name} & {*"/@ "}), None)
        if wrong is not None:
            raise ConfigError(f"allowed-host must be a name such as chat.example, but {wrong!r} was given")
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling must be one of {', '.join(POOLINGS)}, but {self.pooling!r} was given")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max-body-size must be above 0, but {self.max_body_bytes} bytes were given")


POOLINGS = ("auto", "mean", "last", "none")
