"""Drafters that a lossless decoder must survive: always right, always wrong, random, as wide or as deep as allowed.

They keep to the ``Drafter`` protocol and to the budget; what they propose is nobody's business but theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.drafters.base import Budget
from esp_edge.models.model import TargetModel
from esp_edge.session import Chunk, Prompt, Session, TokenLogprob
from esp_edge.step import Outputs
from esp_edge.tree import DraftTree, Verdict

__all__ = [
    "AlwaysWrong",
    "Answer",
    "Chain",
    "DeepChain",
    "FullWidth",
    "Mixed",
    "Oracle",
    "RandomTree",
    "ScriptedDrafter",
    "all_drafters",
    "answer",
    "collect",
]

Chain = tuple[list[int], list[int]]  # token ids and parents, the root first


class ScriptedDrafter:
    """Base of the drafters here: follows the committed tokens and asks ``propose`` for a tree.

    Attributes:
        truth: prompt and answer as plain decoding gives them.
        trees: every tree drafted, in order.
    """

    name = "scripted"

    def __init__(self, truth: Sequence[int] = ()) -> None:
        self.truth = [int(token) for token in truth]
        self.trees: list[DraftTree] = []
        self.ids: list[int] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        self.ids = [int(token) for token in token_ids]
        self.trees = []

    def probe(self) -> DraftTree:
        return DraftTree.root_only(self.ids[-1])

    def draft(self, budget: Budget) -> DraftTree:
        n_nodes = min(budget.rows, budget.sequences)
        token_ids, parents = self.propose(n_nodes, budget.depth)
        self.trees.append(self.with_masks(token_ids, parents, budget))
        return self.trees[-1]

    def observe(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        assert tree.token_ids[0] == self.ids[-1]
        assert outputs.argmax(tree.n_rows - 1) >= 0  # the pass is still readable
        self.ids += verdict.token_ids

    def propose(self, n_nodes: int, depth: int) -> Chain:
        """At most ``n_nodes`` tokens, root included, at most ``depth`` deep."""
        raise NotImplementedError

    def with_masks(self, token_ids: list[int], parents: list[int], budget: Budget) -> DraftTree:
        del budget
        return DraftTree.from_lists(token_ids, parents, sources=self.sources(len(token_ids)))

    def sources(self, n_nodes: int) -> tuple[str, ...]:
        return ("", *[self.name] * (n_nodes - 1))

    def chain(self, tokens: Sequence[int]) -> Chain:
        return [self.ids[-1], *tokens], list(range(-1, len(tokens)))

    @property
    def future(self) -> list[int]:
        """What plain decoding commits next, as far as known."""
        return self.truth[len(self.ids) :]


class Oracle(ScriptedDrafter):
    """A chain of the right tokens; it would also run past the end of the answer."""

    name = "oracle"

    def __init__(self, truth: Sequence[int], length: int = 8) -> None:
        super().__init__(truth)
        self.length = length

    def propose(self, n_nodes: int, depth: int) -> Chain:
        return self.chain(self.future[: min(self.length, n_nodes - 1, depth)])


class AlwaysWrong(ScriptedDrafter):
    """A chain of which nothing is ever accepted."""

    name = "wrong"

    def __init__(self, truth: Sequence[int], n_vocab: int) -> None:
        super().__init__(truth)
        self.n_vocab = n_vocab

    def propose(self, n_nodes: int, depth: int) -> Chain:
        wrong = [(token + 1) % self.n_vocab for token in self.future[:5]]
        return self.chain(wrong[: min(n_nodes - 1, depth)])


class RandomTree(ScriptedDrafter):
    """Random parents, random tokens, random masks with noise for vectors."""

    name = "random"

    def __init__(self, n_vocab: int, n_embd: int, *, truth: Sequence[int] = (), seed: int = 0, most: int = 14) -> None:
        super().__init__(truth)
        self.n_vocab = n_vocab
        self.n_embd = n_embd
        self.most = most
        self.rng = np.random.default_rng(seed)

    def propose(self, n_nodes: int, depth: int) -> Chain:
        token_ids, parents, depths = [self.ids[-1]], [-1], [0]
        edges = {(-1, self.ids[-1])}
        for _ in range(int(self.rng.integers(0, self.most))):
            parent, token = int(self.rng.integers(0, len(token_ids))), int(self.rng.integers(0, self.n_vocab))
            if len(token_ids) < n_nodes and depths[parent] < depth and (parent, token) not in edges:
                edges.add((parent, token))
                token_ids.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return token_ids, parents

    def with_masks(self, token_ids: list[int], parents: list[int], budget: Budget) -> DraftTree:
        masks, left = [0] * len(token_ids), budget.rows - len(token_ids)
        for owner in range(len(token_ids) if self.n_embd else 0):
            masks[owner] = int(self.rng.integers(0, min(3, left) + 1))
            left -= masks[owner]
        vectors = self.rng.standard_normal((sum(masks), self.n_embd)).astype(np.float32) if sum(masks) else None
        sources = self.sources(len(token_ids))
        return DraftTree.from_lists(token_ids, parents, masks=masks, mask_vectors=vectors, sources=sources)


class Mixed(RandomTree):
    """The right path scattered over a random tree, so that accepted rows rarely follow the root directly."""

    name = "mixed"

    def propose(self, n_nodes: int, depth: int) -> Chain:
        token_ids, parents, depths = [self.ids[-1]], [-1], [0]
        edges = {(-1, self.ids[-1])}
        right = self.future[: int(self.rng.integers(0, 6))]
        on_path = 0

        def add(parent: int, token: int) -> bool:
            if len(token_ids) == n_nodes or depths[parent] == depth or (parent, token) in edges:
                return False
            edges.add((parent, token))
            token_ids.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            return True

        while len(token_ids) < min(n_nodes, self.most):
            if right and self.rng.random() < 0.5:
                known = list(zip(parents, token_ids, strict=True))
                if (on_path, right[0]) in known:
                    on_path = known.index((on_path, right[0]))
                elif add(on_path, right[0]):
                    on_path = len(token_ids) - 1
                else:
                    break
                right = right[1:]
            elif not add(int(self.rng.integers(0, len(token_ids))), int(self.rng.integers(0, self.n_vocab))):
                break
        return token_ids, parents


class FullWidth(ScriptedDrafter):
    """As many children of the root as rows and sequences allow, the right one last."""

    name = "wide"

    def __init__(self, truth: Sequence[int], n_vocab: int) -> None:
        super().__init__(truth)
        self.n_vocab = n_vocab

    def propose(self, n_nodes: int, depth: int) -> Chain:
        right = self.future[:1] if depth and n_nodes > 1 else []
        others = [token for token in range(self.n_vocab) if token not in right]
        width = min(n_nodes - 1, self.n_vocab) if depth else 0
        tokens = [*others[: width - len(right)], *right]
        return [self.ids[-1], *tokens], [-1, *[0] * len(tokens)]


class DeepChain(ScriptedDrafter):
    """One chain to the last row and depth the budget has: right for a while, then the root's token over and over."""

    name = "deep"

    def draft(self, budget: Budget) -> DraftTree:
        right = self.future[:3]
        length = min(budget.rows - 1, budget.depth)
        token_ids, parents = self.chain([*right, *[self.ids[-1]] * length][:length])
        return DraftTree.from_lists(token_ids, parents, sources=self.sources(len(token_ids)))


