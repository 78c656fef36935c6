"""Where the time of a pass goes: nodes of tiny models against what their shapes say, arithmetic, and the command."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fakes import Program, make_program, one_error
from gguf import GGUFReader
from tiny_gguf import Shape

from esp_edge._runtime import llama_cpp, native
from esp_edge.analysis import profile_report
from esp_edge.analysis.profile import (
    JOINT,
    ROLES,
    SEPARATE,
    Node,
    Profile,
    Timed,
    measure,
    read_bandwidth,
    role,
    summarize,
)
from esp_edge.analysis.profile_plot import GROUPS, plot_profile
from esp_edge.config import ModelConfig
from esp_edge.errors import ConfigError, DecodeError, UnsupportedModelError
from esp_edge.models.model import TargetModel
from esp_edge.planner.measure import dummy_tokens
from esp_edge.step import Step
from esp_edge.tree import DraftTree

ROOT = Path(__file__).parent.parent
CONFIG = ModelConfig(n_ctx=256, n_threads=2)
KEYS = {
    "rows",
    "context",
    "repeat",
    "whole_ms",
    "whole_ms_min",
    "whole_ms_max",
    "recorded_ms",
    "ops_ms",
    "rest_ms",
    "n_bytes",
    "macs",
    "memory_ms",
    "ops",
}
LLAMA = {  # role -> nodes of a llama with two layers, all rows wanted
    "q": 2,
    "k": 2,
    "v": 2,
    "o": 2,
    "gate": 2,
    "up": 2,
    "down": 2,
    "head": 1,
    "attention": 2,
    "rope": 4,
    "norm": 10,  # five, each with its weights
    "elementwise": 6,  # two additions and a gated activation a layer
    "copy": 4,  # K and V of a layer
    "get_rows": 3,  # embeddings, and the wanted rows of two tensors of the last layer
}


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path]) -> Iterator[TargetModel]:
    with TargetModel(str(tiny("llama")), CONFIG) as model:
        yield model


def record(model: TargetModel, n: int, *, separate: bool = False, n_past: int = 5) -> list[Node]:
    """The nodes of one pass of ``n`` rows."""
    recorder = native.OpProfile()
    recorder.separate = separate
    tokens = dummy_tokens(model, n_past + n)
    with closing(model.new_context(1, hidden_states=recorder)) as context:
        step = Step(context)
        step.prefill(tokens[:n_past])
        assert recorder.nodes() == []  # nothing was started
        recorder.start(ctypes.cast(context.pointer, ctypes.c_void_p).value)
        step.run(DraftTree.from_lists(tokens[n_past:], range(-1, n - 1)))
        recorder.stop()
        assert recorder.problem == ""
        nodes = [Node(*fields) for fields in recorder.nodes()]
        step.rollback()
        step.run(DraftTree.root_only(1))
        assert len(recorder.nodes()) == len(nodes)  # stopped is stopped
    return nodes


# -- nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True])
def test_every_node_of_a_llama_is_found_and_timed(llama: TargetModel, separate: bool) -> None:
    nodes = record(llama, 3, separate=separate)
    assert Counter(map(role, nodes)) == LLAMA
    fused = [node for node in nodes if node.us == 0.0]
    assert all(node.us >= 0.0 for node in nodes)
    # the CPU computes a norm and its weights in one step, unless each node is computed alone
    assert [node.op for node in fused] == ([] if separate else ["MUL"] * 5)
    assert all(node.scales_norm for node in fused)


def test_bytes_and_multiply_adds_are_those_of_the_weights(llama: TargetModel) -> None:
    weights = {t.name: t for t in GGUFReader(llama.path).tensors}
    n = 3
    products = [node for node in record(llama, n) if node.op == "MUL_MAT"]
    assert {node.weights for node in products} == {name for name, t in weights.items() if len(t.shape) == 2} - {
        "token_embd.weight"
    }
    for node in products:
        assert node.n_bytes == weights[node.weights].n_bytes
        assert node.macs == n * weights[node.weights].n_elements
        assert node.type == "f32"


def test_attention_reads_the_cache_once(llama: TargetModel) -> None:
    shape, n, cells = Shape(), 3, 256  # cells are padded
    found = [node for node in record(llama, n) if role(node) == "attention"]
    assert [node.op for node in found] == ["FLASH_ATTN_EXT"] * shape.n_layer
    for node in found:
        assert node.type == "f16"
        assert node.n_bytes == 2 * 2 * cells * shape.n_head_kv * shape.head_dim
        assert node.macs == 2 * n * cells * shape.n_head * shape.head_dim


def test_attention_without_flash_is_four_nodes(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama")), ModelConfig(n_ctx=256, n_threads=2, flash_attn=False)) as model:
        nodes = record(model, 2)
    ops = Counter(node.op for node in nodes if role(node) == "attention")
    assert ops == {"MUL_MAT": 4, "SOFT_MAX": 2, "CONT": 2}
    assert "product" not in set(map(role, nodes))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3", "phi3", "mixtral"])
def test_other_architectures(tiny: Callable[..., Path], arch: str) -> None:
    with TargetModel(str(tiny(arch)), CONFIG) as model:
        found = Counter(map(role, record(model, 2)))
    assert "other" not in found
    assert found["head"] == 1
    assert found["o"] == found["attention"] == Shape().n_layer
    assert {"qkv"} & set(found) if arch == "phi3" else {"q", "k", "v"} <= set(found)
    if arch == "mixtral":
        assert found["product"] == Shape().n_layer  # what chooses the experts
        assert found["gate"] == found["up"] == found["down"] == Shape().n_layer


def test_bytes_of_experts_are_those_that_may_be_read(tiny: Callable[..., Path]) -> None:
    shape = Shape()
    one = 4 * shape.n_embd * shape.n_ff  # bytes of an expert's matrix
    with TargetModel(str(tiny("mixtral")), CONFIG) as model:
        for n in (1, 3):
            node = next(node for node in record(model, n) if role(node) == "down")
            assert node.n_bytes == one * min(shape.n_expert, n * shape.n_expert_used)
            assert node.macs == n * shape.n_expert_used * shape.n_embd * shape.n_ff


@pytest.mark.parametrize(
    ("op", "name", "weights", "expected"),
    [
        ("MUL_MAT", "Qcur-7", "blk.7.attn_q.weight", "q"),
        ("MUL_MAT", "x", "CPU#blk.12.ffn_down.weight#0", "down"),
        ("MUL_MAT_ID", "x", "blk.0.ffn_up_exps.weight", "up"),
        ("MUL_MAT", "x", "blk.0.ffn_gate_shexp.weight", "gate"),
        ("MUL_MAT", "x", "blk.0.ffn_gate_inp.weight", "product"),
        ("MUL_MAT", "x", "blk.0.attn_q_a.weight", "product"),
        ("MUL_MAT", "result_output", "output.weight", "head"),
        ("MUL_MAT", "result_output", "token_embd.weight", "head"),
        ("MUL_MAT", "x", "blk.0.attn_output.weight", "o"),
        ("MUL_MAT", "kqv_out-0", "blk.0.attn_output.weight", "o"),
        ("MUL_MAT", "kq-0", "cache_k_l0 (view) (permuted)", "attention"),
        ("SOFT_MAX", "kq_soft_max-0", "kq-0", "attention"),
        ("SOFT_MAX", "ffn_moe_probs-0", "ffn_moe_logits-0", "elementwise"),
        ("GLU", "ffn_swiglu-0", "ffn_gate-0", "elementwise"),
        ("SET_ROWS", "cache_k_l0 (view)", "Kcur-0", "copy"),
        ("SSM_SCAN", "x", "y", "other"),
    ],
)
def test_roles(op: str, name: str, weights: str, expected: str) -> None:
    assert role(Node(op, name, weights, "q4_0", 1, 1, 1.0, False)) == expected
    assert expected in ROLES


def test_every_part_has_one_colour() -> None:
    assert sorted(part for parts in GROUPS.values() for part in parts) == sorted(ROLES)


def test_recording_changes_no_bit(llama: TargetModel) -> None:
    tokens, recorder = dummy_tokens(llama, 8), native.OpProfile()
    tree, found = DraftTree.from_lists(tokens[5:], range(-1, 2)), []
    with closing(llama.new_context(1, hidden_states=recorder)) as context:
        step = Step(context)
        step.prefill(tokens[:5])
        address = ctypes.cast(context.pointer, ctypes.c_void_p).value
        for separate in (None, False, True):
            if separate is not None:
                recorder.separate = separate
                recorder.start(address)
            step.run(tree)
            found.append(np.stack([step.native.logits(row) for row in range(3)]))
            recorder.stop()
            step.rollback()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], found[2], rtol=0, atol=1e-4)  # norms are not fused


def test_a_recorder_that_is_stopped_twice_or_never_started_is_harmless(llama: TargetModel) -> None:
    recorder = native.OpProfile()
    recorder.stop()
    with closing(llama.new_context(1, hidden_states=recorder)) as context:
        recorder.start(ctypes.cast(context.pointer, ctypes.c_void_p).value)
        recorder.stop()
        recorder.stop()
        assert (recorder.nodes(), recorder.problem) == ([], "")
        Step(context).prefill([1, 2, 3])


# -- measuring -------------------------------------------------------------------------------------------------------


def test_measured_parts_add_up(llama: TargetModel) -> None:
    told: list[tuple[int, int]] = []
    found = measure(llama, [4, 1, 4], [40, 8], repeat=3, progress=lambda *counts: told.append(counts))
    assert found.method == JOINT
    assert [(one.context, one.rows) for one in found.passes] == [(8, 1), (8, 4), (40, 1), (40, 4)]
    assert told == [(done, 12) for done in range(1, 13)]
    for one in found.passes:
        assert len(one.whole) == len(one.recorded) == 3
        assert Counter(map(role, one.nodes)) == LLAMA
        for ms, parts in one.recorded:
            assert 0 < sum(parts.values()) < ms  # the parts of a pass lie within it
    document = summarize(found, 1e10)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    for shown in document["passes"]:
        assert set(shown) == KEYS
        assert shown["ops_ms"] == pytest.approx(sum(op["ms"] for op in shown["ops"]))
        assert shown["rest_ms"] == pytest.approx(shown["whole_ms"] - shown["ops_ms"])
        assert all(op["ms"] > 0 for op in shown["ops"])
        assert [op["op"] for op in shown["ops"]] == [name for name in ROLES if name in LLAMA]


def test_separate_nodes(llama: TargetModel) -> None:
    found = measure(llama, [2], [8], repeat=1, separate=True)
    assert found.method == SEPARATE
    assert Counter(map(role, found.passes[0].nodes)) == LLAMA
    assert "computed alone" in profile_report.report(summarize(found, 1e10))


@pytest.mark.parametrize(("length", "padded"), [(0, 256), (255, 256), (300, 512), (700, 768)])
def test_a_context_is_as_long_as_asked(llama: TargetModel, length: int, padded: int) -> None:
    node = next(n for n in measure(llama, [1], [length], repeat=1).passes[0].nodes if n.op == "FLASH_ATTN_EXT")
    assert node.n_bytes == 2 * 2 * padded * Shape().n_head_kv * Shape().head_dim


@pytest.mark.parametrize(
    ("rows", "contexts", "repeat", "message"),
    [
        ([], [8], 1, r"rows \[\]"),
        ([1], [], 1, r"contexts \[\]"),
        ([0], [8], 1, r"rows \[0\]"),
        ([1], [-1], 1, r"contexts \[-1\]"),
        ([1], [8], 0, "0 repetitions"),
        ([241], [8], 1, "a pass may have 240 rows here, but --rows asks for 241"),
    ],
)
def test_wrong_settings(llama: TargetModel, rows: list[int], contexts: list[int], repeat: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(llama, rows, contexts, repeat=repeat)


def test_a_memory_that_cannot_roll_back_is_refused(tiny: Callable[..., Path]) -> None:
    with (
        TargetModel(str(tiny("mamba")), CONFIG) as model,
        pytest.raises(UnsupportedModelError, match="can drop the rows of a pass, but a recurrent memory"),
    ):
        measure(model, [1], [8])


class _Silent:
    """A recorder on a backend that does not tell the end of every node, like a GPU's."""

    def __init__(self, real: Any, *, works_alone: bool) -> None:
        self._real = real
        self._works_alone = works_alone
        self.callback, self.address = self._real.callback, self._real.address
        self.separate = False

    @property
    def problem(self) -> str:
        return "" if self.separate and self._works_alone else "silence"

    def start(self, context: int) -> None:
        self._real.separate = self.separate
        self._real.start(context)

    def stop(self) -> None:
        self._real.stop()

    def nodes(self) -> Any:
        return self._real.nodes()


