"""Summary rows from records: plain arithmetic, in both conventions of the field (algorithms E).

Pooled: tau = tokens committed by decode passes / decode passes; speed = sum of tokens / sum of time. Spec-Bench: the
mean over questions of each question's own tokens/s, divided by the same mean of plain decoding; prefill included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esp_edge.bench.results import Difference, Record, Turn, Unit
from esp_edge.bench.spec import PEER_PLAIN, PLAIN, STOCK, is_peer

__all__ = ["ALL", "complete_rounds", "failures", "skipped_questions", "summary_rows"]

ALL = "all"
_Round = tuple[str, int, int | str]  # model, repeat, question id
_Lane = tuple[str, int]  # drafter, block complexity


def complete_rounds(records: Mapping[Unit, Record], lanes: Sequence[_Lane]) -> list[Record]:
    """Records of the rounds (a question in one repetition) that every lane answered; the others cannot be compared."""
    rounds: dict[_Round, list[Record]] = {}
    for record in records.values():
        rounds.setdefault(record.unit[:3], []).append(record)
    complete = [
        found for found in rounds.values() if len(found) == len(lanes) and not any(record.error for record in found)
    ]
    return [record for found in complete for record in found]


def skipped_questions(records: Mapping[Unit, Record]) -> dict[int | str, str]:
    """Question id -> why some lane could not answer it."""
    return {record.question_id: record.error for record in records.values() if record.error}


def failures(differences: Iterable[Difference], *, exact: bool) -> list[Difference]:
    """Differences that a run must not have."""
    return [difference for difference in differences if difference.is_failure(exact)]


def summary_rows(
    records: Mapping[Unit, Record], differences: Mapping[Unit, Difference], lanes: Sequence[_Lane]
) -> list[dict[str, Any]]:
    """One row a model, lane and category, and one for all categories together, JSON-ready.

    Args:
        records, differences: of a :class:`~esp_edge.bench.results.RunDirectory`.
        lanes: what was compared, in the order of the rows; plain decoding among them.
    """
    usable = complete_rounds(records, lanes)
    rows = []
    for model in dict.fromkeys(record.model for record in usable):
        of_model = [record for record in usable if record.model == model]
        for lane in lanes:
            for category in (*dict.fromkeys(record.category for record in of_model), ALL):
                chosen = [record for record in of_model if category in (ALL, record.category)]
                rows.append(_row(chosen, lane, category, differences))
    return rows


@dataclass(frozen=True, slots=True)
class _Sums:
    """Counters of several records together, times in milliseconds."""

    n_tokens: int
    prefill_tokens: int
    committed: int
    passes: int
    rows: int
    prefill_ms: float
    decode_ms: float
    model_ms: float

    @property
    def decode_rate(self) -> float:
        """Tokens per second, prefill pass excluded."""
        return _ratio(1000.0 * self.committed, self.decode_ms)

    @property
    def full_rate(self) -> float:
        """Tokens per second, prefill included."""
        return _ratio(1000.0 * (self.prefill_tokens + self.committed), self.prefill_ms + self.decode_ms)

    @property
    def tau(self) -> float:
        """Tokens per decode pass."""
        return _ratio(self.committed, self.passes)


def _sums(records: Iterable[Record]) -> _Sums:
    turns = [turn for record in records for turn in record.turns]

    def total(name: str) -> Any:
        return sum(getattr(turn, name) for turn in turns)

    return _Sums(
        n_tokens=sum(len(turn.token_ids) for turn in turns),
        prefill_tokens=total("prefill_tokens"),
        committed=total("committed_tokens"),
        passes=total("passes"),
        rows=total("rows"),
        prefill_ms=total("prefill_ms"),
        decode_ms=total("decode_ms"),
        model_ms=total("model_ms"),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _row(
    records: Sequence[Record], lane: _Lane, category: str, differences: Mapping[Unit, Difference]
) -> dict[str, Any]:
    mine = [record for record in records if record.unit[3:] == lane]
    plain = [record for record in records if record.drafter == PLAIN]
    stock = [record for record in records if record.drafter == STOCK]
    peer = [record for record in records if record.drafter == PEER_PLAIN]
    sums, base = _sums(mine), _sums(plain)
    repeats = sorted({record.repeat for record in mine})
    per_repeat = [_speedup(_of_repeat(mine, repeat), _of_repeat(plain, repeat)) for repeat in repeats]
    row = {
        "model": mine[0].model,
        "quant": mine[0].quant,
        "drafter": lane[0],
        "block_complexity": lane[1],
        "category": category,
        "n_prompts": len({record.question_id for record in mine}),
        "n_tokens": sums.n_tokens,
        "passes": sums.passes,
        "tau": sums.tau,
        "rows_per_pass": _ratio(sums.rows, sums.passes),
        "tokens_per_second": sums.decode_rate,
        "speedup": _ratio(sums.decode_rate, base.decode_rate),
        "speedup_min": min(per_repeat),
        "speedup_max": max(per_repeat),
        **_identity(mine, differences),
        "host_ms_per_pass": None if is_peer(lane[0]) else _ratio(sums.decode_ms - sums.model_ms, sums.passes),
        "model_ms_per_pass": None if is_peer(lane[0]) else _ratio(sums.model_ms, sums.passes),
        "repeats": len(repeats),
        "speedup_stock": _ratio(sums.decode_rate, _sums(stock).decode_rate) if stock else None,
        "speedup_peer": _ratio(sums.decode_rate, _sums(peer).decode_rate) if peer else None,
        "identical_peer": _equal(mine, peer) if peer else None,
        "mask_init": next((record.mask_init for record in mine if record.mask_init), None),
        "tau_mean_of_prompts": _per_prompt(mine, lambda one: one.tau),
        "tokens_per_second_end_to_end": sums.full_rate,
        "speedup_end_to_end": _ratio(sums.full_rate, base.full_rate),
        "specbench_tokens_per_second": _per_prompt(mine, lambda one: one.full_rate),
        "specbench_speedup": _ratio_of_means(mine, plain, lambda one: one.full_rate),
        "specbench_speedup_decode": _ratio_of_means(mine, plain, lambda one: one.decode_rate),
        "accepted_by_depth": _added(turn.accepted_by_depth for turn in _turns(mine)),
        "drafted_by_depth": _added(turn.drafted_by_depth for turn in _turns(mine)),
    }
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def _turns(records: Iterable[Record]) -> list[Turn]:
    return [turn for record in records for turn in record.turns]


def _of_repeat(records: Iterable[Record], repeat: int) -> list[Record]:
    return [record for record in records if record.repeat == repeat]


def _speedup(mine: Sequence[Record], plain: Sequence[Record]) -> float:
    return _ratio(_sums(mine).decode_rate, _sums(plain).decode_rate)


def _per_prompt(records: Sequence[Record], value: Callable[[_Sums], float]) -> float:
    """Mean over (question, repetition); an answer of one token has no decode pass and no rate, and is left out."""
    values = [value(_sums([record])) for record in records]
    return _mean([one for one in values if one > 0])


def _ratio_of_means(mine: Sequence[Record], plain: Sequence[Record], value: Callable[[_Sums], float]) -> float:
    return _ratio(_per_prompt(mine, value), _per_prompt(plain, value))


def _identity(records: Sequence[Record], differences: Mapping[Unit, Difference]) -> dict[str, int]:
    """Questions answered with plain decoding's tokens in every repetition, and those that differ at near-ties only."""
    kinds: dict[int | str, set[str]] = {}
    for record in records:
        difference = differences.get(record.unit)
        kinds.setdefault(record.question_id, set()).add(difference.kind if difference else "identical")
    identical = sum(kind == {"identical"} for kind in kinds.values())
    near_ties = sum(kind <= {"identical", "near-tie"} for kind in kinds.values()) - identical
    return {"identical": identical, "near_ties": near_ties}


def _equal(mine: Iterable[Record], theirs: Iterable[Record]) -> int:
    """Questions that both answered with the same tokens in every repetition."""
    tokens = {one.unit[:3]: [turn.token_ids for turn in one.turns] for one in theirs}
    same: dict[int | str, bool] = {}
    for one in mine:
        equal = [turn.token_ids for turn in one.turns] == tokens.get(one.unit[:3])
        same[one.question_id] = same.get(one.question_id, True) and equal
    return sum(same.values())


def _added(counts: Iterable[Sequence[int]]) -> list[int]:
    """Element by element, short ones padded with zeros."""
    total: list[int] = []
    for count in counts:
        total.extend([0] * (len(count) - len(total)))
        for depth, n in enumerate(count):
            total[depth] += n
    return total
