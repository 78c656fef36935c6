"""Every error this package raises on purpose.

::

    EspEdgeError                     caught by the command line: one line, exit code 1
    ├── ConfigError (ValueError)     a setting is out of range, unknown or contradictory
    ├── ModelError                   something about a model file or a loaded model
    │   ├── ModelFileError           the file is missing, broken or not a GGUF
    │   ├── ModelDownloadError       the hub did not deliver
    │   ├── ModelLoadError           llama.cpp refused the file; carries its last log lines
    │   └── UnsupportedModelError    the model loads but cannot do what was asked
    ├── PromptError (ValueError)     a prompt or message list cannot be used
    │   └── ContextLengthError       the prompt does not fit the context; carries both numbers
    ├── GrammarError (ValueError)    a GBNF grammar or JSON schema was refused
    ├── DecodeError                  a pass failed inside llama.cpp
    ├── QueueFullError               the engine has too many requests; carries when to try again
    └── EngineClosedError            the engine was closed before the answer was complete

Messages say what was required, what was found and what to do about it, on one line.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ContextLengthError",
    "DecodeError",
    "EngineClosedError",
    "EspEdgeError",
    "GrammarError",
    "ModelDownloadError",
    "ModelError",
    "ModelFileError",
    "ModelLoadError",
    "PromptError",
    "QueueFullError",
    "UnsupportedModelError",
]


class EspEdgeError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(EspEdgeError, ValueError):
    """A setting is out of range, unknown or contradicts another one."""


class ModelError(EspEdgeError):
    """Something about a model file or a loaded model."""


class ModelFileError(ModelError):
    """The file is missing, broken or not a GGUF model."""


class ModelDownloadError(ModelError):
    """The model hub did not deliver the file."""


class ModelLoadError(ModelError):
    """llama.cpp refused the file; the message ends with its last log lines."""


class UnsupportedModelError(ModelError):
    """The model was read but cannot do what was asked of it."""


class PromptError(EspEdgeError, ValueError):
    """A prompt or message list cannot be used as given."""


class ContextLengthError(PromptError):
    """The prompt does not fit the context.

    Attributes:
        n_prompt: tokens of the prompt.
        n_ctx: cells of the context.
    """

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt} tokens but the context holds {n_ctx} and needs one free cell; "
            f"shorten the prompt or raise --ctx-size"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class GrammarError(EspEdgeError, ValueError):
    """A GBNF grammar or JSON schema was refused."""


class DecodeError(EspEdgeError):
    """A forward pass failed inside llama.cpp."""


class QueueFullError(EspEdgeError):
    """The engine has as many waiting requests as it takes.

    Attributes:
        retry_after: seconds after which a slot is likely to be free.
    """

    def __init__(self, max_queue: int, retry_after: float) -> None:
        super().__init__(
            f"the queue takes {max_queue} waiting requests and is full; try again in {retry_after:.0f} seconds"
        )
        self.retry_after = retry_after


class EngineClosedError(EspEdgeError):
    """The engine was closed before the answer was complete, or takes no more requests."""
