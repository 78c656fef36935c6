"""What the package promises by name, and that everything public is documented."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import esp_edge

PACKAGE = Path(esp_edge.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PUBLIC_NAMES = [
    "Chunk",
    "ConfigError",
    "ContextLengthError",
    "DecodeError",
    "DraftConfig",
    "EspEdgeError",
    "GenerationParams",
    "GenerationStats",
    "GrammarError",
    "Llama",
    "Model",
    "ModelConfig",
    "ModelDownloadError",
    "ModelError",
    "ModelFileError",
    "ModelLoadError",
    "PromptError",
    "Session",
    "TokenLogprob",
    "UnsupportedModelError",
    "__version__",
    "load",
]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def undocumented(body: list[ast.stmt], prefix: str = "") -> list[str]:
    """Public classes, functions and methods without a docstring. Methods of a subclass may inherit theirs."""
    missing = []
    for node in public(body):
        name = prefix + node.name
        if ast.get_docstring(node) is None and not is_setter(node):
            missing.append(name)
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] in ([], ["Protocol"]):
            missing += undocumented(node.body, f"{name}.")
    return missing


def is_setter(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)


def declares_all(tree: ast.Module) -> bool:
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def test_the_public_names() -> None:
    assert esp_edge.__all__ == PUBLIC_NAMES
    assert all(hasattr(esp_edge, name) for name in PUBLIC_NAMES)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_everything_public_is_documented(path: Path) -> None:
    tree = syntax(path)
    assert ast.get_docstring(tree), "the module has no docstring"
    assert undocumented(tree.body) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_public_names_are_listed(path: Path) -> None:
    tree = syntax(path)
    is_empty_package = path.name == "__init__.py" and len(tree.body) <= 1  # its docstring
    assert declares_all(tree) or is_empty_package or path.name == "__main__.py", "the module has no __all__"
