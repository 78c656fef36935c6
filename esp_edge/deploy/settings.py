"""What a deployment on Ray Serve consists of, from Python or from the ``args`` of Ray's configuration file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from esp_edge.cli.conversation import closest
from esp_edge.cli.options import LoadOptions, SamplingOptions
from esp_edge.cli.serve import ServeDraftOptions, ServeOptions
from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.errors import ConfigError
from esp_edge.server.settings import ServerSettings

__all__ = ["RaySettings"]

EVERYWHERE = "0.0.0.0"  # which names are served is the proxies' matter, unless allowed_host says
_OURS = ("model", "replicas", "gateways", "cpus", "gpus", "start_timeout")
_OF_RAY = ("host", "port", "log_level")


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Replicas of one model.

    Attributes:
        model: file, Hugging Face name or ``smollm2``; a file must be there on every machine that may run a replica.
        replicas: engines; Ray distributes them over its machines and starts lost ones anew.
        gateways: processes that read requests and choose replicas; more than one to outlive the loss of a machine.
        cpus: that Ray reserves for a replica; also its threads unless ``load`` names them. 0 = the physical cores of
            the machine that deploys, shared among the replicas.
        gpus: that Ray reserves for a replica.
        parallel: answers that a replica makes at the same time.
        max_queue: requests that may wait at a replica.
        shutdown_timeout: seconds that answers may take when a replica is stopped.
        start_timeout: seconds that a request waits for a replica to take it.
        load, draft, server: as for one server.
    """

    model: str = "smollm2"
    replicas: int = 1
    gateways: int = 1
    cpus: float = 0
    gpus: float = 0
    parallel: int = 4
    max_queue: int = 64
    shutdown_timeout: float = 10
    start_timeout: float = 60
    load: ModelConfig = field(default_factory=ModelConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    server: ServerSettings = field(default_factory=lambda: ServerSettings(host=EVERYWHERE, metrics=False))

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("gateways", 1), ("parallel", 1), ("max_queue", 0)):
            _require(name, getattr(self, name), least, int)
        for name in ("cpus", "gpus", "shutdown_timeout", "start_timeout"):
            _require(name, getattr(self, name), 0, int | float)
        if self.load.rpc and self.replicas > 1:
            raise ConfigError(f"an rpc server serves one replica, but replicas is {self.replicas}: use 1, or drop rpc")

    @property
    def cpus_of_replica(self) -> float:
        """CPUs that Ray reserves for a replica."""
        from esp_edge.models.model import default_threads  # noqa: PLC0415 - loads llama.cpp

        return self.cpus or self.load.n_threads or max(1, default_threads() // self.replicas)

    @property
    def model_config(self) -> ModelConfig:
        """How a replica loads the model: with as many threads as it has CPUs."""
        threads = self.load.n_threads or max(1, int(self.cpus_of_replica))
        return dataclasses.replace(self.load, n_threads=threads)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> RaySettings:
        """Settings by the names that the flags of ``esp-edge serve`` have, with ``_``, besides those of this class.

        Values may be texts, as Ray's command line gives them.

        Raises:
            ConfigError: an unknown name, or a value that does not fit.
        """
        groups = (LoadOptions, ServeDraftOptions, SamplingOptions, ServeOptions)
        fields = {name for group in groups for name in group.__dataclass_fields__}
        for name in args:
            if name in _OF_RAY:
                raise ConfigError(f"{name} is not a setting of the replicas: set it in Ray's configuration")
            if name not in fields and name not in _OURS:
                known = sorted(fields.union(_OURS).difference(_OF_RAY))
                raise ConfigError(f"there is no setting {name}{closest(name, known)}")
        load, draft, sampling, serve = (_read(group, args) for group in groups)
        drafting = draft.config()
        ours = _read(_Ours, args)
        return cls(
            **dataclasses.asdict(ours),
            parallel=serve.parallel,
            max_queue=serve.max_queue,
            shutdown_timeout=serve.shutdown_timeout,
            load=load.config(),
            draft=drafting,
            server=_server(serve, drafting, sampling),
        )


@dataclass(frozen=True)
class _Ours:
    """Settings that a single server has not."""

    model: str = "smollm2"
    replicas: int = 1
    gateways: int = 1
    cpus: float = 0
    gpus: float = 0
    start_timeout: float = 60


def _server(serve: ServeOptions, draft: DraftConfig, sampling: SamplingOptions) -> ServerSettings:
    if not (math.isfinite(serve.max_body_size) and 0 < serve.max_body_size <= 1024):
        raise ConfigError(f"max_body_size must be above 0 and at most 1024 MiB, but {serve.max_body_size} was given")
    return ServerSettings(
        model_id=serve.alias,
        host=EVERYWHERE,
        api_keys=tuple(serve.api_key or ()),
        cors_origins=tuple(serve.cors_origin or ()),
        allowed_hosts=tuple(serve.allowed_host or ()),
        web=not serve.no_web,
        metrics=False,  # each replica would tell its own, in turns: Ray has counters for all
        max_body_bytes=int(serve.max_body_size * (1 << 20)),
        draft=draft,
        defaults=sampling.params(),
        pooling=serve.pooling,
    )


def _read(group: Any, args: Mapping[str, Any]) -> Any:
    """A dataclass of options from those of the arguments that are its own."""
    values = {name: args[name] for name in group.__dataclass_fields__ if name in args}
    adapter: TypeAdapter[Any] = TypeAdapter(group)
    for name, value in values.items():
        if isinstance(value, str) and "list[" in str(group.__dataclass_fields__[name].type):
            values[name] = [value]
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][:1]))
        raise ConfigError(f"{where} = {first['input']!r}: {first['msg']}") from None


def _require(name: str, value: object, least: int, kind: Any) -> None:
    ok = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) and value >= least
    if not ok:
        raise ConfigError(f"{name} must be {least} or more, but {value!r} was given")
