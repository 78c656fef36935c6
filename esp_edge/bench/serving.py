"""``esp-edge bench serve``: our server beside llama-server, as a client sees them.

Memory first, one server at a time, because pages that several share cannot be told apart. Then all servers run, only
one is asked at a time, and every measurement goes round all of them before the next one begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from esp_edge.bench.machine import describe_machine
from esp_edge.bench.peers import Peer
from esp_edge.bench.run import ModelFile
from esp_edge.bench.server_process import ServerProcess
from esp_edge.bench.serving_client import Messages, PromptSize, Reply, ask, ask_all, cold_messages
from esp_edge.bench.serving_process import environment, our_command, peer_command, read_memory
from esp_edge.bench.spec import PEER
from esp_edge.config import DRAFTERS, ModelConfig
from esp_edge.errors import ConfigError

__all__ = ["OURS", "SECOND_TURN", "ServingPlan", "measure", "serving_rows"]

OURS = "esp-edge"
SECOND_TURN = "second turn"
REQUESTS = 2  # of every stream in one measurement
SETTLE_SECONDS = 0.3
_FIRST_ANSWER, _FEW = 24, 4  # tokens
_ROUND = 1000  # numbers of prompts between two repetitions
# what people ask; answers of a hundred tokens and more, some of which repeat the prompt or themselves
QUESTIONS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain to a child why the sky is blue during the day and red in the evening.",
    "List ten animals of the savanna with one sentence about each.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Describe how bread is made, step by step.",
    "Translate to French, sentence by sentence: The train is late. The station is cold. We wait for the train.",
    "What are the main differences between a lake, a river and the sea?",
    "Write a letter to a friend who has just moved to another town.",
    "Repeat this list in alphabetical order: pear, apple, cherry, banana, fig, grape, lemon, date.",
    "Summarize the water cycle for a poster in a school.",
    "Give five arguments for and five against building a new bridge.",
    "Write a dialogue between a fox and a crow about a piece of cheese.",
    "Tom buys 3 pens for 2 dollars each and a book for 7 dollars. How much does he pay? Explain step by step.",
    "Describe a forest in autumn for someone who has never seen one.",
    "Plan a week of simple dinners for a family of four.",
    "Write a poem of four verses on rain.",
)
Row = Mapping[str, Any]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What is compared.

    Attributes:
        file: the model.
        config: of all servers; its context and threads are numbers, not 0.
        drafters: of our own servers, one each.
        peer: llama-server; None = ours alone.
        streams: concurrent streams to measure tokens/s with; the largest is the number of slots.
        prompts: tokens of the prompts whose first token is waited for, rising; the last one gets a second turn.
        repeat: measurements of everything.
        max_tokens: of an answer.
    """

    file: ModelFile
    config: ModelConfig
    drafters: Sequence[str] = ("auto", "none")
    peer: Peer | None = None
    streams: Sequence[int] = (1, 2, 4, 8)
    prompts: Sequence[int] = (50, 1000)
    repeat: int = 5
    max_tokens: int = 64

    def check(self) -> None:
        """Raise ConfigError when it cannot be measured."""
        if not self.drafters:
            raise ConfigError("--drafters needs at least one name, such as auto")
        for name in self.drafters:
            if name not in DRAFTERS or name == "draft-model":
                raise ConfigError(f"--drafters of a server are names such as auto and none, but {name!r} was given")
        longest = max(self.prompts) + _FIRST_ANSWER + 100
        crowd = self.n_slots * (self.max_tokens + 60)
        if self.config.n_ctx < max(longest, crowd):
            raise ConfigError(
                f"a context of {max(longest, crowd)} tokens is needed for a prompt of {max(self.prompts)} and "
                f"{self.n_slots} streams, but it has {self.config.n_ctx}; raise --ctx-size"
            )

    @property
    def n_slots(self) -> int:
        """Of every server."""
        return max(self.streams)

    @property
    def commands(self) -> dict[str, list[str]]:
        """Label of a lane -> its command line."""
        ours = {
            f"{OURS} {name}": our_command(self.file.path, self.config, n_slots=self.n_slots, drafter=name)
            for name in self.drafters
        }
        if self.peer is None:
            return ours
        return ours | {PEER: peer_command(self.peer, self.file.path, self.config, n_slots=self.n_slots)}

    @property
    def reference(self) -> str:
        """The lane that the others are compared with: the other program, else the last of ours."""
        return list(self.commands)[-1]

    def settings(self) -> dict[str, Any]:
        """JSON-ready."""
        known = asdict(self.config) | {"model": self.file.name, "slots": self.n_slots, "requests_a_stream": REQUESTS}
        chosen = ("streams", "prompts", "drafters", "repeat", "max_tokens")
        known |= {name: value for name in chosen for value in [getattr(self, name)]}
        return known | {"peer": f"{PEER} {self.peer.version}" if self.peer else None, "reference": self.reference}


