"""Our CPU kernels beside llama.cpp's: which are chosen and what is said about it, on tiny models and the bundled one.

The kernels themselves are tested against plain loops in ``native/tests/test_kernels.cpp``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import esp_edge
from esp_edge import DraftConfig, GenerationParams, ModelConfig
from esp_edge._runtime import native
from esp_edge.bench.machine import describe_machine, describe_run
from esp_edge.bench.perplexity import Corpus, perplexity, questions_text, relative
from esp_edge.bench.questions import Question
from esp_edge.cli.app import main
from esp_edge.errors import ConfigError
from esp_edge.models import gguf, kernels
from esp_edge.models.kernels import ISA_VARIABLE, Kernels, plan_kernels
from esp_edge.models.model import TargetModel
from esp_edge.models.quantize import QuantizationWarning, quantize
from esp_edge.planner.measure import curve_settings, measure_models
from esp_edge.step import Step
from esp_edge.tree import DraftTree, FloatArray

FAST = ModelConfig(n_ctx=512, n_threads=2, kernels="fast")
STOCK = replace(FAST, kernels="stock")
FROM_FILE = replace(FAST, repack=False)
IDS = list(range(20, 36))
PARAMS = GenerationParams(max_tokens=12, ignore_eos=True)
BEST = native.install_kernels()
# Root mean square of the difference in logits, in standard deviations of the logits. Both sides round activations, but
# not alike: to 8 bits in blocks (about 0.5 % of each product), to BF16 (0.2 %), or not at all; and llama.cpp adds up
# attention in half precision (0.05 %).
TOLERANCE = {"F32": 5e-3, "F16": 5e-3, "BF16": 2e-2, "Q8_0": 5e-2, "Q4_0": 5e-2, "Q4_1": 5e-2, "Q4_K_M": 5e-2}


@pytest.fixture(autouse=True)
def _forget_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found out about this library and processor is found out anew, before a test and after it."""
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    kernels._install.cache_clear()
    yield
    kernels._install.cache_clear()