def test_a_silent_backend_is_measured_node_by_node(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.OpProfile
    monkeypatch.setattr(native, "OpProfile", lambda: _Silent(real(), works_alone=True))
    found = measure(llama, [1, 2], [8], repeat=1)
    assert found.method == SEPARATE
    assert Counter(map(role, found.passes[0].nodes)) == LLAMA
    monkeypatch.setattr(native, "OpProfile", lambda: _Silent(real(), works_alone=False))
    with pytest.raises(UnsupportedModelError, match="no profile: silence"):
        measure(llama, [1], [8], repeat=1)


def test_a_failed_pass_stops_the_recorder(llama: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise DecodeError("no")

    monkeypatch.setattr("esp_edge.analysis.profile.pass_ms", fail)
    with pytest.raises(DecodeError):
        measure(llama, [1], [8], repeat=1)
    monkeypatch.undo()
    assert measure(llama, [1], [8], repeat=1).passes


def test_the_read_bandwidth_is_of_this_world() -> None:
    assert 1e8 < read_bandwidth(2, 1 << 22) < 1e13


# -- arithmetic and words --------------------------------------------------------------------------------------------


def timed(n: int, context: int, whole: list[float], down: list[float]) -> Timed:
    """A pass with two parts: ``down`` takes the given milliseconds, norms half of one."""
    weights = Node("MUL_MAT", "x", "blk.0.ffn_down.weight", "q8_0", 4_000_000, 1_000_000 * n, 1.0, False)
    norm = Node("RMS_NORM", "x", "y", "f32", 0, 0, 1.0, False)
    parts = dict.fromkeys(ROLES, 0.0) | {"norm": 0.5}
    return Timed(n, context, whole, [(ms + 1, parts | {"down": ms}) for ms in down], [weights, norm])


def worked() -> dict[str, Any]:
    one, four = timed(1, 256, [3.0, 2.0, 9.0], [2.0, 1.0, 7.0]), timed(4, 256, [6.0], [5.0])
    return summarize(Profile(JOINT, [one, four, timed(1, 2048, [5.0], [4.0])]), 2e9) | {"model": "m"}


def test_a_summary_worked_by_hand() -> None:
    first = worked()["passes"][0]
    ops = first.pop("ops")
    assert first == {
        "rows": 1,
        "context": 256,
        "repeat": 3,
        "whole_ms": 3.0,
        "whole_ms_min": 2.0,
        "whole_ms_max": 9.0,
        "recorded_ms": 3.0,
        "ops_ms": 2.5,
        "rest_ms": 0.5,
        "n_bytes": 4_000_000,
        "macs": 1_000_000,
        "memory_ms": 2.0,
    }
    assert ops == [
        {"op": "down", "ms": 2.0, "nodes": 1, "types": ["q8_0"], "n_bytes": 4_000_000, "macs": 1_000_000},
        {"op": "norm", "ms": 0.5, "nodes": 1, "types": ["f32"], "n_bytes": 0, "macs": 0},
    ]


def cells(text: str, first: str) -> list[list[str]]:
    """The cells of every table row that starts so."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first]


def test_the_tables_say_the_same() -> None:
    text = profile_report.report(worked(), "profile.png")
    assert cells(text, "down")[0] == ["down", "q8_0", "4.0", "2.00  67 %", "5.00  83 %"]
    assert cells(text, "down")[1] == ["down", "1.00", "2.50"]
    assert cells(text, "norm")[0] == ["norm", "", "", "0.50  17 %", "0.50   8 %"]
    assert cells(text, "rest")[0] == ["rest", "", "", "0.50  17 %", "0.50   8 %"]
    assert cells(text, "whole pass")[0] == ["whole pass", "", "", "3.00", "6.00"]
    assert cells(text, "times the first")[0][3:] == ["1.00", "2.00"]
    # 4 MB in 3 ms, of 2 GB/s; 4 M multiply-adds in 6 ms
    assert cells(text, "256") == [
        ["256", "1", "4.0", "2.00", "0.001", "3.00", "1.3", "0.3"],
        ["256", "4", "4.0", "2.00", "0.004", "6.00", "0.7", "0.7"],
    ]
    assert "1 row: 3.00 ms, down 67 %, norm 17 %. 4 rows: 6.00 ms, down 83 %, norm 8 %." in text
    assert "![profile](profile.png)" in text
    shown = profile_report.overview(worked())
    assert "m, 3 passes a size, joint nodes, memory read at 2.0 GB/s" in shown
    assert "context 2048" in shown


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    document = worked()
    document["passes"][1]["rest_ms"] = -1.0
    name = plot_profile(document, tmp_path)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "profile.svg").read_text("utf-8")


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    monkeypatch.setattr("esp_edge.analysis.profile.read_bandwidth", lambda _threads: 1e10)
    return make_program(monkeypatch, capsys)


def test_the_command_writes_its_files(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["-m", str(tiny("llama", dtype="Q8_0")), "--rows", "1-2", "--contexts", "0,8", "--repeat", "2"]
    code, text, _ = program("analyze", "profile", *flags, "--out", str(out), "--json")
    document = json.loads(text)
    assert code == 0
    assert document == json.loads((out / "profile.json").read_text("utf-8"))
    assert set(document) == {"machine", "model", "method", "read_bytes_per_s", "passes"}
    assert (document["machine"]["quant"], document["machine"]["n_ctx"]) == ("Q8_0", 10)
    assert [(one["context"], one["rows"]) for one in document["passes"]] == [(0, 1), (0, 2), (8, 1), (8, 2)]
    assert {op["op"]: op["types"] for op in document["passes"][0]["ops"]}["down"] == ["q8_0"]
    assert {path.name for path in out.iterdir()} == {f"profile.{kind}" for kind in ("json", "md", "png", "svg")}
    assert "## Machine" in (out / "profile.md").read_text("utf-8")


def test_the_command_prints_tables(program: Program, tiny: Callable[..., Path]) -> None:
    flags = ["-m", str(tiny("llama")), "--rows", "1", "--contexts", "8", "--repeat", "1"]
    code, text, _ = program("analyze", "profile", *flags, "--separate")
    assert code == 0
    assert "separate nodes" in text
    assert len(cells(text, "attention")) == 1
    code, _, err = program("analyze", "profile", *flags, "--rows", "0")
    assert code == 1
    assert "--rows must be whole numbers from 1" in one_error(err)
    code, _, err = program("analyze", "profile", "-m", str(tiny("mamba")), "--rows", "1", "--contexts", "8")
    assert code == 1
    assert "can drop the rows of a pass" in one_error(err)


# -- random files ----------------------------------------------------------------------------------------------------


def random_gguf(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "random_gguf"), *args]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_random_model_of_a_real_shape(tmp_path: Path) -> None:
    out = tmp_path / "new" / "r-{quant}.gguf"
    done = random_gguf("--shape", "tiny", "--quant", "bf16,Q4_K_M,Q4_0", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    paths = [Path(line) for line in done.stdout.split()]
    assert [path.name for path in paths] == ["r-Q4_K_M.gguf", "r-Q4_0.gguf", "r-BF16.gguf"]
    assert sorted(path.name for path in out.parent.iterdir()) == sorted(path.name for path in paths)  # nothing is left
    tokens = [5, 300, 599]
    for path, kinds in zip(paths, [{"q4_K", "q6_K"}, {"q4_0", "q6_K"}, {"bf16"}], strict=True):
        with TargetModel(str(path), CONFIG) as model, closing(model.new_context(1)) as context:
            assert model.tokenizer.n_vocab == 600
            assert b"".join(map(model.tokenizer.piece, model.tokenizer.encode("the sun, ö"))) == "the sun, ö".encode()
            step = Step(context)
            step.run(DraftTree.from_lists(tokens, range(-1, 2)))
            logits = np.stack([step.native.logits(row) for row in range(3)])
            found = {node.type for node in record(model, 1) if node.op == "MUL_MAT"}
        assert found == kinds
        assert np.isfinite(logits).all()
        assert (logits.std(axis=1) > 1).all()
        assert len({int(row.argmax()) for row in logits}) == 3


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.gguf" for name in "abc"]
    for path, seed in zip(paths, "778", strict=True):
        assert random_gguf("--shape", "tiny", "--out", str(path), "--seed", seed).returncode == 0
    a, b, c = (path.read_bytes() for path in paths)
    assert a == b
    assert a != c


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--quant", "Q4_0,Q8_0", "--out", "x.gguf"], "several quantizations need an --out with {quant} in it"),
        (["--quant", "Q9", "--out", "x.gguf"], "a quantisation must be one of"),
    ],
)
def test_wrong_random_models(tmp_path: Path, args: list[str], message: str) -> None:
    done = random_gguf("--shape", "tiny", *args[:-1], str(tmp_path / args[-1]))
    assert done.returncode == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


# -- the bundled model -----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_on_the_bundled_model_the_parts_are_the_pass(model_path: Path) -> None:
    with TargetModel(str(model_path), ModelConfig(n_ctx=512)) as model:
        passes = [summarize(measure(model, [1], [256], repeat=5), 1e10)["passes"][0] for _ in range(3)]
        n_layers = llama_cpp.llama_model_n_layer(model.pointer)
        weights = {name: t.n_bytes for name, t in model.header.tensors.items()}
    ops = {op["op"]: op for op in passes[0]["ops"]}
    assert ops["down"]["nodes"] == n_layers == 30
    assert ops["head"]["n_bytes"] == weights["token_embd.weight"]
    assert ops["down"]["n_bytes"] == sum(n for name, n in weights.items() if ".ffn_down." in name)
    shares = [one["ops_ms"] / one["recorded_ms"] for one in passes]
    assert min(shares) <= 1.0
    assert max(shares) > 0.5, "in the quietest of three moments: next to other programs, a pass also waits"
