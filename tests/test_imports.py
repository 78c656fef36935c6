"""A module imports only from rows below its own. The rows are those of CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import esp_edge

PACKAGE = Path(esp_edge.__file__).parent
ROWS = (
    ("errors",),
    ("config", "metrics"),
    ("_runtime",),
    ("tree",),
    ("models", "masks"),
    ("step",),
    ("drafters", "verify", "planner"),
    ("session",),
    ("engine",),
    ("bench", "analysis", "dropin"),
    ("server",),
    ("cli",),
    ("deploy",),
)
ROW_OF: dict[str, float] = {name: number for number, row in enumerate(ROWS, start=1) for name in row}
PUBLIC = "esp_edge"  # the package itself, that is its public names
ROW_OF[PUBLIC] = ROW_OF["bench"] - 0.5
NATIVE = ("llama_cpp", "_native")
EXEMPT = ("__init__.py", "__main__.py")


def imported(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, first part below the package) of every import; for others (line, top-level name)."""
    here = ["esp_edge", *path.relative_to(package).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: -node.level], *([node.module] if node.module else [])] if node.level else [])
            base = base or node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield node.lineno, target(name, package)


def target(name: str, package: Path) -> str:
    """``esp_edge.models.gguf`` -> ``models``; ``esp_edge.load`` -> ``esp_edge``; ``numpy.typing`` -> ``numpy``."""
    first, _, rest = name.partition(".")
    if first != "esp_edge":
        return first
    part = rest.partition(".")[0]
    is_module = part == "_native" or (package / part).is_dir() or (package / f"{part}.py").exists()
    return part if part and is_module else PUBLIC


def violations(package: Path) -> list[str]:
    """Every import against the rows, as ``file:line: why``."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if path.parent == package and path.name in EXEMPT:
            continue
        relative = path.relative_to(package)
        module = relative.with_suffix("").parts[0]
        if module not in ROW_OF:
            found.append(f"{relative}: {module} has no row")
            continue
        for line, name in imported(path, package):
            if name in NATIVE:
                allowed = module == "_runtime"
            else:
                allowed = name not in ROW_OF or name == module or ROW_OF[name] < ROW_OF[module]
            if not allowed:
                found.append(f"{relative}:{line}: {module} imports {name}")
    return found


def test_every_import_goes_down() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "code", "why"),
    [
        ("step.py", "from esp_edge.session import Session", "step.py:1: step imports session"),
        ("verify.py", "import esp_edge.drafters.esp", "verify.py:1: verify imports drafters"),
        ("masks.py", "from esp_edge import session", "masks.py:1: masks imports session"),
        ("session.py", "from esp_edge import load", "session.py:1: session imports esp_edge"),
        ("models/gguf.py", "from ..step import Step", "models/gguf.py:1: models imports step"),
        ("models/gguf.py", "from .. import step", "models/gguf.py:1: models imports step"),
        ("step.py", "def late():\n    import esp_edge.session", "step.py:2: step imports session"),
        ("tree.py", "if TYPE_CHECKING:\n    from esp_edge.step import Step", "tree.py:2: tree imports step"),
        ("server/app.py", "import esp_edge.cli.app", "server/app.py:1: server imports cli"),
        ("step.py", "import llama_cpp.llama_cpp", "step.py:1: step imports llama_cpp"),
        ("step.py", "from esp_edge import _native", "step.py:1: step imports _native"),
        ("extra.py", "", "extra.py: extra has no row"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, code: str, why: str) -> None:
    plant(tmp_path, file, code)
    assert violations(tmp_path) == [why]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("session.py", "from esp_edge.step import Step\nimport numpy.typing"),
        ("models/gguf.py", "from .cache import x\nfrom esp_edge.models.cache import y\nfrom esp_edge.errors import z"),
        ("cli/app.py", "from esp_edge import load, session"),
        ("_runtime.py", "import llama_cpp\nfrom esp_edge import _native"),
        ("__init__.py", "from esp_edge.session import Session"),
    ],
)
def test_an_import_that_goes_down_is_allowed(tmp_path: Path, file: str, code: str) -> None:
    plant(tmp_path, file, code)
    assert violations(tmp_path) == []


def plant(package: Path, file: str, code: str) -> None:
    """A package with empty modules of every row and one file of the test's own."""
    for folder in ("models", "drafters", "cli", "server"):
        (package / folder).mkdir()
    for name in ("errors", "_runtime", "tree", "step", "verify", "session"):
        (package / f"{name}.py").touch()
    (package / file).write_text(code, "utf-8")
