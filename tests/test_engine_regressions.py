"""What once went wrong in the engine, a test each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.draft_model import DraftModelDrafter
from esp_edge.engine import Engine, Ticket
from esp_edge.engine import engine as module
from esp_edge.engine.slot import Settings
from esp_edge.errors import EngineClosedError
from esp_edge.session import load

LONG = GenerationParams(max_tokens=400, ignore_eos=True)


def slow_suffix(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Settling of ``suffix`` sets the first event and waits for the second one."""
    begun, go_on = threading.Event(), threading.Event()
    settle = module._Settler.settle

    def slow(self: module._Settler, draft: DraftConfig) -> Settings:
        if draft.drafter == "suffix":
            begun.set()
            assert go_on.wait(20)
        return settle(self, draft)

    monkeypatch.setattr(module._Settler, "settle", slow)
    return begun, go_on


def test_settings_that_are_measured_delay_nobody_else(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every submit waited for the lock under which new draft settings are settled, which may measure for seconds."""
    begun, go_on = slow_suffix(monkeypatch)
    few = GenerationParams(max_tokens=3, ignore_eos=True)
    with load(tiny()) as model, Engine(model, draft=DraftConfig("none")) as engine:
        other = threading.Thread(target=lambda: list(engine.submit("the rain", few, draft=DraftConfig("suffix"))))
        other.start()
        try:
            assert begun.wait(10)
            tickets: list[Ticket] = []
            usual = threading.Thread(target=lambda: tickets.append(engine.submit("x", few)))
            usual.start()
            usual.join(10)
            assert len(tickets) == 1
            assert sum(len(chunk.token_ids) for chunk in tickets[0]) == 3
        finally:
            go_on.set()
            other.join()


def test_close_waits_for_a_submit_that_measures(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not, and the model was closed under the measurement: the process crashed."""
    begun, go_on = slow_suffix(monkeypatch)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            engine.submit("the rain", draft=DraftConfig("suffix"))
        except EngineClosedError as error:
            errors.append(error)

    with load(tiny()) as model:
        engine = Engine(model, draft=DraftConfig("none"))
        asking, closing = threading.Thread(target=ask), threading.Thread(target=engine.close)
        asking.start()
        assert begun.wait(10)
        closing.start()
        closing.join(0.3)
        waited = closing.is_alive()
        go_on.set()
        closing.join(10)
        asking.join(10)
        assert waited
        assert not closing.is_alive()
        assert len(errors) == 1


def test_a_draft_model_goes_with_a_request_that_ends_in_the_queue(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that gave up its slot keeps its drafter; nobody freed that when it was cancelled then."""
    made: list[DraftModelDrafter] = []
    init = DraftModelDrafter.__init__

    def counting(self: DraftModelDrafter, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(DraftModelDrafter, "__init__", counting)
    draft = DraftConfig("draft-model", draft_model=str(tiny()))
    with load(tiny(), ModelConfig(n_ctx=512)) as model, Engine(model, draft=draft, n_slots=3) as engine:
        tickets = [engine.submit([10 + n] * 100, LONG) for n in range(3)]
        waiting = threading.Event()
        for ticket in tickets:
            ticket.add_listener(lambda _: waiting.set() if engine.status()["totals"]["preempted"] else None)
        assert waiting.wait(30)
        for ticket in tickets:
            ticket.cancel()
        assert all(ticket.wait(10) for ticket in tickets)
    assert len(made) == 3
    assert all(drafter._context is None for drafter in made)
