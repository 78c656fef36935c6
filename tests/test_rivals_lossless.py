"""Rival drafters in the session: exact mode gives the tokens of plain decoding, and what is kept is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from adversarial import Answer, answer, collect

from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.drafters.draft_model import DraftModelDrafter
from esp_edge.errors import ConfigError, ModelFileError
from esp_edge.session import Model, Session, load

NAMES = ("pld", "suffix", "recycling", "stand", "lade", "racer", "auto", "draft-model")
LEARNING = NAMES[:-2]  # auto goes on learning either way, and plans with measured times
PLAIN = DraftConfig("none")
PROMPTS = ([5, 17, 42, 8, 61, 3], [7, 8, 9, 7, 8, 9, 7, 8], [i % 11 for i in range(40)])
GREEDY = GenerationParams(max_tokens=32, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=1)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256, n_threads=1, exact=True)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def second(tiny: Callable[..., Path]) -> str:
    """The same vocabulary; half as exact, so that its choices are often but not always the target's."""
    return str(tiny("llama", n_vocab=100, dtype="Q4_0"))


def config(name: str, rows: int, second: str, **options: bool) -> DraftConfig:
    draft_model = second if name == "draft-model" else None
    return DraftConfig(name, block_complexity=rows, draft_model=draft_model, **options)


def same(found: Answer, wanted: Answer) -> None:
    assert found.token_ids == wanted.token_ids
    assert found.text == wanted.text
    assert found.session_ids == wanted.session_ids


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("rows", [10, 30, 60])
@pytest.mark.parametrize("name", NAMES)
def test_exact_mode_is_identical(model: Model, second: str, name: str, rows: int, keep: bool) -> None:
    accepted = 0
    with Session(model, config(name, rows, second, keep=keep)) as session, Session(model, PLAIN) as plain:
        for params in (GREEDY, SAMPLED):
            for prompt in PROMPTS:
                found = collect(session, prompt, params)
                same(found, collect(plain, prompt, params))
                accepted += found.accepted
                stats = found.chunks[-1].stats
                assert (stats.drafter, stats.block_complexity) == (name, rows)
                assert stats.masks == 0 or name == "auto"  # which probes where the measured cost says that it can pay
                assert stats.rows_per_pass <= rows
    assert accepted > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_the_context(tiny: Callable[..., Path], second: str, name: str) -> None:
    prompt = [i % 7 for i in range(40)]
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=64, n_threads=1, exact=True)) as model:
        plain = answer(model, prompt, replace(GREEDY, max_tokens=None))
        found = answer(model, prompt, replace(GREEDY, max_tokens=None), config(name, 60, second))
        same(found, plain)
        assert len(found.token_ids) == 24


@pytest.mark.parametrize("name", LEARNING)
def test_kept_across_generations(model: Model, name: str) -> None:
    """A second time the same answer comes in other portions only where the first is remembered."""
    portions = {}
    for keep in (False, True):
        with Session(model, config(name, 30, "", keep=keep)) as session:
            chunks = [collect(session, PROMPTS[0], GREEDY).chunks for _ in range(2)]
            portions[keep] = [[chunk.stats.draft_tokens and chunk.token_ids for chunk in some] for some in chunks]
    assert portions[False][0] == portions[False][1] == portions[True][0]
    assert portions[True][1] != portions[True][0]


def test_new_settings_or_another_temperature_start_afresh(model: Model) -> None:
    kept = config("suffix", 30, "", keep=True)
    with Session(model, kept) as session:
        first = collect(session, PROMPTS[0], GREEDY).chunks[-1].stats.passes
        assert collect(session, PROMPTS[0], GREEDY).chunks[-1].stats.passes < first
        session.draft = replace(kept, block_complexity=29)
        assert collect(session, PROMPTS[0], GREEDY).chunks[-1].stats.passes == first
        collect(session, PROMPTS[0], SAMPLED)
        assert collect(session, PROMPTS[0], GREEDY).chunks[-1].stats.passes == first


