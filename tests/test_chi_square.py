"""T > 0: the first three tokens, drawn through random draft trees, have exactly the target model's joint distribution.

100,000 samples against the enumeration of all 64 outcomes. The logits are a tiny model's, taken once; ``verify`` and
the native sampler do the rest. Seeds are fixed, so the outcome is too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from esp_edge._runtime import native
from esp_edge.config import ModelConfig
from esp_edge.models.model import TargetModel
from esp_edge.step import Step
from esp_edge.tree import DraftTree, FloatArray
from esp_edge.verify import verify

PROMPT = (5, 17, 42, 8, 61, 3)
LENGTH = 3
TOP_K = 4
SEEDS, STARTS = 250, 400  # 100,000 samples: texts that begin at 400 positions, under 250 seeds
N_TREES = 300

Text = tuple[int, ...]
Choose = Callable[["Sample", int, int], int]


@dataclass
class Target:
    """The target model after PROMPT, as far as three tokens go.

    Attributes:
        logits: text so far -> float32[n_vocab].
        top: text so far -> its TOP_K likeliest tokens, best first.
    """

    model: TargetModel
    temperature: float
    logits: dict[Text, FloatArray]
    top: dict[Text, list[int]]

    def probabilities(self) -> dict[Text, float]:
        """The exact joint distribution of the first three tokens."""
        joint: dict[Text, float] = {(): 1.0}
        for _ in range(LENGTH):
            joint = {
                (*text, token): p * q
                for text, p in joint.items()
                for token, q in zip(self.top[text], self._conditional(text), strict=True)
            }
        return joint

    def _conditional(self, text: Text) -> list[float]:
        values = self.logits[text][self.top[text]].astype(np.float64) / self.temperature
        p = np.exp(values - values.max())
        return [float(x) for x in p / p.sum()]

    def sampler(self, seed: int) -> Any:
        settings = native.SamplerParams()
        settings.temperature, settings.top_k, settings.seed = self.temperature, TOP_K, seed
        return native.Sampler(self.model.address, settings)


@pytest.fixture(scope="module", params=[1.0, 1.5], ids=["T1", "T1.5"])
def target(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[Target]:
    with TargetModel(str(tiny("llama")), ModelConfig(n_ctx=256)) as model:
        context = model.new_context(TOP_K**LENGTH)
        step = Step(context)
        step.prefill(PROMPT[:-1])
        logits: dict[Text, FloatArray] = {}
        top: dict[Text, list[int]] = {}
        level: list[Text] = [()]
        for _ in range(LENGTH):
            for text in level:
                outputs = step.run(DraftTree.from_lists([PROMPT[-1], *text], range(-1, len(text))))
                logits[text] = step.native.logits(len(text))
                top[text] = outputs.top_k(np.array([len(text)], np.int32), TOP_K)[0][0].tolist()
                step.rollback()
            level = [(*text, token) for text in level for token in top[text]]
        yield Target(model, request.param, logits, top)
        context.close()


# ------------------------------------------------------------------------------------------------------- sampling


@dataclass
class Draft:
    """A random draft tree, and the text from its root to every node."""

    tree: DraftTree
    texts: list[Text]


def random_drafts(target: Target) -> dict[Text, list[Draft]]:
    """For every text so far, trees of likely and unlikely continuations, from a root alone to bushes."""
    rng = np.random.default_rng(0)
    tokens = sorted({token for ids in target.top.values() for token in ids})
    drafts: dict[Text, list[Draft]] = {}
    for so_far in target.top:
        trees = [_random_draft(rng, target, so_far, tokens) for _ in range(N_TREES if not so_far else 40)]
        drafts[so_far] = trees
    return drafts


def _random_draft(rng: np.random.Generator, target: Target, so_far: Text, tokens: list[int]) -> Draft:
    texts: list[Text] = [()]
    parents = [-1]
    for _ in range(int(rng.integers(0, 9))):
        parent = int(rng.integers(0, len(texts)))
        likely = target.top.get(so_far + texts[parent], [])
        token = int(rng.choice(likely if likely and rng.random() < 0.7 else tokens))
        if (text := (*texts[parent], token)) not in texts:
            texts.append(text)
            parents.append(parent)
    root = (PROMPT + so_far)[-1]
    return Draft(DraftTree.from_lists([root, *(text[-1] for text in texts[1:])], parents), texts)


@dataclass
class Sample:
    """One text being drawn."""

    target: Target
    sampler: Any
    start: int
    text: Text
    draft: Draft

    def text_at(self, row: int) -> Text:
        return self.text + self.draft.texts[row]


def honest(sample: Sample, row: int, position: int) -> int:
    token: int = sample.sampler.pick_logits(sample.target.logits[sample.text_at(row)], position)
    return token


def draw(target: Target, choose: Choose, n_seeds: int = SEEDS) -> tuple[Counter[Text], int]:
    """Counts of the drawn texts, and how many of their tokens were accepted drafts."""
    drafts = random_drafts(target)
    counts: Counter[Text] = Counter()
    accepted, turn = 0, 0
    for seed in range(n_seeds):
        sampler = target.sampler(seed)
        for start in range(0, LENGTH * STARTS, LENGTH):
            sample = Sample(target, sampler, start, (), drafts[()][0])
            while len(sample.text) < LENGTH:
                pool = drafts[sample.text]
                sample.draft = pool[turn % len(pool)]
                turn += 1
                verdict = verify(
                    sample.draft.tree,
                    partial(choose, sample),
                    position=start + len(sample.text),
                    limit=LENGTH - len(sample.text),
                    is_end=lambda _: False,
                )
                accepted += len(verdict.path)
                sample.text += verdict.token_ids
            counts[sample.text] += 1
    return counts, accepted


# ----------------------------------------------------------------------------------------------------- statistics


def deviation(counts: Counter[Text], expected: dict[Text, float]) -> float:
    """Pearson's chi-square as standard deviations of a normal (Wilson and Hilferty). Rare outcomes are pooled."""
    total = sum(counts.values())
    assert set(counts) <= set(expected)
    common = [text for text, p in expected.items() if p * total >= 10]
    cells = [(counts[text], expected[text] * total) for text in common]
    rest = total - sum(wanted for _, wanted in cells)
    if rest > 0:
        cells.append((total - sum(found for found, _ in cells), rest))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    dof = len(cells) - 1
    spread = 2 / (9 * dof)
    return float(((statistic / dof) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def test_the_joint_distribution_is_the_targets(target: Target) -> None:
    counts, accepted = draw(target, honest)
    assert counts.total() == SEEDS * STARTS == 100_000
    assert accepted > 30_000  # the trees did take part
    assert len(counts) > 40
    assert abs(deviation(counts, target.probabilities())) < 4


def test_the_text_of_a_key_does_not_depend_on_the_trees(target: Target) -> None:
    sampler, drafts = target.sampler(3), random_drafts(target)
    for start in range(0, 600, LENGTH):
        text: Text = ()
        for position in range(start, start + LENGTH):
            text += (sampler.pick_logits(target.logits[text], position),)
        for draft in itertools.islice(drafts[()], 20):
            sample = Sample(target, sampler, start, (), draft)
            verdict = verify(
                draft.tree,
                partial(honest, sample),
                position=start,
                limit=LENGTH,
                is_end=lambda _: False,
            )
            assert verdict.token_ids == text[: len(verdict.token_ids)]


# The test can fail: wrong ways to verify, each plausible, each far from the distribution.


def prefers_drafts(sample: Sample, row: int, position: int) -> int:
    """Accepts a likely draft in one case of ten without asking ("typical acceptance")."""
    choice = honest(sample, row, position)
    if native.keyed_gumbel(99, position, row) > 2.25:  # P = 0.1
        tree, likely = sample.draft.tree, sample.target.top[sample.text_at(row)]
        children = [int(token) for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == row]
        choice = next((token for token in children if token in likely), choice)
    return choice


def tries_twice(sample: Sample, row: int, position: int) -> int:
    """Draws again for each pass, here by node, and keeps the draw that a draft matches (the longest path wins)."""
    token: int = honest(sample, row, position)
    if (row, token) not in {(parent, child) for child, parent in _edges(sample.draft.tree)}:
        logits = sample.target.logits[sample.text_at(row)]
        second: int = sample.sampler.pick_logits(logits, position + (1 << 40))
        if (row, second) in {(parent, child) for child, parent in _edges(sample.draft.tree)}:
            return second
    return token


def _edges(tree: DraftTree) -> list[tuple[int, int]]:
    return list(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True))


def forgets_the_position(sample: Sample, row: int, position: int) -> int:
    """One noise for all three positions: every token alone is right, their joint distribution is not."""
    del position
    return honest(sample, row, sample.start)


def forgets_the_temperature(sample: Sample, row: int, position: int) -> int:
    logits = sample.target.logits[sample.text_at(row)]
    token: int = sample.sampler.pick_logits(logits * np.float32(1.1), position)
    return token


@pytest.mark.parametrize("choose", [prefers_drafts, tries_twice, forgets_the_position, forgets_the_temperature])
def test_wrong_verification_is_noticed(target: Target, choose: Choose) -> None:
    counts, _ = draw(target, choose, n_seeds=150)
    assert deviation(counts, target.probabilities()) > 10


def test_the_statistic_of_the_distribution_itself() -> None:
    rng = np.random.default_rng(0)
    expected: dict[Text, float] = {(i,): float(p) for i, p in enumerate(rng.dirichlet(np.ones(64)))}
    probabilities: npt.NDArray[np.float64] = np.array(list(expected.values()))
    scores = []
    for _ in range(200):
        drawn = rng.multinomial(100_000, probabilities / probabilities.sum())
        scores.append(deviation(Counter({(i,): int(n) for i, n in enumerate(drawn)}), expected))
    assert abs(float(np.mean(scores))) < 0.25
    assert 0.85 < float(np.std(scores)) < 1.15
