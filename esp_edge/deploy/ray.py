"""Replicas on Ray Serve: one engine each, the routes of ``esp-edge serve``, the same prefix to the same replica.

::

    serve run esp_edge.deploy.ray:app model=smollm2 replicas=2

or, from Python, ``ray.serve.run(build(RaySettings(replicas=2)))``. docs/scale.md has a configuration file.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from esp_edge.deploy.affinity import ranked
from esp_edge.deploy.asgi import Messages, call
from esp_edge.deploy.gateway import BusyError, LostError, gateway
from esp_edge.deploy.settings import RaySettings

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import BackPressureError
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError(f"esp_edge.deploy.ray needs Ray Serve ({error}): pip install 'esp-edge[ray]'") from None

if TYPE_CHECKING:
    from esp_edge.engine import Engine

__all__ = ["Gateway", "PrefixRouter", "RaySettings", "Replica", "app", "build"]

REPLICA_HEADER = b"x-esp-edge-replica"  # of an answer: who made it
STALL_SECONDS = 120.0  # without any progress of an engine that works
HEALTH_PERIOD_SECONDS = 5.0
LAST_SECONDS = 5.0  # that a gateway outlives the replicas, to tell clients
_SPARE_REQUESTS = 32  # that do not generate, such as those for health, beside a full queue
_MANY_REQUESTS = 10_000
_CLOSE_SECONDS = 1.0
log = logging.getLogger("ray.serve")


def app(args: Mapping[str, Any]) -> Any:
    """The application for ``serve run esp_edge.deploy.ray:app NAME=VALUE...`` and for ``args`` of a configuration file.

    Args:
        args: see :meth:`RaySettings.from_args`.

    Raises:
        ConfigError: an argument is unknown or does not fit.
    """
    return build(RaySettings.from_args(args))


def build(settings: RaySettings | None = None) -> Any:
    """The application, for ``ray.serve.run``: deployments ``Replica`` and, in front of them, ``Gateway``."""
    settings = settings or RaySettings()
    replica = serve.deployment(Replica).options(
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": settings.cpus_of_replica, "num_gpus": settings.gpus},
        max_ongoing_requests=settings.parallel + settings.max_queue + _SPARE_REQUESTS,  # the engine has the queue
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"parallel": settings.parallel}
        ),
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
    )
    front = serve.deployment(serve.ingress()(Gateway)).options(
        name="Gateway",
        num_replicas=settings.gateways,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MANY_REQUESTS,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.shutdown_timeout + LAST_SECONDS,
    )
    return front.bind(settings, replica.bind(settings))


# -- replicas --------------------------------------------------------------------------------------------------------


class Replica:
    """One engine, and the application of :mod:`esp_edge.server` in front of it."""

    async def __init__(self, settings: RaySettings) -> None:  # type: ignore[misc]
        from esp_edge.server.app import create_app  # noqa: PLC0415 - the process that deploys needs none of it

        self._engine = await asyncio.to_thread(_make_engine, settings)
        self._app = create_app(self._engine, settings.server)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._watch = Watch(STALL_SECONDS)

    async def answer(self, scope: Scope, body: bytes, key: str) -> AsyncGenerator[Messages, None]:
        """ASGI messages that answer a request; a first, empty list says that it has arrived.

        Args:
            key: for :class:`PrefixRouter`.
        """
        del key
        async for messages in call(self._app, scope, body):
            yield [self._signed(message) for message in messages]

    def _signed(self, message: Message) -> Message:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (REPLICA_HEADER, self._name)]}
        return message

    def check_health(self) -> None:
        """For Ray, which replaces a replica that fails this.

        Raises:
            RuntimeError: the engine is closed, or its work has stopped.
        """
        status = self._engine.status()
        if not status["accepting"]:
            raise RuntimeError("the engine takes no more requests")
        if self._watch.is_stalled(str(status), busy=status["active"] > 0, now=time.monotonic()):
            raise RuntimeError(f"the engine has made no progress for {STALL_SECONDS:g} seconds")

    async def __del__(self) -> None:
        """Ray calls it when a replica is stopped, after the answers are complete or their time is up."""
        if not hasattr(self, "_watch"):
            return
        await self._lifespan.__aexit__(None, None, None)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        model = self._engine.model
        self._engine.close(_CLOSE_SECONDS)
        model.close()


class Watch:
    """Tells when work goes on without anything changing.

    Args:
        seconds: how long that is fine.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._seen: Hashable = None
        self._since = 0.0

    def is_stalled(self, state: Hashable, *, busy: bool, now: float) -> bool:
        """Whether the state of something busy has been the same for too long."""
        if state != self._seen or not busy:
            self._seen, self._since = state, now
        return now - self._since > self._seconds