def test_sources_name_the_drafter(model: Model) -> None:
    for name, names in (("pld", {"pld"}), ("racer", {"racer-copy", "racer-logits"}), ("lade", {"lade", "lade-window"})):
        chunks = answer(model, PROMPTS[1], GREEDY, config(name, 30, "")).chunks
        seen = {source for chunk in chunks for source in chunk.sources}
        assert {""} < seen <= {"", *names}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_masks_can_still_speculate(tiny: Callable[..., Path], second: str, name: str) -> None:
    with load(tiny("llama", n_vocab=100), ModelConfig(n_ctx=256, n_threads=1, exact=True)) as model:
        plain = answer(model, PROMPTS[1], GREEDY)
        model.capability = replace(model.capability, masks=False, reason="it is blind")
        model.embeddings = None
        found = answer(model, PROMPTS[1], GREEDY, config(name, 10, second))
        same(found, plain)
        assert (found.chunks[-1].stats.drafter, found.chunks[-1].stats.note) == (name, None)
        assert found.accepted > 0


def test_a_recurrent_model_decodes_plainly(tiny: Callable[..., Path]) -> None:
    with load(tiny("mamba"), ModelConfig(n_ctx=256, n_threads=1)) as model:
        stats = answer(model, [1, 2, 3], GREEDY, config("pld", 10, "")).chunks[-1].stats
        assert stats.drafter == "none"
        assert stats.note is not None


# -------------------------------------------------------------------------------------------------- the draft model


def test_the_target_as_its_own_draft_model_is_always_right(model: Model) -> None:
    """Exact as well, so that a near-tie falls the same way; 1 + 10 + 10 + 10 + 1 tokens."""
    plain = GenerationParams(max_tokens=32)  # a forbidden token is nothing a draft model knows of
    with load(str(model.path), model.config) as twin:
        drafter = DraftModelDrafter(config("draft-model", 10, "-"), twin, 100)
        for _ in range(2):  # the second time its cache holds the first answer
            found = answer(model, PROMPTS[1], plain, drafter=drafter)  # type: ignore[arg-type]
            assert [len(chunk.token_ids) for chunk in found.chunks] == [1, 10, 10, 10, 1]
            assert found.accepted == 27


def test_a_draft_model_with_a_shorter_context_stops_drafting(model: Model, second: str) -> None:
    with load(second, ModelConfig(n_ctx=24, n_threads=1)) as draft:
        drafter = DraftModelDrafter(config("draft-model", 10, second), draft, 100)
        assert draft.n_ctx == 24
        with Session(model, drafter=drafter) as session:  # type: ignore[arg-type]
            same(collect(session, PROMPTS[0], GREEDY), answer(model, PROMPTS[0], GREEDY))
            drafter.close()
            found = collect(session, PROMPTS[0], GREEDY)
            same(found, answer(model, PROMPTS[0], GREEDY))
            assert found.accepted == 0
        drafter.close()


def test_a_recurrent_draft_model_starts_over(tiny: Callable[..., Path]) -> None:
    """Its memory cannot drop a rejected chain; it reads the whole text again."""
    with load(tiny("llama"), ModelConfig(n_ctx=128, n_threads=1, exact=True)) as model:
        draft = DraftConfig("draft-model", block_complexity=4, draft_model=str(tiny("mamba")))
        same(answer(model, PROMPTS[0], GREEDY, draft), answer(model, PROMPTS[0], GREEDY))


def test_draft_models_that_do_not_fit(model: Model, tiny: Callable[..., Path], tmp_path: Path) -> None:
    wrong = {
        "it has 300 tokens and the target model 100": tiny("llama", n_vocab=300),
        r"token \d+ is .*, in the target model": tiny("llama", n_vocab=101),
    }
    for what, path in wrong.items():
        with Session(model, DraftConfig("draft-model", draft_model=str(path))) as session:
            with pytest.raises(ConfigError, match=what) as caught:
                session.generate(PROMPTS[0], GREEDY)
            assert "\n" not in str(caught.value)
            session.draft = PLAIN
            assert len(collect(session, PROMPTS[0], GREEDY).token_ids) == 32
    missing = DraftConfig("draft-model", draft_model=str(tmp_path / "none.gguf"))
    with Session(model, missing) as session, pytest.raises(ModelFileError, match="no such file"):
        session.generate(PROMPTS[0], GREEDY)


def test_the_draft_model_is_loaded_once_and_freed(model: Model, second: str) -> None:
    with Session(model, config("draft-model", 10, second)) as session:
        collect(session, PROMPTS[0], GREEDY)
        assert session._kept is not None
        first = session._kept[2]
        collect(session, PROMPTS[1], GREEDY)
        assert session._kept[2] is first
        collect(session, PROMPTS[1], SAMPLED)
        assert session._kept[2] is not first
        second_one = session._kept[2]
    for drafter in (first, second_one):
        assert isinstance(drafter, DraftModelDrafter)
        assert drafter._model.pointer is None
