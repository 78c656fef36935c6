"""Hidden states against a forward pass in numpy, the alignment analysis against a slow twin, and its arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fakes import Program, make_program, one_error
from fakes import draft_trees
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from tiny_gguf import Shape

from esp_edge._runtime import native
from esp_edge.analysis import report
from esp_edge.analysis.alignment import PROMPTS, Alignment, built_in_prompts, measure, summarize, threshold
from esp_edge.analysis.plots import plot_alignment
from esp_edge.config import ModelConfig
from esp_edge.errors import ConfigError, ContextLengthError, UnsupportedModelError
from esp_edge.models.model import TargetModel
from esp_edge.step import Step
from esp_edge.tree import DraftTree, FloatArray

PREFIX = (3, 14, 15, 92, 65)
CLOSE = {"rtol": 0, "atol": 2e-4}  # states are of the size of 1 to 10
# flash attention adds up in 16 bits
PRECISE = ModelConfig(n_ctx=256, flash_attn=False, type_k="f32", type_v="f32")


class Twin:
    """A llama in numpy: embedding rows at positions 0, 1, ... -> the states after each layer, and the logits."""

    def __init__(self, path: Path) -> None:
        self.shape = Shape()
        self.weights = {t.name: np.array(t.data, np.float64) for t in GGUFReader(path).tensors}

    def embed(self, token_ids: Sequence[int]) -> Any:
        return self.weights["token_embd.weight"][list(token_ids)]

    def states(self, rows: Any) -> list[Any]:
        """[n_rows, n_embd] after each layer."""
        found = []
        for layer in range(self.shape.n_layer):
            w = {k.split(".")[2]: v for k, v in self.weights.items() if k.startswith(f"blk.{layer}.")}
            rows = rows + self.attention(self.norm(rows, w["attn_norm"]), w)
            x = self.norm(rows, w["ffn_norm"])
            gate = x @ w["ffn_gate"].T
            rows = rows + (gate / (1 + np.exp(-gate)) * (x @ w["ffn_up"].T)) @ w["ffn_down"].T
            found.append(rows)
        return found

    def logits(self, last_states: Any) -> Any:
        return self.norm(last_states, self.weights["output_norm.weight"]) @ self.weights["output.weight"].T

    def attention(self, x: Any, w: dict[str, Any]) -> Any:
        s, n = self.shape, len(x)
        q = self.rope((x @ w["attn_q"].T).reshape(n, s.n_head, s.head_dim))
        k = self.rope((x @ w["attn_k"].T).reshape(n, s.n_head_kv, s.head_dim))
        v = (x @ w["attn_v"].T).reshape(n, s.n_head_kv, s.head_dim)
        share = s.n_head // s.n_head_kv
        out = np.empty((n, s.n_head, s.head_dim))
        for head in range(s.n_head):
            scores = q[:, head] @ k[:, head // share].T / math.sqrt(s.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            probs = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = probs / probs.sum(axis=1, keepdims=True) @ v[:, head // share]
        return out.reshape(n, -1) @ w["attn_output"].T

    def rope(self, x: Any) -> Any:
        half = np.arange(self.shape.head_dim // 2)
        angles = np.arange(len(x))[:, None] * 10000.0 ** (-2 * half / self.shape.head_dim)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    @staticmethod
    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@dataclass
class Lab:
    """A tiny llama, a step whose passes are recorded, and the numpy twin."""

    model: TargetModel
    step: Step
    states: Any
    twin: Twin

    def record(self, tree: DraftTree, prefix: Sequence[int] = PREFIX) -> list[FloatArray]:
        """States after each layer of one pass behind ``prefix``; the pass is not committed."""
        self.step.reset()
        self.step.prefill(prefix)
        self.states.start()
        self.step.run(tree)
        self.states.stop()
        assert self.states.problem == ""
        return [self.states.rows(layer) for layer in range(self.states.n_layers)]


@pytest.fixture(scope="module")
def lab(tiny: Callable[..., Path]) -> Iterator[Lab]:
    path = tiny("llama")
    with TargetModel(str(path), PRECISE) as model:
        states = model.new_hidden_states()
        with closing(model.new_context(64, hidden_states=states)) as context:
            yield Lab(model, Step(context), states, Twin(path))


# -- hidden states ---------------------------------------------------------------------------------------------------


def test_states_are_those_of_a_forward_pass(lab: Lab) -> None:
    tail = [35, 89, 79, 32]
    found = lab.record(DraftTree.from_lists(tail, [-1, 0, 1, 2]))
    wanted = lab.twin.states(lab.twin.embed([*PREFIX, *tail]))
    assert len(found) == len(wanted) == 2
    for layer, rows in zip(found, wanted, strict=True):
        assert_allclose(layer, rows[-4:], **CLOSE)


def test_the_last_layer_gives_the_logits(lab: Lab) -> None:
    last = lab.record(DraftTree.from_lists([35, 89, 79], [-1, 0, 0]))[-1]
    for row in range(3):
        assert_allclose(lab.step.native.logits(row), lab.twin.logits(last[row : row + 1])[0], rtol=0, atol=1e-3)


def test_an_embedding_row_has_the_states_of_its_token(lab: Lab) -> None:
    assert lab.model.embeddings is not None
    vector = lab.model.embeddings.rows([89])
    for layer in lab.record(DraftTree.from_lists([35, 89], [-1, 0], masks=[1, 0], mask_vectors=vector)):
        assert_allclose(layer[2], layer[1], **CLOSE)  # the child and the mask behind the root are the same input


@settings(max_examples=15, database=None)
@given(draft_trees(max_nodes=10, max_masks=2, n_vocab=300), st.integers(0, 2**32 - 1))
def test_rows_keep_the_order_of_the_pass(lab: Lab, tree: DraftTree, seed: int) -> None:
    """Every row of a branching pass has the states of its own path, masks included."""
    n_masks = int(tree.masks.max())
    vectors = np.random.default_rng(seed).standard_normal((max(1, n_masks), 64)).astype(np.float32)
    tokens, parents, masks = tree.token_ids.tolist(), tree.parents.tolist(), tree.masks.tolist()
    whole = DraftTree.from_lists(tokens, parents, masks=masks, mask_vectors=vectors[:n_masks] if n_masks else None)
    found = lab.record(whole)
    for node, count in enumerate(masks):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        rows = np.concatenate([lab.twin.embed([*PREFIX, *(tokens[i] for i in path)]), vectors[:count]])
        wanted = lab.twin.states(rows)
        for layer in range(2):
            for place, row in enumerate([node, *whole.mask_rows(node).tolist()]):
                assert_allclose(found[layer][row], wanted[layer][len(PREFIX) + len(path) - 1 + place], **CLOSE)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmoe", "mixtral"])
def test_every_architecture_names_the_output_of_its_layers(tiny: Callable[..., Path], arch: str) -> None:
    with TargetModel(str(tiny(arch)), PRECISE) as model:
        found = measure(model, ["hi"], max_tokens=2, top_k=3, mask_init="vocab-mean")
    assert found.cosines.shape[1] == 2
    assert np.all(np.abs(found.cosines) <= 1)


def test_a_recorder_changes_no_logit_and_sees_nothing_while_it_is_stopped(lab: Lab) -> None:
    tree = DraftTree.from_lists([35, 89, 79], [-1, 0, 0])
    before = lab.record(tree)
    seen = lab.step.native.logits(2)
    with closing(lab.model.new_context(64)) as context:
        plain = Step(context)
        plain.prefill(PREFIX)
        plain.run(tree)
        assert_array_equal(seen, plain.native.logits(2))
    lab.step.run(DraftTree.from_lists([5], [-1]))
    assert_array_equal(lab.states.rows(1), before[1])


def test_cosines_are_those_of_the_kept_row(lab: Lab) -> None:
    first = lab.record(DraftTree.from_lists([35, 89], [-1, 0]))
    lab.states.keep(1)
    second = lab.record(DraftTree.from_lists([79], [-1]))
    wanted = [cosine(a[1], b[0]) for a, b in zip(first, second, strict=True)]
    assert_allclose(lab.states.cosines(0), wanted, atol=1e-5)
    lab.states.keep(0)
    assert_allclose(lab.states.cosines(0), [1.0, 1.0])


def test_a_recorder_refuses_what_it_does_not_have() -> None:
    states = native.HiddenStates(2, 64)
    assert (states.n_rows(1), states.rows(0).shape) == (0, (0, 64))
    for call in (lambda: states.n_rows(2), lambda: states.rows(-1), lambda: states.keep(0)):
        with pytest.raises(IndexError, match=r"layer"):
            call()
    with pytest.raises(RuntimeError, match="keep one first"):
        states.cosines(0)
    for sizes in ((0, 64), (2, 0), (-1, 64)):
        with pytest.raises(ValueError, match="hidden states need"):
            native.HiddenStates(*sizes)


# -- measuring -------------------------------------------------------------------------------------------------------


def test_measured_steps_are_those_of_the_slow_twin(lab: Lab) -> None:
    """Every pass from scratch in numpy: the prompt, the answer so far, and the mask or the true token behind it."""
    prompt = lab.model.encode_chat([{"role": "user", "content": "the end"}])
    found = measure(lab.model, ["the end"], max_tokens=6, top_k=14, mask_init="vocab-mean")
    mask = lab.twin.weights["token_embd.weight"].mean(axis=0, keepdims=True)
    tokens, cosines, ranks = list(prompt), [], []
    for _ in range(len(found.ranks)):
        known = lab.twin.embed(tokens)
        probed = lab.twin.states(np.concatenate([known, mask]))
        tokens.append(int(lab.twin.logits(probed[-1])[-2].argmax()))
        true = lab.twin.states(lab.twin.embed(tokens))
        cosines.append([cosine(a[-1], b[-1]) for a, b in zip(probed, true, strict=True)])
        following = int(lab.twin.logits(true[-1])[-1].argmax())
        order = np.argsort(-lab.twin.logits(probed[-1])[-1]).tolist()
        ranks.append(min(order.index(following), 14))
    assert len(ranks) > 0
    assert_allclose(found.cosines, cosines, atol=1e-4)
    assert found.ranks.tolist() == ranks
    assert (found.top_k, found.n_prompts, found.mask_init) == (14, 1, "vocab-mean")


@pytest.mark.parametrize("init", ["prompt-mean", "last-k", "sample", "composed", "token:the", "auto"])
def test_every_mask_init_can_be_measured(lab: Lab, init: str) -> None:
    calls: list[tuple[int, int]] = []
    found = measure(
        lab.model, ["a", "the"], max_tokens=3, top_k=300, mask_init=init, progress=lambda *done: calls.append(done)
    )
    assert calls[-1] == (2, 2)
    assert len(found.ranks) == len(found.cosines) <= 6
    assert found.mask_init != "auto"
    assert (found.ranks < 300).all()  # the whole vocabulary was looked at


def test_what_cannot_be_measured(lab: Lab, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ({"top_k": 0}, {"top_k": 301}, {"max_tokens": 0}):
        with pytest.raises(ConfigError, match="are needed"):
            measure(lab.model, ["a"], **bad)
    with pytest.raises(ConfigError, match="0 prompts"):
        measure(lab.model, [])
    with pytest.raises(ContextLengthError):
        measure(lab.model, ["a " * 300], mask_init="vocab-mean")
    with TargetModel(str(tiny("mamba"))) as recurrent, pytest.raises(UnsupportedModelError, match="cannot be probed"):
        measure(recurrent, ["a"])
    for sizes, why in (((3, 64), "names none for 1 of 3 layers"), ((2, 32), "the model's width")):
        wrong = native.HiddenStates(*sizes)  # what a graph without such tensors looks like
        monkeypatch.setattr(lab.model, "new_hidden_states", lambda found=wrong: found)
        with pytest.raises(UnsupportedModelError, match=why):
            measure(lab.model, ["a"], max_tokens=1, mask_init="vocab-mean")


def test_an_answer_ends_where_the_context_does(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    n_prompt = len(lab.model.encode_chat([{"role": "user", "content": "a"}]))
    monkeypatch.setattr(lab.model, "n_ctx", n_prompt + 6)
    monkeypatch.setattr(lab.model.tokenizer, "eog_ids", frozenset())
    assert len(measure(lab.model, ["a"], max_tokens=50, mask_init="vocab-mean").ranks) == 3


def test_the_built_in_prompts_differ() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == 100
    assert len({prompt.split(" about ")[1] for prompt in built_in_prompts(10)}) == 10
    for n in (0, 101):
        with pytest.raises(ConfigError, match="100 built-in prompts"):
            built_in_prompts(n)


# -- arithmetic ------------------------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5]), st.booleans()), max_size=12)


@given(steps, st.sampled_from([0.5, 0.95, 1.0]))
def test_the_threshold_is_the_lowest_that_holds(seen: list[tuple[float, bool]], target: float) -> None:
    cosines, accepted = np.array([c for c, _ in seen]), np.array([a for _, a in seen], bool)
    found = threshold(cosines, accepted, target)
    shares = {c: [a for other, a in seen if other >= c] for c, _ in seen}
    fitting = [c for c, above in shares.items() if sum(above) >= target * len(above)]
    if not fitting:
        assert found is None
        return
    above = shares[min(fitting)]
    assert found is not None
    assert (found.cosine, found.n_steps, found.share) == (min(fitting), len(above), sum(above) / len(above))
    chosen = math.comb(sum(accepted), len(above)) / math.comb(len(seen), len(above))
    assert found.luck == pytest.approx(chosen)


def aligned(cosines: Sequence[float], ranks: Sequence[int], top_k: int = 14) -> Alignment:
    column = np.array(cosines, np.float64)[:, None]
    both = np.concatenate([np.full_like(column, 0.5), column], axis=1)
    return Alignment(both, np.array(ranks, np.int32), top_k, 1, "vocab-mean", None)


def test_a_summary_worked_by_hand() -> None:
    document = summarize(aligned([0.91, 0.81, 0.71, 0.61, 0.33], [0, 13, 3, 14, 14]))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    wide, narrow = document["results"]
    assert (wide["top_k"], wide["accepted"], wide["rejected"]) == (14, 3, 2)
    assert (narrow["top_k"], narrow["accepted"], narrow["rejected"]) == (1, 1, 4)
    first, last = wide["layers"]
    assert (first["layer"], first["auc"], last["auc"]) == (1, 0.5, 1.0)
    assert last["accepted"] == {"mean": pytest.approx(0.81), "se": pytest.approx(0.1 / math.sqrt(3))}
    assert last["rejected"]["mean"] == pytest.approx(0.47)
    assert wide["parts_from"] == 2
    assert narrow["parts_from"] is None  # one accepted step has no standard error
    assert wide["delta_star"] == {"cosine": 0.71, "n_steps": 3, "share": 1.0, "luck": pytest.approx(0.1)}
    assert wide["bins"][0] == {"low": 0.3, "high": 0.35, "steps": 1, "accepted": 0, "share": 0.0}
    assert [each["steps"] for each in wide["bins"]] == [1] * 5
    assert len(summarize(aligned([0.5], [0], top_k=1))["results"]) == 1


def test_the_report_says_what_the_data_do_not_show() -> None:
    few = report.overview(summarize(aligned([0.9, 0.8, 0.7], [0, 3, 14])))
    assert "0.800; the 2 steps from there on were all accepted" in few
    assert "with probability 0.33: this proves nothing" in few
    none = report.report(summarize(aligned([0.9, 0.8, 0.7], [14, 3, 14])), "alignment.png")
    assert "no such threshold in these data, the step with the highest cosine was rejected" in none
    assert "![alignment](alignment.png)" in none
    assert "LLaMA-3.2-3B" in none
    assert "another model" in none
    many = report.overview(summarize(aligned([0.9] * 8 + [0.1] * 8, [2] * 8 + [14] * 8)))
    assert "the 8 steps from there on were all accepted. 95 %" in many
    assert "No step was seen" in report.report(summarize(aligned([], [])))


# -- files and the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[0, 13, 14, 14], [14, 14, 14, 14], [0, 0, 0, 0]])
def test_the_plot_is_drawn(tmp_path: Path, ranks: list[int]) -> None:
    name = plot_alignment(summarize(aligned([0.9, 0.8, 0.7, 0.2], ranks)), tmp_path)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "alignment.svg").read_text("utf-8")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def test_the_command_writes_its_files(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    lines = [{"question_id": i, "category": "writing", "turns": [text]} for i, text in enumerate(("the", "an"))]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    out = tmp_path / "out"
    flags = ["-m", str(tiny("llama")), "-c", "128", "--mask-init", "vocab-mean", "--questions", str(questions)]
    code, text, _ = program(
        "analyze", "alignment", *flags, "--per-category", "1", "-n", "4", "--top-k", "5", "--out", str(out), "--json"
    )
    document = json.loads(text)
    assert code == 0
    assert document == json.loads((out / "alignment.json").read_text("utf-8"))
    assert (document["prompts"], document["n_prompts"], document["top_k"]) == ("questions.jsonl", 1, 5)
    assert {path.name for path in out.iterdir()} == {f"alignment.{kind}" for kind in ("json", "md", "png", "svg")}
    assert "## Machine" in (out / "alignment.md").read_text("utf-8")


def test_the_command_prints_a_table(program: Program, tiny: Callable[..., Path]) -> None:
    flags = ["-m", str(tiny("llama")), "-c", "128", "--mask-init", "vocab-mean"]
    code, text, _ = program("analyze", "alignment", *flags, "--prompts", "2", "-n", "3")
    assert code == 0
    assert "delta* of Lemma 3.1 for Top-14" in text
    assert "| layer | accepted, K = 14 |" in text
    code, _, err = program("analyze", "alignment", "-m", str(tiny("mamba")))
    assert code == 1
    assert "cannot be probed" in one_error(err)


@pytest.mark.model
def test_on_the_bundled_model_accepted_steps_lie_closer(model_path: Path) -> None:
    with TargetModel(str(model_path), ModelConfig(n_ctx=512)) as model:
        found = summarize(measure(model, built_in_prompts(3), max_tokens=40, mask_init="vocab-mean"))
    result = found["results"][0]
    assert found["n_layers"] == 30
    assert 0.2 < result["accepted"] / found["n_steps"] < 0.8
    last = result["layers"][-1]
    assert last["accepted"]["mean"] > last["rejected"]["mean"]
    assert last["auc"] > 0.6
