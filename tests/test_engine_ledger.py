"""The ledger of drafts under load: what raises the price of a row, and what lets it fall again."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.base import Budget
from esp_edge.engine import Engine, ledger
from esp_edge.engine.ledger import Ledger
from esp_edge.session import Generation, load


def test_its_example() -> None:
    assert doctest.testmod(ledger).failed == 0


def simulate(row_ms: float, hit: float, passes: int = 400, noise: float = 0.1, seed: int = 1) -> Ledger:
    """Eight sessions, 50 ms a pass; every other pass has four drafts that cost and are accepted as told."""
    rng, found = random.Random(seed), Ledger()
    for n in range(passes):
        drafts = 4 * (n % 2)
        tokens = 8 + sum(rng.random() < hit for _ in range(drafts))
        found.observe(8, 8 + drafts, (50.0 + row_ms * drafts) * rng.gauss(1.0, noise), tokens)
    return found


def test_drafts_that_pay_keep_their_price() -> None:
    for seed in range(5):
        assert simulate(row_ms=2.0, hit=0.8, seed=seed).factor < 1.1


def test_drafts_that_lose_get_dear() -> None:
    for seed in range(5):
        assert simulate(row_ms=9.0, hit=0.6, seed=seed).factor > 3.0


def test_after_a_while_they_are_tried_again() -> None:
    found = simulate(row_ms=9.0, hit=0.6)
    for _ in range(600):
        found.observe(8, 8, 50.0, 8)
    assert found.factor < 1.2


def test_a_disturbed_pass_counts_for_no_more_than_a_slow_one() -> None:
    found = Ledger()
    found.observe(8, 8, 50.0, 8)
    found.observe(8, 12, 5000.0, 8)
    assert found.factor < 1.3


def test_without_a_pass_to_compare_with_nothing_is_said() -> None:
    found = Ledger()
    for _ in range(100):
        found.observe(8, 12, 100.0, 8)
        found.observe(7, 7, 50.0, 7)  # of another number of sessions
    assert found.factor == 1.0


def test_the_factor_counts_where_a_pass_is_shared(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[Budget] = []
    draft = Generation.draft

    def watched(self: Generation, budget: Budget) -> None:
        budgets.append(budget)
        draft(self, budget)

    monkeypatch.setattr(Generation, "draft", watched)
    monkeypatch.setattr(Ledger, "factor", property(lambda _self: 3.0))
    config = DraftConfig("auto", cost="flat", mask_init="vocab-mean")
    with load(tiny("llama", n_vocab=100, n_ctx=2048), ModelConfig(n_ctx=1024)) as model:
        for n_sessions, price in ((1, 1.0), (2, 6.0)):
            with Engine(model, draft=config, n_slots=n_sessions) as engine:
                with engine._changed:  # all are seen at once
                    params = GenerationParams(max_tokens=4, ignore_eos=True)
                    tickets = [engine.submit([5, 6, 7 + n], params) for n in range(n_sessions)]
                for ticket in tickets:
                    list(ticket)
            assert budgets[0].price == pytest.approx(price)
            budgets.clear()