def all_drafters(truth: Sequence[int], model: TargetModel, seed: int = 0) -> Iterator[ScriptedDrafter]:
    """One of each."""
    n_vocab = model.tokenizer.n_vocab
    n_embd = model.embeddings.n_embd if model.embeddings else 0
    yield Oracle(truth)
    yield AlwaysWrong(truth, n_vocab)
    yield RandomTree(n_vocab, n_embd, seed=seed)
    yield FullWidth(truth, n_vocab)
    yield DeepChain(truth)
    yield Mixed(n_vocab, n_embd, truth=truth, seed=seed, most=24)


# ------------------------------------------------------------------------------------------- running a generation


@dataclass
class Answer:
    """A generation, joined."""

    chunks: list[Chunk]
    session_ids: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for chunk in self.chunks for entry in chunk.logprobs]

    @property
    def accepted(self) -> int:
        return sum(sum(chunk.accepted) for chunk in self.chunks)


def collect(session: Session, prompt: Prompt, params: GenerationParams | None = None) -> Answer:
    """Run a generation to its end; every chunk but the last must be unfinished."""
    chunks = list(session.generate(prompt, params))
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason in ("stop", "length")
    return Answer(chunks, list(session.token_ids))


def answer(
    model: TargetModel,
    prompt: Prompt,
    params: GenerationParams,
    draft: DraftConfig | None = None,
    drafter: ScriptedDrafter | None = None,
) -> Answer:
    """One generation in a session of its own; plain decoding unless told otherwise."""
    with Session(model, draft or DraftConfig("none"), drafter=drafter) as session:
        return collect(session, prompt, params)
