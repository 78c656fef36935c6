"""What the JSON-schema converter would silently ignore or write wrongly: refused by name instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from esp_edge.errors import GrammarError

__all__ = ["require_expressible"]

# constraints that llama-cpp-python's converter does not know and would drop
_UNKNOWN = frozenset(
    [
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_OF_SCHEMAS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties")


def require_expressible(schema: Any) -> None:
    """Raise GrammarError for a schema whose grammar would be looser than it, or would write other texts.

    An answer is never left unconstrained where a constraint was asked for.
    """
    for part in _parts(schema):
        unknown = sorted(_UNKNOWN & part.keys())
        if unknown:
            raise GrammarError(f"the JSON schema uses {unknown[0]}, which a grammar here cannot express; remove it")
        _require_known_names(part)
        texts = [*part.get("enum", []), part.get("const"), *_names(part)]
        for text in texts:
            if isinstance(text, str) and any(char in '"\\' or char < " " for char in text):
                raise GrammarError(
                    f"the JSON schema has the text {text[:40]!r}: quotes, backslashes and control characters "
                    f"in constants and names cannot be expressed; remove them"
                )
        if part.get("enum") == []:
            raise GrammarError("the JSON schema has an empty enum, which no value satisfies; list the values")


def _names(part: Mapping[str, Any]) -> list[str]:
    properties = part.get("properties")
    return list(properties) if isinstance(properties, Mapping) else []


def _require_known_names(part: Mapping[str, Any]) -> None:
    required = part.get("required")
    if isinstance(required, list) and isinstance(part.get("properties"), Mapping):
        missing = [name for name in required if name not in part["properties"]]
        if missing:
            raise GrammarError(
                f"the JSON schema requires {missing[0]!r} but has no such property; add it to properties"
            )


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and every schema inside it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        for key in _OF_SCHEMAS:
            if isinstance(part.get(key), Mapping):
                waiting += part[key].values()
        for key in _LISTS:
            if isinstance(part.get(key), list):
                waiting += part[key]
        waiting += [part[key] for key in _SINGLE if isinstance(part.get(key), Mapping)]
