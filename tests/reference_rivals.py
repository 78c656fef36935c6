"""Slow, readable twins of the rival drafters. A twin answers with the paths of the tree it expects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from fakes import FakeOutputs

from esp_edge.config import DraftConfig
from esp_edge.drafters import Budget
from esp_edge.drafters.stand import accept_rate
from esp_edge.tree import DraftTree, Verdict

__all__ = ["TWINS", "Path", "Paths", "Twin", "longest_repeat", "paths_of", "rate", "substring_count"]

Path = tuple[int, ...]  # tokens from the root's child down


def paths_of(tree: DraftTree) -> list[Path]:
    """Path of every node in row order, the root's (empty) first."""
    paths: list[Path] = [()]
    for token, parent in zip(tree.token_ids.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


class Paths:
    """A tree as a plain list of paths that refuses what the budget does not hold."""

    def __init__(self, rows: int, budget: Budget) -> None:
        self.rows, self.depth, self.sequences = min(rows, budget.rows), budget.depth, budget.sequences
        self.found: list[Path] = [()]

    def add(self, path: Path) -> bool:
        """Whether the path is in the tree now."""
        if path in self.found:
            return True
        fits = path[:-1] in self.found and len(self.found) < self.rows and len(path) <= self.depth
        if fits and self.leaves([*self.found, path]) <= self.sequences:
            self.found.append(path)
        return path in self.found

    def add_chain(self, tokens: Sequence[int], above: Path = ()) -> None:
        for n in range(1, len(tokens) + 1):
            self.add((*above, *tokens[:n]))

    @staticmethod
    def leaves(paths: Sequence[Path]) -> int:
        return len(paths) - len({path[:-1] for path in paths if path})


class Twin:
    """Follows the text of each request; ``texts[-1]`` is the current one, its last token the root."""

    def __init__(self, config: DraftConfig, temperature: float = 0.0, ends: frozenset[int] = frozenset()) -> None:
        self.config, self.temperature, self.ends = config, temperature, ends
        self.texts: list[list[int]] = []

    def begin(self, token_ids: Sequence[int]) -> None:
        if not self.config.keep:
            self.texts.clear()
        self.texts.append(list(token_ids))

    @property
    def text(self) -> list[int]:
        return self.texts[-1]

    def expect(self, budget: Budget) -> Paths:
        paths = Paths(self.config.rows, budget)
        self.fill(paths)
        return paths

    def observe(self, tree: DraftTree, outputs: FakeOutputs, verdict: Verdict) -> None:
        self.learn(tree, outputs, verdict)
        self.text.extend(verdict.token_ids)

    def fill(self, paths: Paths) -> None:
        raise NotImplementedError

    def learn(self, tree: DraftTree, outputs: FakeOutputs, verdict: Verdict) -> None:
        pass


class Pld(Twin):
    def fill(self, paths: Paths) -> None:
        length = min(10, self.config.rows - 1)
        for n in (3, 2, 1):
            wanted = self.text[-n:]
            for text in self.texts:
                for end in range(n, len(text) - length + 1):
                    if text[end - n : end] == wanted and end < len(text):
                        paths.add_chain(text[end : end + length])
                        return


def longest_repeat(texts: Sequence[Sequence[int]]) -> tuple[int, list[tuple[int, int]]]:
    """Length of the longest end of the last text that also occurs elsewhere, and where: (text, end), oldest first."""
    last = list(texts[-1])
    for length in range(len(last), 0, -1):
        places = [
            (i, end)
            for i, text in enumerate(texts)
            for end in range(length, len(text) + 1)
            if list(text[end - length : end]) == last[-length:] and (i, end) != (len(texts) - 1, len(last))
        ]
        if places:
            return length, places
    return 0, []


class Suffix(Twin):
    def fill(self, paths: Paths) -> None:
        length, places = longest_repeat(self.texts)
        if places:
            i, end = places[-1] if self.config.occurrence == "newest" else places[0]
            paths.add_chain(self.texts[i][end : end + min(self.config.rows - 1, 1 + 4 * length)])


class Recycling(Twin):
    """Template of B.4, written out as the list there is."""

    CHILDREN = (
        {(): 8},
        {(0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1},
        {(0, 0): 8, (0, 1): 3, (0, 2): 2, **{(0, r): 1 for r in range(3, 8)}, (1, 0): 2, (1, 1): 1}
        | {(r, 0): 1 for r in range(2, 6)},
        {(0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1, (0, 1, 0): 1, (0, 2, 0): 1}
        | {(r, 0, 0): 1 for r in range(1, 4)},
        {(0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1},
        {(0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1},
    )
    RATES = (0.244, 0.066, 0.028, 0.022, 0.013, 0.012, 0.010, 0.008)

    def __init__(self, config: DraftConfig, temperature: float = 0.0, ends: frozenset[int] = frozenset()) -> None:
        super().__init__(config, temperature, ends)
        self.seen: list[tuple[int, list[int]]] = []  # every row of every pass: token, best next tokens

    def begin(self, token_ids: Sequence[int]) -> None:
        if not self.config.keep:
            self.seen.clear()
        super().begin(token_ids)

    @classmethod
    def ranks(cls, n: int) -> list[Path]:
        every = [(*above, r) for layer in cls.CHILDREN for above, count in layer.items() for r in range(count)]
        return sorted(every, key=lambda path: (-math.prod(cls.RATES[r] for r in path), len(path), path))[:n]

    def after(self, token: int) -> list[int]:
        return next((nexts for seen, nexts in reversed(self.seen) if seen == token), [])

    def fill(self, paths: Paths) -> None:
        place_ranks(paths, self.ranks(self.config.rows - 1), lambda path: self.after((self.text[-1], *path)[-1]))

    def learn(self, tree: DraftTree, outputs: FakeOutputs, verdict: Verdict) -> None:
        del verdict
        for row, token in enumerate(tree.token_ids.tolist()):
            self.seen.append((token, outputs.top_k([row], 8)[0][0].tolist()))


def place_ranks(paths: Paths, ranks: Sequence[Path], children: Callable[[Path], Sequence[int]]) -> None:
    """Rank paths to token paths, in order; a rank that has no token is left out, and all below it."""
    placed: dict[Path, Path] = {(): ()}
    asked: dict[Path, Sequence[int]] = {}
    for rank_path in ranks:
        above = placed.get(rank_path[:-1])
        if above is None:
            continue
        if above not in asked:
            asked[above] = children(above)
        if rank_path[-1] < len(asked[above]):
            path = (*above, asked[above][rank_path[-1]])
            if paths.add(path):
                placed[rank_path] = path


@cache
def best_ranks(n: int) -> list[Path]:
    """Always the best path that is not there yet, of all that can follow what is there."""
    paths: list[Path] = []
    while len(paths) < n:
        open_paths: set[Path] = {(0,)}
        open_paths |= {(*path, 0) for path in paths} | {(*path[:-1], path[-1] + 1) for path in paths}
        paths.append(min(open_paths - {*paths}, key=lambda path: (-rate(path), len(path), path)))
    return paths


def rate(path: Path) -> float:
    """Product of the acceptance rates along a path of ranks."""
    return math.prod(accept_rate(depth, rank) for depth, rank in enumerate(path, start=1))


class Stand(Twin):
    def __init__(self, config: DraftConfig, temperature: float = 0.0, ends: frozenset[int] = frozenset()) -> None:
        super().__init__(config, temperature, ends)
        self.seen: list[tuple[list[int], dict[int, float]]] = []  # (at most 4 tokens before, distribution)
        self.noise = np.random.default_rng(config.seed).gumbel(size=4096)
        self.drawn = 0

    def begin(self, token_ids: Sequence[int]) -> None:
        if not self.config.keep:
            self.seen.clear()
        super().begin(token_ids)
        self.drawn = 0
        for i, token in enumerate(token_ids):
            self.seen.append((list(token_ids[max(0, i - 4) : i]), {token: 1.0}))

    def learn(self, tree: DraftTree, outputs: FakeOutputs, verdict: Verdict) -> None:
        del tree
        text = [*self.text, *verdict.token_ids]
        for i, row in enumerate((0, *verdict.path)):
            ids, log_probs = outputs.top_k([row], 10)
            end = len(self.text) + i
            probs = dict(zip(ids[0].tolist(), np.exp(log_probs[0].astype(np.float64)).tolist(), strict=True))
            self.seen.append((text[max(0, end - 4) : end], probs))

    def after(self, context: Sequence[int]) -> list[tuple[int, float]]:
        """Longest known end of the context; its mean, over tokens that stayed among the ten best."""
        for n in (4, 3, 2, 1):
            key = list(context[-n:])
            matching = [probs for before, probs in self.seen if len(key) == n and before[-n:] == key]
            if not matching:
                continue
            mean: dict[int, float] = dict(matching[0])
            ordered = list(mean.items())
            for times, probs in enumerate(matching[1:], start=1):
                n_seen = times + 1
                mean = {t: mean.get(t, 0.0) * times / n_seen + probs.get(t, 0.0) / n_seen for t in {*mean, *probs}}
                ordered = sorted(mean.items(), key=lambda item: (-item[1], item[0]))[:10]
                mean = dict(ordered)
            return ordered
        return []

    def draw(self, distribution: list[tuple[int, float]]) -> list[int]:
        if self.temperature == 0:
            return [token for token, _ in distribution]
        keys = []
        for token, p in distribution:
            keys.append((-(math.log(p) / self.temperature + self.noise[self.drawn % 4096]), token))
            self.drawn += 1
        return [token for _, token in sorted(keys, key=lambda key: key[0])]

    def fill(self, paths: Paths) -> None:
        ranks = best_ranks(self.config.rows - 1)
        place_ranks(paths, ranks, lambda path: self.draw(self.after([*self.text, *path])))


class Lade(Twin):
    """The window as a table (level, column) -> token; column 0 of level 0 is the root."""

    SHAPES = ((60, 5, 8, 7), (30, 4, 5, 5), (10, 3, 4, 1))

    def __init__(self, config: DraftConfig, temperature: float = 0.0, ends: frozenset[int] = frozenset()) -> None:
        super().__init__(config, temperature, ends)
        rows = config.rows
        small = [(0, 3, max(1, rows // 2 - 1), 1)]
        _, self.n, self.w, self.g = next(iter([shape for shape in self.SHAPES if shape[0] <= rows] or small))
        self.ngrams: list[Path] = []  # oldest first

    def begin(self, token_ids: Sequence[int]) -> None:
        if not self.config.keep:
            self.ngrams.clear()
        super().begin(token_ids)
        self.rng = np.random.default_rng(self.config.seed)
        self.prompt = list(token_ids)
        self.window = {(0, column): self.prompt_token() for column in range(1, self.w + self.n - 2)}
        self.top = 0  # newest level
        self.ran = False

    def prompt_token(self) -> int:
        return self.prompt[int(self.rng.integers(len(self.prompt)))]

    def guesses(self) -> list[Path]:
        mine = [ngram for ngram in self.ngrams if ngram[0] == self.text[-1]]
        return [ngram[1:] for ngram in reversed(mine)][: self.g]

    def path(self, level: int, column: int) -> Path:
        chain = [self.window[0, i] for i in range(1, column + 1)]
        return (*chain, *(self.window[r, column] for r in range(1, level + 1)))

    def fill(self, paths: Paths) -> None:
        for guess in self.guesses():
            paths.add_chain(guess)
        without = list(paths.found)
        self.ran = all(paths.add(self.path(*cell)) for cell in sorted(self.window))
        if not self.ran:
            paths.found = without

    def learn(self, tree: DraftTree, outputs: FakeOutputs, verdict: Verdict) -> None:
        del verdict
        if not self.ran:
            return
        rows = paths_of(tree)
        columns = sorted(column for level, column in self.window if level == self.top)
        said = {}
        for column in columns:
            token = outputs.argmax(rows.index(self.path(self.top, column)))
            said[column] = self.prompt_token() if token in self.ends else token
        if self.top == self.n - 2:
            for column in columns:
                first = self.window[0, column] if column else self.text[-1]
                self.note((first, *(self.window[r, column] for r in range(1, self.n - 1)), said[column]))
            # a token of level r + 1 stands where one of level r stood a pass before; columns keep their places
            shifted = {(r - 1, c): token for (r, c), token in self.window.items() if r and (r > 1 or c)}
            self.window = shifted | {(self.top, c): token for c, token in said.items()}
        else:
            advanced = {(r, c - 1): token for (r, c), token in self.window.items() if c > (0 if r else 1)}
            self.top += 1
            self.window = advanced | {(self.top, c - 1): token for c, token in said.items() if c}

    def note(self, ngram: Path) -> None:
        if ngram in self.ngrams:
            self.ngrams.remove(ngram)
        self.ngrams.append(ngram)
        same = [known for known in self.ngrams if known[0] == ngram[0]]
        if len(same) > self.g:
            self.ngrams.remove(same[0])


def substring_count(texts: Sequence[Sequence[int]], wanted: Path, n: int = 10) -> int:
    """Places where ``wanted`` stands; longer than n tokens counts as nowhere."""
    if len(wanted) > n:
        return 0
    return sum(tuple(text[i : i + len(wanted)]) == wanted for text in texts for i in range(len(text) - len(wanted) + 1))


class Racer(Recycling):
    def fill(self, paths: Paths) -> None:
        texts = [*[text[:-1] for text in self.texts[:-1]], self.text[:-1]]
        found: list[tuple[int, int, int, Path]] = []
        for length in range(2, min(10, len(self.text)) + 1):
            end = tuple(self.text[-length:])
            for path in self.continuations(texts, end):
                found.append((-substring_count(texts, end + path), length + len(path), -length, path))
        for _, _, _, path in sorted(found)[: paths.rows]:
            if path:
                paths.add(path)
        self.breadth_first(paths)

    @staticmethod
    def continuations(texts: Sequence[Sequence[int]], end: Path) -> set[Path]:
        """Everything that stands behind ``end`` within ten tokens, the empty path included."""
        found: set[Path] = set()
        for text in texts:
            for i in range(len(text) - len(end) + 1):
                if tuple(text[i : i + len(end)]) == end:
                    found |= {tuple(text[i + len(end) : j]) for j in range(i + len(end), min(i + 10, len(text)) + 1)}
        return found

    def breadth_first(self, paths: Paths) -> None:
        layer: list[tuple[Path, int]] = [((), 8)]
        while layer and len(paths.found) < paths.rows:
            below: list[tuple[Path, int]] = []
            for path, breadth in layer:
                for rank, token in enumerate(self.after((self.text[-1], *path)[-1])[:breadth]):
                    if len(paths.found) < paths.rows and paths.add((*path, token)):
                        below.append(((*path, token), max(1, (breadth if not path else breadth // 2) >> rank)))
            layer = below


TWINS: dict[str, type[Twin]] = {
    "pld": Pld,
    "suffix": Suffix,
    "recycling": Recycling,
    "stand": Stand,
    "lade": Lade,
    "racer": Racer,
}