def measure(plan: ServingPlan, *, progress: Progress, command: str = "") -> dict[str, Any]:
    """Everything; the document of ``serving.json``.

    Raises:
        ConfigError: the plan cannot be measured, or a server does not start.
        DecodeError: a server broke off.
    """
    plan.check()
    notes = _Notes(plan, progress)
    _measure_memory(plan, notes)
    _measure_speed(plan, notes)
    machine = describe_machine(
        plan.config, quant=plan.file.quant, n_ctx=plan.config.n_ctx, n_threads=plan.config.n_threads
    )
    return {
        "machine": machine,
        "settings": plan.settings(),
        "command": command,
        "rows": serving_rows(notes.samples, list(plan.commands), plan.reference),
        "samples": notes.samples,
    }


@dataclass(slots=True)
class _Notes:
    """Samples so far: dictionaries with ``lane``, ``what``, ``repeat``, ``value`` and what else is worth keeping."""

    plan: ServingPlan
    progress: Progress
    samples: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0

    def add(self, lane: str, what: str, repeat: int, value: float, **more: Any) -> None:
        self.samples.append({"lane": lane, "what": what, "repeat": repeat, "value": round(value, 6), **more})

    def step(self, what: str, lane: str, repeat: int) -> None:
        plan = self.plan
        total = len(plan.commands) * plan.repeat * (1 + len(plan.prompts) + len(plan.streams))
        self.progress(self.done, total, f"{what} of {lane}, {repeat + 1} of {plan.repeat}")
        self.done += 1


def _turns(lanes: Sequence[str], repeat: int) -> Iterator[str]:
    """The lanes, another one first each time."""
    first = repeat % len(lanes)
    yield from (*lanes[first:], *lanes[:first])


# -- memory ----------------------------------------------------------------------------------------------------------


def _measure_memory(plan: ServingPlan, notes: _Notes) -> None:
    commands = plan.commands
    for repeat in range(plan.repeat):
        for lane in _turns(list(commands), repeat):
            notes.step("memory", lane, repeat)
            with ServerProcess(lane, commands[lane], environment()) as server:
                notes.add(lane, "ready_s", repeat, server.ready_s)
                _note_memory(notes, server, "idle", repeat)
                ask(server, cold_messages(repeat, 20), _FEW)
                _note_memory(notes, server, "used", repeat)


def _note_memory(notes: _Notes, server: ServerProcess, when: str, repeat: int) -> None:
    time.sleep(SETTLE_SECONDS)
    memory = read_memory(server.pid)
    if memory is not None:
        for name, n_bytes in asdict(memory).items():
            notes.add(server.label, f"{name}_{when}", repeat, n_bytes)


# -- speed -----------------------------------------------------------------------------------------------------------


def _measure_speed(plan: ServingPlan, notes: _Notes) -> None:
    with ExitStack() as stack:
        servers = {
            lane: stack.enter_context(ServerProcess(lane, command, environment()))
            for lane, command in plan.commands.items()
        }
        size = PromptSize.learn(servers[plan.reference], -_ROUND)
        for server in servers.values():  # what is only made when it is first needed
            ask_all(server, _crowd(plan, -1, plan.n_slots)[: plan.n_slots], plan.n_slots, _FEW)
        for repeat in range(plan.repeat):
            for number, n_tokens in enumerate(plan.prompts, start=1):
                messages = cold_messages(repeat * _ROUND + number, size.words(n_tokens))
                for lane in _turns(list(servers), repeat):
                    notes.step(f"first token, prompt of {n_tokens}", lane, repeat)
                    _note_first_token(notes, servers[lane], messages, n_tokens, repeat)
            for streams in plan.streams:
                requests = _crowd(plan, repeat, streams)
                for lane in _turns(list(servers), repeat):
                    notes.step(f"{streams} streams", lane, repeat)
                    _note_speed(notes, servers[lane], requests, streams, repeat)


