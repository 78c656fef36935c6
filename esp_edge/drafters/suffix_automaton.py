"""A suffix automaton that grows with the text: where did the longest repeated suffix stand before?

Blumer et al. 1985; used for drafting by SAM-Decoding (arXiv 2411.10666). Appending is amortised O(1), except that
keeping the newest occurrence walks the suffix links of the token before: as many as there are repeated suffixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Match", "SuffixAutomaton"]

_NONE = -1


@dataclass(frozen=True, slots=True)
class Match:
    """The longest suffix of the text that also occurs earlier; the two may overlap.

    Attributes:
        length: its tokens; 0 = none.
        first, newest: where its earliest and its latest earlier occurrence end: index of the token after it.
    """

    length: int
    first: int
    newest: int


class SuffixAutomaton:
    """States are sets of substrings that end at the same places; a suffix link drops tokens at the front.

    The suffix link of the last state is the longest repeated suffix, so no cursor has to follow the text.

    >>> automaton = SuffixAutomaton()
    >>> automaton.extend([1, 2, 7, 1, 2, 8, 1, 2])
    >>> automaton.match()  # "1 2" stood before 7 and, later, before 8
    Match(length=2, first=2, newest=5)
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [_NONE]
        self._length = [0]
        self._first = [0]
        self._newest = [0]  # over the ends before the last token's
        self._last = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; many at once are cheaper than one by one."""
        if len(token_ids) > 1:
            self._note_end()
            for token in token_ids[:-1]:
                self._add(token)
            self._collect_ends()
            self._add(token_ids[-1])
        elif token_ids:
            self._note_end()
            self._add(token_ids[0])

    def match(self) -> Match:
        """The longest repeated suffix of the text."""
        state = max(self._link[self._last], 0)
        return Match(self._length[state], self._first[state], self._newest[state])

    def _add(self, token: int) -> None:
        self.text.append(token)
        new = self._state({}, self._length[self._last] + 1, len(self.text))
        state = self._last
        while state != _NONE and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state == _NONE else self._split(state, token)
        self._last = new

    def _split(self, state: int, token: int) -> int:
        """The state of exactly ``state``'s longest string and ``token``, cut off from a larger one where needed."""
        target = self._next[state][token]
        if self._length[target] == self._length[state] + 1:
            return target
        clone = self._state(dict(self._next[target]), self._length[state] + 1, self._first[target])
        self._newest[clone] = self._newest[target]
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state != _NONE and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self._next.append(transitions)
        self._length.append(length)
        self._first.append(end)
        self._newest.append(end)
        self._link.append(_NONE)
        return len(self._link) - 1

    def _note_end(self) -> None:
        """The end of the text becomes an earlier one: the newest of all suffixes."""
        state, end = self._last, len(self.text)
        while state > 0:
            self._newest[state] = end
            state = self._link[state]

    def _collect_ends(self) -> None:
        """The same for many tokens: a state ends wherever the states below its link do."""
        for state in sorted(range(1, len(self._link)), key=self._length.__getitem__, reverse=True):
            link = self._link[state]
            self._newest[link] = max(self._newest[link], self._newest[state])