def stand_in(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Another extension, as far as the choice of kernels sees it."""
    real = {name: getattr(native, name) for name in ("ggml_version", "install_kernels", "take_over_weights")}
    monkeypatch.setattr(kernels, "native", SimpleNamespace(**real | functions))


def taken(**matrices: int) -> SimpleNamespace:
    """What ``native.take_over_weights`` returns: how many matrices of which type."""
    return SimpleNamespace(matrices=matrices, repacked_bytes=0)


def raising(text: str) -> Callable[[], str]:
    def install() -> str:
        raise RuntimeError(text)

    return install


def logits(model: TargetModel, ids: Sequence[int] = IDS, width: int = 1, before: Sequence[int] = ()) -> FloatArray:
    """float32[len(ids), n_vocab] of a chain in passes of ``width`` rows, behind a prefill."""
    found: list[FloatArray] = []
    with closing(model.new_context(1)) as context:
        step = Step(context)
        if before:
            step.prefill(before)
        for first in range(0, len(ids), width):
            part = ids[first : first + width]
            step.run(DraftTree.from_lists(part, range(-1, len(part) - 1)))
            found += [step.native.logits(row).copy() for row in range(len(part))]
            step.commit(range(1, len(part)))
    return np.stack(found)


def difference(found: FloatArray, wanted: FloatArray) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2)) / np.std(wanted))


def answer(path: Path, config: ModelConfig, draft: str = "none", text: str = "the rain in") -> list[int]:
    with esp_edge.load(str(path), config) as model, model.session(DraftConfig(draft)) as session:
        return [i for chunk in session.generate(text, PARAMS) for i in chunk.token_ids]


def quantized_tiny(path: Path, quant: str, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        return quantize(path, [quant], folder)[0]


@pytest.fixture(scope="module")
def k_quants(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose rows fit into the blocks of 256 weights."""
    wide = tiny("llama", n_embd=256, n_ff=256, head_dim=64)
    return quantized_tiny(wide, "Q4_K_M", tmp_path_factory.mktemp("k_quants"))


@pytest.fixture(scope="module")
def mixed(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64 weights do not: llama.cpp then makes Q5_0, which has no kernel, out of most matrices, and Q8_0."""
    return quantized_tiny(tiny("llama"), "Q4_K_M", tmp_path_factory.mktemp("mixed"))


# -- which are chosen ------------------------------------------------------------------------------------------------


def test_our_kernels_are_the_default_and_take_over_every_matrix(tiny: Callable[..., Path]) -> None:
    before = native.kernel_products()
    with TargetModel(str(tiny("llama", dtype="Q8_0")), FAST) as model:
        assert (model.kernels.isa, model.kernels.reason, model.kernels.complete) == (BEST, None, True)
        assert model.kernels.matrices == {"Q8_0": 2 * 7 + 2}
        assert re.fullmatch(BEST + r" for 16 x Q8_0, 0\.\d\d MiB of them repacked", str(model.kernels))
        logits(model)
    assert native.kernel_products() > before


def test_stock_computes_nothing_with_them(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), STOCK) as model:
        before = native.kernel_products()
        logits(model)
        assert native.kernel_products() == before
        assert (str(model.kernels), model.kernels.warning) == ("llama.cpp's", None)


@pytest.mark.parametrize("config", [ModelConfig(n_gpu_layers=-1), ModelConfig(n_gpu_layers=3, rpc="127.0.0.1:1")])
def test_layers_on_other_devices_are_none_of_their_business(tiny: Callable[..., Path], config: ModelConfig) -> None:
    found = plan_kernels(config, gguf.preflight(tiny("llama")))
    assert found == Kernels(reason="layers run on other devices: llama.cpp's kernels are used")
    assert found.warning is None


@pytest.mark.parametrize(
    ("functions", "told", "warned"),
    [
        ({"ggml_version": lambda: "0.99.0"}, "ggml 0.99.0 is not one that our kernels were tried with (0.25.3)", True),
        ({"install_kernels": raising("libggml lost a symbol")}, "libggml lost a symbol: llama.cpp's kernels", True),
        ({"install_kernels": lambda: ""}, "no kernels of ours for this processor", False),
        ({"take_over_weights": lambda *_: taken()}, "no matrix of this model has a kernel of ours", False),
    ],
    ids=["version", "symbols", "processor", "matrices"],
)
def test_what_cannot_be_used_is_told_in_one_line_and_llama_cpp_answers(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], functions: dict[str, Any], told: str, warned: bool
) -> None:
    path = tiny("llama", dtype="Q4_0")
    wanted = answer(path, STOCK)
    stand_in(monkeypatch, **functions)
    with TargetModel(str(path), FAST) as model:
        before = native.kernel_products()
        assert model.kernels.isa is None
        assert told in str(model.kernels.reason)
        assert "\n" not in str(model.kernels)
        assert (model.kernels.warning is not None) == warned
        logits(model)
        assert native.kernel_products() == before
    assert answer(path, FAST) == wanted


# -- the instruction set ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "limit", "isa"),
    [
        ("avx512", None, "avx512"),
        ("avx512", "", "avx512"),
        ("avx512", "avx2", "avx2"),
        ("avx2", "avx512", "avx2"),
        ("avx2", "neon", None),
        ("neon", "avx512", None),
        ("neon", "neon", "neon"),
    ],
)
def test_a_limit_leaves_the_best_that_it_allows(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], best: str, limit: str | None, isa: str | None
) -> None:
    stand_in(monkeypatch, install_kernels=lambda: best)
    if limit is not None:
        monkeypatch.setenv(ISA_VARIABLE, limit)
    found = plan_kernels(FAST, gguf.preflight(tiny("llama")))
    assert found.isa == isa
    assert (found.reason is None) == (isa is not None)
    assert found.warning is None  # it was asked for


def test_a_limit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse2")
    with pytest.raises(
        ConfigError, match="ESP_EDGE_KERNELS_ISA must be one of avx512, avx2, neon, but 'sse2' was given"
    ):
        TargetModel(str(tiny("llama")), FAST)
    TargetModel(str(tiny("llama")), STOCK).close()


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16", "F32", "Q4_K_M"])
def test_a_machine_without_avx512(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], k_quants: Path, dtype: str
) -> None:
    """Masked off where there is AVX-512; on other processors the best there is computes twice."""
    second = {"avx512": "avx2"}.get(BEST, BEST)
    monkeypatch.setenv(ISA_VARIABLE, second)
    path = k_quants if dtype == "Q4_K_M" else tiny("llama", dtype=dtype)
    with TargetModel(str(path), FAST) as model, TargetModel(str(path), STOCK) as stock:
        assert str(model.kernels).startswith(f"{second} for ")
        before = native.kernel_products()
        assert difference(logits(model), logits(stock)) < TOLERANCE[dtype]
        assert native.kernel_products() > before
        monkeypatch.delenv(ISA_VARIABLE)
        with TargetModel(str(path), FAST) as best:  # models with different instruction sets side by side
            assert best.kernels.isa == BEST
            assert difference(logits(best), logits(model)) < TOLERANCE[dtype]


def test_a_format_that_the_instruction_set_lacks_is_left_to_llama_cpp(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]
) -> None:
    stand_in(monkeypatch, take_over_weights=lambda *_: taken(f32=3))  # AVX-512 without products of BF16
    with TargetModel(str(tiny("llama", dtype="BF16")), FAST) as model:
        assert not model.kernels.complete
        assert str(model.kernels).endswith("for 3 x F32; llama.cpp's for the rest")


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16", "F32", "Q4_K_M"])
def test_every_format_gives_the_logits_of_llama_cpp(tiny: Callable[..., Path], k_quants: Path, dtype: str) -> None:
    path = k_quants if dtype == "Q4_K_M" else tiny("llama", dtype=dtype)
    with TargetModel(str(path), FAST) as fast, TargetModel(str(path), STOCK) as stock:
        assert fast.kernels.complete
        assert set(fast.kernels.matrices) == ({"Q4_K", "Q6_K"} if dtype == "Q4_K_M" else {dtype})
        wanted = logits(stock)
        alone = logits(fast)
        assert difference(alone, wanted) < TOLERANCE[dtype]
        for width in (2, 3, 5, 8, 16):
            assert_array_equal(logits(fast, width=width), alone)


@pytest.mark.parametrize("arch", ["phi3", "qwen2", "qwen3", "gemma2", "gemma3", "olmoe", "mixtral", "mamba"])
def test_other_architectures(tiny: Callable[..., Path], arch: str) -> None:
    """Fused matrices, biases, norms of heads, capped attention, experts, a recurrent memory."""
    path = tiny(arch, dtype="Q8_0")
    with TargetModel(str(path), FAST) as fast, TargetModel(str(path), STOCK) as stock:
        assert fast.kernels.isa == BEST
        assert fast.kernels.complete == (arch not in ("olmoe", "mixtral", "mamba"))
        before = native.kernel_products()
        found = logits(fast)
        assert native.kernel_products() > before
        assert difference(found, logits(stock)) < TOLERANCE["Q8_0"]
    if arch != "mamba":
        assert answer(path, FAST, "esp") == answer(path, FAST, "none")


def test_a_file_with_types_that_have_no_kernel(mixed: Path) -> None:
    """What has a kernel is taken over, llama.cpp repacks the rest; attention is ours behind matrices that are not."""
    types = {tensor.type_name for tensor in gguf.preflight(mixed).tensors.values() if len(tensor.shape) == 2}
    assert types - kernels.FORMATS
    with TargetModel(str(mixed), FAST) as fast, TargetModel(str(mixed), STOCK) as stock:
        assert fast.kernels.isa == BEST
        assert not fast.kernels.complete
        assert str(fast.kernels).endswith("; llama.cpp's for the rest")
        assert set(fast.kernels.matrices) <= types & kernels.FORMATS
        queries = [tensor.type_name for name, tensor in fast.header.tensors.items() if "attn_q.weight" in name]
        assert not set(queries) & kernels.FORMATS
        before = native.kernel_attentions()
        wanted = logits(stock)
        assert native.kernel_attentions() == before
        assert difference(logits(fast), wanted) < TOLERANCE["Q8_0"]
        assert native.kernel_attentions() >= before + len(queries)


def test_all_parts_of_a_split_file_count(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (gguf.preflight(tiny(arch, dtype="Q8_0")) for arch in ("llama", "olmoe"))
    monkeypatch.setattr(gguf, "read_parts", lambda _: [first, second])
    assert not plan_kernels(FAST, first).complete


# -- repacked weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16", "F32", "Q4_K_M"])
def test_repacked_weights_change_no_bit(tiny: Callable[..., Path], k_quants: Path, dtype: str) -> None:
    """Neither for lone rows, nor for wide passes, nor for a prompt whose columns the threads share."""
    path = k_quants if dtype == "Q4_K_M" else tiny("llama", dtype=dtype)
    with TargetModel(str(path), FAST) as model, TargetModel(str(path), FROM_FILE) as from_file:
        assert (model.kernels.repacked_bytes > 0) == (dtype != "F32")
        assert from_file.kernels.repacked_bytes == 0
        assert model.kernels.matrices == from_file.kernels.matrices
        for width in (1, 3, 8, 16):
            assert_array_equal(logits(model, width=width), logits(from_file, width=width))
        before = [5 + i % 200 for i in range(90)]
        assert_array_equal(logits(model, IDS, 5, before), logits(from_file, IDS, 5, before))
    for draft in ("none", "esp"):
        assert answer(path, FAST, draft) == answer(path, FROM_FILE, draft)


@pytest.mark.parametrize("arch", ["gemma3", "qwen2", "phi3", "mixtral", "mamba"])
def test_other_architectures_from_repacked_weights(tiny: Callable[..., Path], arch: str) -> None:
    path = str(tiny(arch, dtype="Q8_0"))
    with TargetModel(path, FAST) as model, TargetModel(path, FROM_FILE) as from_file:
        assert model.kernels.repacked_bytes > 0
        assert_array_equal(logits(model, width=4), logits(from_file, width=4))


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("gemma3", True)])
def test_what_is_only_looked_up_is_not_repacked(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path], arch: str, tied: bool
) -> None:
    path = tiny(arch, dtype="Q8_0")
    tensors = {t.name: t for t in gguf.preflight(path).tensors.values() if len(t.shape) == 2}
    assert tied != ("output.weight" in tensors)
    table, sizes = tensors["token_embd.weight"], sum(tensor.n_bytes for tensor in tensors.values())
    with TargetModel(str(path), FAST) as model:
        found = model.kernels.repacked_bytes
    take_over = native.take_over_weights
    stand_in(monkeypatch, take_over_weights=lambda model, isa, repack, _, n: take_over(model, isa, repack, [], n))
    with TargetModel(str(path), FAST) as model:
        everything = model.kernels.repacked_bytes
    assert everything >= sizes
    if tied:
        assert found == everything
    else:
        assert found <= everything - table.n_bytes


def test_the_text_tells_how_much_is_repacked() -> None:
    ours = Kernels("avx2", complete=True, matrices={"Q8_0": 3, "F32": 1}, repacked_bytes=90 << 20)
    assert str(ours) == "avx2 for 1 x F32, 3 x Q8_0, 90 MiB of them repacked"
    assert str(replace(ours, complete=False)) == f"{ours}; llama.cpp's for the rest"
    assert str(replace(ours, repacked_bytes=0)) == "avx2 for 1 x F32, 3 x Q8_0"


def test_without_memory_for_them_the_weights_of_the_file_are_used(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[..., Path]
) -> None:
    path = str(tiny("llama", dtype="Q4_0"))
    with TargetModel(path, FAST) as model:
        wanted = logits(model)
    asked: list[bool] = []
    take_over = native.take_over_weights

    def short_of_memory(address: int, isa: str, repack: bool, *rest: Any) -> Any:
        asked.append(repack)
        if repack:
            raise MemoryError
        return take_over(address, isa, repack, *rest)

    stand_in(monkeypatch, take_over_weights=short_of_memory)
    with TargetModel(path, FAST) as model:
        assert asked == [True, False]
        assert (str(model.kernels), model.kernels.repacked_bytes) == (f"{BEST} for 16 x Q4_0", 0)
        before = native.kernel_products()
        assert_array_equal(logits(model), wanted)
        assert native.kernel_products() > before


def test_marks_and_memory_are_used_again(tiny: Callable[..., Path], k_quants: Path) -> None:
    """Models that come and go get the places of others, of other types and sizes, repacked and not."""
    paths = [tiny("llama", dtype="Q4_0"), tiny("qwen2", dtype="Q8_0"), tiny("llama", dtype="BF16"), k_quants]
    wanted = {}
    for path in paths:
        with TargetModel(str(path), FAST) as model:
            wanted[path] = logits(model, IDS[:4])
    rng = np.random.default_rng(2)
    opened: list[tuple[Path, TargetModel]] = []
    for _ in range(24):
        if len(opened) == 3:
            opened.pop(int(rng.integers(3)))[1].close()
        path = paths[int(rng.integers(len(paths)))]
        opened.append((path, TargetModel(str(path), FAST if rng.random() < 0.6 else FROM_FILE)))
        for known, model in opened:
            assert_array_equal(logits(model, IDS[:4], width=2), wanted[known])
    for _, model in opened:
        model.close()


@pytest.mark.parametrize("first", [FAST, FROM_FILE, STOCK], ids=["repacked", "from_file", "stock"])
def test_a_file_that_two_models_have_open(tiny: Callable[..., Path], first: ModelConfig) -> None:
    """Pages that one of them gives back, and then the whole mapping, are still there for the other."""
    path = str(tiny("llama", dtype="Q4_0"))
    with TargetModel(path, first) as alone:
        wanted = logits(alone)
    one = TargetModel(path, first)
    assert_array_equal(logits(one), wanted)
    other = TargetModel(path, FAST)
    repacked = logits(other)
    assert_array_equal(logits(one), wanted)
    one.close()
    assert_array_equal(logits(other), repacked)
    with TargetModel(path, first) as again:
        other.close()
        assert_array_equal(logits(again), wanted)


MEMORY = """
import json, re, resource, sys
from pathlib import Path
from types import SimpleNamespace
from esp_edge import ModelConfig
from esp_edge._runtime import native
from esp_edge.models import kernels
from esp_edge.models.model import TargetModel
from esp_edge.step import Step
from esp_edge.tree import DraftTree

def mib(name, text):
    return sum(int(n) for n in re.findall(rf"^{name}:\\s+(\\d+)", text, re.M)) / 1024

def used(path):
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    of_file = [mapping for mapping in mappings if path in mapping.partition("\\n")[0]]
    return {"file": mib("Rss", "".join(of_file)), "anonymous": mib("RssAnon", Path("/proc/self/status").read_text())}

def short_of_memory(address, isa, repack, *rest):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if repack:
        taken = int(1024 * 1024 * mib("VmSize", Path("/proc/self/status").read_text()))
        resource.setrlimit(resource.RLIMIT_AS, (taken + (32 << 20), limits[1]))
    try:
        return take_over(address, isa, repack, *rest)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)

path, repack, short = sys.argv[1], sys.argv[2] == "repack", sys.argv[3] == "short"
take_over = native.take_over_weights
if short:
    names = ("ggml_version", "install_kernels")
    real = {name: getattr(native, name) for name in names}
    kernels.native = SimpleNamespace(take_over_weights=short_of_memory, **real)
before = used(path)["anonymous"]
with TargetModel(path, ModelConfig(n_ctx=256, n_threads=2, kernels="fast", repack=repack)) as model:
    loaded = used(path)
    step = Step(model.new_context(1))
    step.run(DraftTree.from_lists(list(range(100, 108)), range(-1, 7)))
    found = {"loaded": loaded, "decoded": used(path), "before": before}
    found["repacked"] = model.kernels.repacked_bytes / 2**20
    found["logits"] = [float(x) for x in step.native.logits(7)[:64]]
print(json.dumps(found))
"""


def memory(path: Path, *words: str) -> dict[str, Any]:
    """MiB that a process of its own has in memory: pages of the model file and others."""
    command = [sys.executable, "-c", MEMORY, str(path.resolve()), *words]
    document: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return document


if sys.platform == "linux":  # pages are given back there, and told by /proc

    @pytest.mark.model
    def test_pages_of_the_file_are_given_back(model_path: Path) -> None:
        size = model_path.stat().st_size / 2**20
        repacked, from_file = (memory(model_path, how, "enough") for how in ("repack", "file"))
        assert (from_file["repacked"], repacked["repacked"]) == (0, pytest.approx(size, rel=0.1))
        assert from_file["decoded"]["file"] > 0.8 * size
        for when in ("loaded", "decoded"):
            assert repacked[when]["file"] < 0.1 * size
            anonymous = [found[when]["anonymous"] - found["before"] for found in (repacked, from_file)]
            assert anonymous[0] - anonymous[1] == pytest.approx(repacked["repacked"], rel=0.1)  # once, not twice
        assert repacked["logits"] == from_file["logits"]

    @pytest.mark.model
    def test_a_model_is_loaded_where_memory_for_repacked_weights_cannot_be_had(model_path: Path) -> None:
        short, enough = (memory(model_path, "repack", how) for how in ("short", "enough"))
        assert short["repacked"] == 0 < enough["repacked"]
        assert short["logits"] == enough["logits"]


# -- in one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["Q4_0", "BF16"])
def test_models_with_both_stand_side_by_side(tiny: Callable[..., Path], dtype: str) -> None:
    path = str(tiny("llama", dtype=dtype))
    with TargetModel(path, STOCK) as alone:
        wanted_stock = logits(alone)
    with TargetModel(path, FAST) as alone:
        wanted_fast = logits(alone)
    with TargetModel(path, STOCK) as stock, TargetModel(path, FAST) as fast, TargetModel(path, STOCK) as late:
        for _ in range(2):
            assert_array_equal(logits(fast), wanted_fast)
            assert_array_equal(logits(stock), wanted_stock)
            assert_array_equal(logits(late), wanted_stock)


def test_a_row_has_the_same_bits_with_every_number_of_threads(tiny: Callable[..., Path]) -> None:
    """Whoever of them computes it: rows are taken over from threads that are late."""
    found = []
    for n_threads in (1, 2, 3, 4):
        for config in (FAST, FROM_FILE):
            with TargetModel(str(tiny("llama", dtype="Q4_0")), replace(config, n_threads=n_threads)) as model:
                found += [logits(model, width=8) for _ in range(3)]
    for again in found[1:]:
        assert_array_equal(again, found[0])


def test_contexts_may_compute_at_the_same_time(tiny: Callable[..., Path]) -> None:
    with (
        TargetModel(str(tiny("llama", dtype="Q8_0")), FAST) as model,
        TargetModel(str(tiny("llama", dtype="Q8_0")), STOCK) as stock,
    ):
        wanted, wanted_stock = logits(model), logits(stock)
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(logits, which, IDS, width) for width in (1, 4, 16) for which in (model, stock)]
            found = [job.result() for job in jobs]
    for fast_logits in found[::2]:
        assert_array_equal(fast_logits, wanted)
    assert_array_equal(found[1], wanted_stock)


def test_closing_and_loading_again(tiny: Callable[..., Path]) -> None:
    path = str(tiny("llama", dtype="Q4_0"))
    found = []
    for config in (FAST, STOCK, FAST, FROM_FILE, STOCK, FAST):
        with TargetModel(path, config) as model:
            found.append(logits(model, IDS[:4]))
    for again in (2, 3, 5):
        assert_array_equal(found[0], found[again])
    assert_array_equal(found[1], found[4])


def test_a_draft_model_has_kernels_of_its_own(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama", dtype="Q8_0")
    second = Path(shutil.copy(path, tmp_path / "draft.gguf"))
    draft = DraftConfig("draft-model", draft_model=str(second), block_complexity=4)
    for config in (FAST, STOCK):
        with esp_edge.load(str(path), config) as model:
            with model.session(DraftConfig("none")) as session:
                wanted = [i for chunk in session.generate("the rain", PARAMS) for i in chunk.token_ids]
            with model.session(draft) as session:
                chunks = list(session.generate("the rain", PARAMS))
        assert [i for chunk in chunks for i in chunk.token_ids] == wanted
        assert chunks[-1].stats.accepted_tokens > 0


@pytest.mark.parametrize("config", [FAST, STOCK], ids=["fast", "stock"])
def test_hidden_states_are_recorded(tiny: Callable[..., Path], config: ModelConfig) -> None:
    with TargetModel(str(tiny("llama", dtype="Q8_0")), config) as model:
        states = model.new_hidden_states()
        with closing(model.new_context(1, hidden_states=states)) as context:
            step = Step(context)
            states.start()
            step.run(DraftTree.from_lists(IDS[:3], (-1, 0, 1)))
            recorded = [step.native.logits(row).copy() for row in range(3)]
            states.stop()
        assert_array_equal(np.stack(recorded), logits(model, IDS[:3], width=3))


# -- exact mode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["Q4_0", "BF16", "F32"])
def test_exact_mode_pads_no_row_where_all_is_ours(tiny: Callable[..., Path], dtype: str) -> None:
    path = str(tiny("llama", dtype=dtype))
    with TargetModel(path, ModelConfig(n_ctx=512, exact=True)) as model:
        assert not model.pads_lone_rows
    with TargetModel(path, ModelConfig(n_ctx=512, exact=True, kernels="stock")) as model:
        assert model.pads_lone_rows


def test_capped_attention_is_llama_cpps(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("gemma2", dtype="Q8_0")), ModelConfig(n_ctx=512, exact=True)) as model:
        assert model.kernels.complete
        assert model.pads_lone_rows


def test_exact_mode_on_k_quants_needs_no_setting_for_llama_cpp(k_quants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiled products are never used, so it does not matter that other models ran before."""
    monkeypatch.delenv("GGML_CPU_TILED_MM", raising=False)
    exact = ModelConfig(n_ctx=512, exact=True)
    assert answer(k_quants, exact, "esp") == answer(k_quants, exact, "none")
    assert "GGML_CPU_TILED_MM" not in os.environ


def branching(ids: Sequence[int], n_vocab: int) -> DraftTree:
    """The chain ``ids`` with a wrong sibling before each of its nodes, so that accepted rows lie behind holes."""
    tokens, parents, last = [ids[0]], [-1], 0
    for token in ids[1:]:
        tokens += [(token + 7) % n_vocab, token]
        parents += [last, last]
        last = len(tokens) - 1
    return DraftTree.from_lists(tokens, parents)


@pytest.mark.model
@pytest.mark.parametrize("quant", ["Q4_0", "BF16"])
def test_rows_of_trees_have_the_bits_of_plain_passes_over_many_cells(
    quantized: Callable[[str], Path], quant: str
) -> None:
    """Over more than 600 cells, kept in order: accepted rows behind a rejected one are fed again."""
    with TargetModel(str(quantized(quant)), replace(FAST, n_ctx=1024)) as model:
        ids = np.random.default_rng(1).integers(100, 40000, 640).tolist()
        prefix, chain = ids[:-16], ids[-16:]
        plain = logits(model, chain, before=prefix)
        with closing(model.new_context(64)) as context:
            step = Step(context)
            step.prefill(prefix)
            for first in range(0, 16, 4):
                step.run(branching(chain[first : first + 4], 40000))
                path = (0, 2, 4, 6)
                for at, row in enumerate(path):
                    assert_array_equal(step.native.logits(row), plain[first + at])
                step.commit(path[1:])


@pytest.mark.model
@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0"])
def test_exact_answers_over_many_cells(quantized: Callable[[str], Path], quant: str) -> None:
    prompt = "Copy this: " + "The keeper of the lighthouse wrote down each ship that passed. " * 55
    with esp_edge.load(str(quantized(quant)), ModelConfig(n_ctx=1024, exact=True)) as model:
        assert not model.pads_lone_rows
        found = {}
        for draft in (DraftConfig("none"), DraftConfig("pld"), DraftConfig("esp", block_complexity=20)):
            with model.session(draft) as session:
                chunks = list(session.generate(prompt, GenerationParams(max_tokens=32)))
                found[draft.drafter] = [i for chunk in chunks for i in chunk.token_ids]
                assert chunks[-1].stats.prompt_tokens > 600
    assert found["pld"] == found["none"]
    assert found["esp"] == found["none"]


@pytest.mark.model
def test_the_perplexity_is_that_of_llama_cpp(model_path: Path, questions: list[dict[str, Any]]) -> None:
    """Within 0.2 %, and the uncertainty of a text as short as this one (about as much for 1,016 scored tokens)."""
    asked = [Question(q["question_id"], q["category"], tuple(q["turns"])) for q in questions]
    text = questions_text(asked) * (1 if len(asked) > 50 else 4)
    corpus = Corpus("questions", text, n_ctx=256, windows=8)
    found = []
    for config in (FAST, STOCK):
        with TargetModel(str(model_path), config) as model:
            found.append(perplexity(model, corpus))
    ratio, error = relative(*found)
    assert abs(ratio - 1) < 0.002 + 2 * error


# -- what people are told --------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """``program("model", "show", ...)`` runs the command line for real: (stdout, stderr)."""
    for name in [name for name in os.environ if name.startswith("ESP_EDGE_") and name != "ESP_EDGE_CACHE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ESP_EDGE_CONFIG", os.devnull)
    monkeypatch.setenv("ESP_EDGE_KERNELS", "fast")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as leaving:
            main(argv)
        out, err = capsys.readouterr()
        assert not leaving.value.code, err
        return out, err

    return run


def test_model_show_says_what_computes(program: Callable[..., tuple[str, str]], tiny: Callable[..., Path]) -> None:
    path = str(tiny("llama", dtype="Q4_0"))
    out, err = program("model", "show", path)
    assert f"{BEST} for 16 x Q4_0" in next(line for line in out.splitlines() if line.startswith("kernels "))
    assert err == ""
    document = json.loads(program("model", "show", path, "--json", "--kernels", "stock")[0])
    assert document["kernels"] == {
        "isa": None,
        "matrices": {},
        "complete": False,
        "repacked_bytes": 0,
        "reason": None,
        "text": "llama.cpp's",
    }


@pytest.mark.parametrize("flag", ["-nr", "--no-repack"])
def test_weights_stay_as_they_are_in_the_file_when_asked(
    program: Callable[..., tuple[str, str]], tiny: Callable[..., Path], flag: str
) -> None:
    asked = ("model", "show", str(tiny("llama", dtype="Q4_0")), "--json")
    by_default, without = (json.loads(program(*asked, *more)[0])["kernels"] for more in ((), (flag,)))
    assert by_default["repacked_bytes"] > 0
    assert by_default["text"].endswith("MiB of them repacked")
    assert (without["repacked_bytes"], without["text"]) == (0, f"{BEST} for 16 x Q4_0")
    assert without["matrices"] == by_default["matrices"]


def test_explain_says_it(program: Callable[..., tuple[str, str]], tiny: Callable[..., Path]) -> None:
    asked = ("generate", "the rain", "-m", str(tiny("llama", dtype="Q4_0")), "-n", "3", "--explain", "--drafter")
    for drafter in ("auto", "none"):
        _, err = program(*asked, drafter)
        assert f"{BEST} for 16 x Q4_0" in err


def test_a_library_that_is_not_known_is_told_at_every_load(
    program: Callable[..., tuple[str, str]], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, ggml_version=lambda: "0.99.0")
    told = "ggml 0.99.0 is not one that our kernels were tried with (0.25.3): llama.cpp's are used"
    path = str(tiny("llama", dtype="Q4_0"))
    _, err = program("generate", "the rain", "-m", path, "-n", "3", "--drafter", "none")
    assert [line for line in err.splitlines() if told in line] == [told]
    _, err = program("generate", "the rain", "-m", path, "-n", "3", "--drafter", "none", "--kernels", "stock")
    assert told not in err
    out, _ = program("model", "show", path)
    assert f"llama.cpp's ({told})" in out


def test_benchmarks_write_it_down(tiny: Callable[..., Path]) -> None:
    with TargetModel(str(tiny("llama", dtype="Q4_0")), FAST) as model:
        assert describe_run(model)["kernels"] == str(model.kernels)
    assert describe_machine(STOCK, quant="Q4_0", n_ctx=64, n_threads=2)["kernels"] == "stock"


def test_costs_are_remembered_by_the_kernels_that_ran(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny("llama", dtype="Q4_0"))
    with TargetModel(path, FAST) as ours:
        stand_in(monkeypatch, ggml_version=lambda: "0.99.0")
        kernels._install.cache_clear()
        with TargetModel(path, FAST) as fallen_back:
            assert curve_settings(ours) != curve_settings(fallen_back)


def test_both_are_timed_by_the_same_rounds(tiny: Callable[..., Path]) -> None:
    path = str(tiny("llama", dtype="Q4_0"))
    with TargetModel(path, FAST) as fast, TargetModel(path, STOCK) as stock:
        found = measure_models([fast, stock], budget_ms=1.0)
    assert [set(times) for times in found] == [{1, 4, 8}] * 2
    assert all(ms > 0 for times in found for ms in times.values())