def _note_first_token(notes: _Notes, server: ServerProcess, messages: Messages, n_tokens: int, repeat: int) -> None:
    last = n_tokens == max(notes.plan.prompts)
    reply = ask(server, messages, _FIRST_ANSWER if last else _FEW)
    _note_reply(notes, server, f"first_{n_tokens}", reply, repeat)
    if not last:
        return
    said = {"role": "assistant", "content": reply.text or "All right."}
    more = {"role": "user", "content": "Now tell me which of these words is the longest one."}
    _note_reply(notes, server, SECOND_TURN, ask(server, [*messages, said, more], _FEW), repeat)


def _note_reply(notes: _Notes, server: ServerProcess, what: str, reply: Reply, repeat: int) -> None:
    tokens = {"prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens}
    notes.add(server.label, what, repeat, 1000.0 * reply.first_s, **tokens)


def _crowd(plan: ServingPlan, repeat: int, streams: int) -> list[Messages]:
    """The requests of a measurement: never the same ones twice, so that no server knows their answers."""
    system = f"You are the helpful assistant number {repeat * _ROUND + streams}."
    first = repeat * len(plan.streams) + list(plan.streams).index(streams)
    asked = [QUESTIONS[(first + n) % len(QUESTIONS)] for n in range(REQUESTS * streams)]
    return [({"role": "system", "content": system}, {"role": "user", "content": text}) for text in asked]


def _note_speed(notes: _Notes, server: ServerProcess, requests: Sequence[Messages], streams: int, repeat: int) -> None:
    seconds, replies = ask_all(server, requests, streams, notes.plan.max_tokens)
    tokens = sum(reply.completion_tokens for reply in replies)
    texts = [reply.text for reply in replies]
    notes.add(server.label, f"streams_{streams}", repeat, tokens / seconds, tokens=tokens, texts=texts)


# -- rows ------------------------------------------------------------------------------------------------------------


def serving_rows(samples: Sequence[Row], lanes: Sequence[str], reference: str) -> list[dict[str, Any]]:
    """A row a lane: ``lane``, ``cells`` (what -> median, min, max, n, over) and ``same``, ``answers``.

    ``over`` is the median, over the repetitions, of how many times the reference's value a value is; ``same`` counts
    answers with the reference's very text, of ``answers``.
    """
    theirs = {(one["what"], one["repeat"]): one for one in samples if one["lane"] == reference}
    rows = []
    for lane in lanes:
        by_what: dict[str, list[Row]] = {}
        for one in samples:
            if one["lane"] == lane:
                by_what.setdefault(one["what"], []).append(one)
        cells = {
            what: _cell(mine, [theirs.get((what, one["repeat"])) for one in mine]) for what, mine in by_what.items()
        }
        same, answers = _same_texts(by_what, theirs)
        rows.append({"lane": lane, "cells": cells, "same": same, "answers": answers})
    return rows


def _same_texts(by_what: Mapping[str, Sequence[Row]], theirs: Mapping[tuple[str, int], Row]) -> tuple[int, int]:
    """Answers whose text is the reference's, and all that could be compared."""
    same = answers = 0
    for what, mine in by_what.items():
        for one in mine:
            texts = theirs.get((what, one["repeat"]), {}).get("texts", [])
            same += sum(a == b for a, b in zip(one.get("texts", []), texts, strict=True))
            answers += len(texts)
    return same, answers


def _cell(mine: Sequence[Row], theirs: Sequence[Row | None]) -> dict[str, Any]:
    values = [one["value"] for one in mine]
    ratios = [one["value"] / ref["value"] for one, ref in zip(mine, theirs, strict=True) if ref and ref["value"]]
    cell = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
    cell["over"] = statistics.median(ratios) if ratios else None
    for name in ("prompt_tokens", "cached_tokens", "tokens"):
        found = [one[name] for one in mine if one.get(name) is not None]
        if found:
            cell[name] = statistics.median(found)
    return cell