def _make_engine(settings: RaySettings) -> Engine:
    from esp_edge.engine import Engine  # noqa: PLC0415 - loads llama.cpp
    from esp_edge.session import load  # noqa: PLC0415

    model = load(settings.model, settings.model_config)
    model.remember = True
    try:
        return Engine(model, draft=settings.draft, n_slots=settings.parallel, max_queue=settings.max_queue)
    except BaseException:
        model.close()
        raise


# -- gateways --------------------------------------------------------------------------------------------------------


class Gateway:
    """What Ray's HTTP proxies talk to (:mod:`esp_edge.deploy.gateway`).

    Args:
        replicas: handle of the deployment of replicas.
    """

    def __init__(self, settings: RaySettings, replicas: Any) -> None:
        self._settings = settings
        self._replicas = replicas.options(stream=True, method_name="answer")

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return gateway(self._messages, self._settings.server)

    async def _messages(self, scope: Scope, body: bytes, key: str) -> AsyncGenerator[Messages, None]:
        """An answer, by way of Ray.

        Raises:
            BusyError, LostError: see there.
        """
        reply = self._replicas.remote(scope, body, key=key)
        try:
            yield await asyncio.wait_for(anext(reply), self._settings.start_timeout)
            async for messages in reply:
                yield messages
        except (asyncio.TimeoutError, BackPressureError):
            raise BusyError("no replica is there to take the request: try again in a moment") from None
        except RayActorError:
            raise LostError from None
        finally:
            reply.cancel()


# -- which replica ---------------------------------------------------------------------------------------------------


class PrefixRouter(RequestRouter):  # type: ignore[misc, unused-ignore]
    """Sends a request to the first replica in its key's order that has a free slot, else to the first of all.

    Every process that routes finds the same order (:func:`esp_edge.deploy.affinity.ranked`), so they need not talk to
    each other. A beginning that many share is so answered by as many replicas as it takes. Requests without a key go
    anywhere.
    """

    queue_len_response_deadline_s = 1.0  # a busy machine must not look like a lost replica

    def initialize_state(self, parallel: int = 1) -> None:
        """For Ray: with the arguments of ``RequestRouterConfig``.

        Args:
            parallel: slots of a replica.
        """
        self._parallel = parallel
        self._sent: dict[str, str] = {}  # request -> the replica that it is meant for, until it is complete

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """For Ray: replicas in the order in which they are asked to take a request."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # do not ask again and again without a pause
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = pending_request.kwargs.get("key", "")
        order = ranked(key, found) if key else random.sample(list(found), len(found))
        running = Counter(self._sent.values())
        order.sort(key=lambda name: max(running[name], self._known(found[name])) >= self._parallel)  # full ones last
        if order:
            self._reserve(pending_request, order[0])
        return [[found[name]] for name in order]

    def _known(self, replica: RunningReplica) -> int:
        """Requests that Ray knows of; it hears of those from other gateways, too, but late."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def _reserve(self, request: PendingRequest, name: str) -> None:
        """Count a request before it is sent: others choose in the same moment."""
        number = request.metadata.internal_request_id
        self._sent[number] = name
        request.future.add_done_callback(lambda future: future.cancelled() and self._sent.pop(number, None))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """For Ray: a replica has taken the request, not always the first choice."""
        del result
        if pending_request.metadata.internal_request_id in self._sent:  # else it is complete already
            self._sent[pending_request.metadata.internal_request_id] = replica_id.unique_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """For Ray: the answer is complete, or there will be none."""
        del replica_id
        self._sent.pop(internal_request_id, None)
