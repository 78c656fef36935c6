"""``esp-edge chat``: a conversation in the terminal, or with a script on stdin."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esp_edge.cli.answer import answer, open_session
from esp_edge.cli.conversation import Conversation, assign, closest, settings
from esp_edge.cli.inputs import decode_utf8, is_terminal
from esp_edge.cli.options import DraftOptions, LoadOptions, ModelName, SamplingOptions, option
from esp_edge.cli.output import Notices, console, error, note, stats_table, write_text
from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.errors import ConfigError, EspEdgeError
from esp_edge.metrics import GenerationStats

if TYPE_CHECKING:
    from esp_edge.session import Session

__all__ = ["Chat", "Reader", "chat", "read_message"]

BLOCK = '"""'
HOW_TO_LEAVE = "Ctrl-D or /exit leaves"
HISTORY_LINES = 1000


def chat(
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
    draft: DraftOptions,
    model: ModelName = "smollm2",
    system: Annotated[str | None, option("-sys", "--system", text="System prompt.")] = None,
) -> None:
    """Talk to a model; /help lists the commands."""
    params, drafting, loading = sampling.params(), draft.config(), load.config()
    reader = Reader()
    with open_session(model, loading, drafting) as session:
        conversation = Chat(session, params, system)
        if reader.is_terminal:
            note(f"{session.model.path.name}, {session.model.n_ctx} tokens of context")
            note(f"/help lists the commands, {HOW_TO_LEAVE}")
        with reader:
            conversation.run(reader)
    if conversation.n_errors and not reader.is_terminal:
        raise typer.Exit(1)


# -- input -----------------------------------------------------------------------------------------------------------


def read_message(read_line: Callable[[bool], str | None]) -> tuple[str, bool] | None:
    r"""One message: a line, lines that end with ``\``, or everything between two ``\"""``.

    Args:
        read_line: a line without its end, or None at the end of the input; told whether it continues a message.

    Returns:
        The text and whether it may be a command; None at the end of the input.
    """
    line = read_line(False)
    if line is None:
        return None
    if line.startswith(BLOCK):
        return _read_block(line.removeprefix(BLOCK), read_line), False
    lines = []
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line(True)
    return "\n".join([*lines, line] if line is not None else lines), True


def _read_block(first: str, read_line: Callable[[bool], str | None]) -> str:
    lines: list[str] = []
    line: str | None = first
    while line is not None:
        text, closing, _ = line.partition(BLOCK)
        lines.append(text)
        if closing:
            break
        line = read_line(True)
    return "\n".join(lines).strip("\n")


class Reader:
    """Lines of stdin: edited by hand with history on a terminal, plain bytes otherwise."""

    def __init__(self) -> None:
        self.is_terminal = is_terminal()
        self._history: Path | None = None
        self._number = 0

    def __call__(self, continued: bool) -> str | None:
        """The next line without its end, or None.

        Raises:
            PromptError: a piped line that is not UTF-8.
        """
        if self.is_terminal:
            return self._edited("... " if continued else ">>> ")
        self._number += 1
        line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        return decode_utf8(line, f"stdin line {self._number}").rstrip("\r\n") if line else None

    @staticmethod
    def _edited(prompt: str) -> str | None:
        if not sys.stdout.isatty():  # the prompt must not get into the answers
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None

    def __enter__(self) -> Reader:
        if self.is_terminal:
            self._open_history()
        return self

    def _open_history(self) -> None:
        from esp_edge.models.cache import cache_root  # noqa: PLC0415

        with suppress(ImportError, OSError):
            import readline  # noqa: PLC0415 - not on every system

            self._history = cache_root() / "chat_history"
            readline.set_history_length(HISTORY_LINES)
            if self._history.exists():
                readline.read_history_file(self._history)

    def __exit__(self, *exc: object) -> None:
        if self._history is None:
            return
        with suppress(ImportError, OSError):
            import readline  # noqa: PLC0415

            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)  # what was asked is private
            readline.write_history_file(self._history)


# -- the loop --------------------------------------------------------------------------------------------------------


class Chat:
    """A session, what was said in it, and the commands that change them.

    Attributes:
        n_errors: messages and commands that failed.
    """

    def __init__(self, session: Session, params: GenerationParams, system: str | None = None) -> None:
        self.session = session
        self.params = params
        self.conversation = Conversation(system)
        self.stats: GenerationStats | None = None
        self.n_errors = 0
        self._drafter = DraftConfig().drafter  # what /spec on brings back
        self._notices = Notices()
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "/help": (self._help, "", "this list"),
            "/clear": (self._clear, "", "forget what was said; the system prompt stays"),
            "/regen": (self._regen, "", "answer the last message again"),
            "/system": (self._system, "TEXT", "set the system prompt; without TEXT the template's own"),
            "/set": (self._set, "NAME VALUE", "change a setting, such as /set temp 0.8"),
            "/show": (self._show, "", "model, context and settings"),
            "/save": (self._save, "FILE", "write the conversation to a JSON file"),
            "/load": (self._load, "FILE", "go on with a saved conversation"),
            "/stats": (self._stats, "", "statistics of the last answer"),
            "/spec": (self._spec, "on|off", "speculation; off = plain decoding"),
            "/exit": (self._exit, "", "leave; so do /quit and Ctrl-D"),
            "/quit": (self._exit, "", "same as /exit"),
        }
        self._left = False

    def run(self, reader: Reader) -> None:
        """Read and answer until the input ends or /exit."""
        while not self._left:
            try:
                message = read_message(reader)
            except KeyboardInterrupt:
                if not reader.is_terminal:
                    raise
                print(file=sys.stderr)
                note(HOW_TO_LEAVE)
                continue
            if message is None:
                return
            self.handle(*message)

    def handle(self, text: str, may_be_command: bool = True) -> None:
        """Run a command or answer a message; what goes wrong is one line on stderr."""
        if not text.strip():
            return
        try:
            if may_be_command and text.startswith("/"):
                self._command(text)
            else:
                self.ask(text)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            note("stopped; the last input is taken back")
        except BrokenPipeError:
            raise
        except (EspEdgeError, OSError) as failure:
            self.n_errors += 1
            error(failure)

    # -- answers -----------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        """Answer a message; it is taken back when it cannot be answered.

        Raises:
            EspEdgeError: the conversation does not fit the context, or a pass failed.
        """
        self.conversation.add("user", text)
        try:
            self._answer()
        except BaseException:
            self.conversation.drop_last("user")
            raise

    def _answer(self) -> None:
        """Answer the last message."""
        self._notices.show(self.session.model.template_warning)
        result = answer(self.session, self.conversation.messages(), self.params, write_text)
        if not result.text.endswith("\n"):
            write_text("\n")
        self.conversation.add("assistant", result.text)
        self.stats = result.stats
        self._notices.show(result.stats.note)
        n_ctx = self.session.model.n_ctx
        if result.finish_reason is None:
            note("stopped")
        elif result.finish_reason == "length" and result.stats.prompt_tokens + len(result.token_ids) >= n_ctx:
            note(f"the context of {n_ctx} tokens is full; /clear starts anew")

    # -- commands ----------------------------------------------------------------------------------------------------

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        argument = argument.strip()
        if name not in self._commands:
            text_as = f"; {BLOCK}{line}{BLOCK} sends it as text"
            raise ConfigError(f"there is no command {name}{closest(name, self._commands) or text_as} (/help lists all)")
        run, wanted, _ = self._commands[name]
        if argument and not wanted:
            raise ConfigError(f"{name} takes nothing behind it, but {argument!r} was given")
        run(argument)

    def _help(self, _argument: str) -> None:
        for name, (_, wanted, text) in self._commands.items():
            _say(f"{f'{name} {wanted}':<18} {text}")
        _say(f"A line that ends with a backslash goes on in the next; everything between {BLOCK} and {BLOCK} is one.")
        _say(f"Ctrl-C ends an answer; {HOW_TO_LEAVE}.")

    def _exit(self, _argument: str) -> None:
        self._left = True

    def _clear(self, _argument: str) -> None:
        self.conversation.history.clear()
        note("the conversation is empty")

    def _regen(self, _argument: str) -> None:
        """Answer the last user message again; the old answer stays if that fails."""
        kept = list(self.conversation.history)
        self.conversation.drop_last("assistant")
        if not self.conversation.history:
            raise ConfigError("there is no message to answer again")
        if self.params.is_greedy or self.params.seed is not None:
            note("at temperature 0 or with a fixed seed the answer is the same; /set temp or seed for another")
        try:
            self._answer()
        except BaseException:
            self.conversation.history = kept
            raise

    def _system(self, text: str) -> None:
        self.conversation.system = text or None
        note("the system prompt is set" if text else "the system prompt is the template's own")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name or not text.strip():
            raise ConfigError(f"/set needs a name and a value, but {argument!r} was given (/show lists them)")
        self.params, draft = assign(self.params, self.session.draft, name, text.strip())
        if draft != self.session.draft:
            self.session.draft = draft

    def _spec(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise ConfigError(f"/spec needs on or off, but {argument!r} was given")
        draft = self.session.draft
        if draft.drafter != "none":
            self._drafter = draft.drafter
        self.session.draft = dataclasses.replace(draft, drafter=self._drafter if argument == "on" else "none")
        reason = self.session.model.capability.reason
        note(f"speculation is {argument}" + (f", but {reason}" if argument == "on" and reason else ""))

    def _show(self, _argument: str) -> None:
        model, said = self.session.model, self.conversation
        _say(f"model    {model.path}")
        _say(f"context  {len(self.session.token_ids)} of {model.n_ctx} tokens in use, {len(said.history)} messages")
        _say(f"system   {said.system if said.system is not None else '(the template decides)'}")
        for name, value in settings(self.params, self.session.draft).items():
            _say(f"  {name:<20} {value}")

    def _save(self, argument: str) -> None:
        path = _path(argument, "/save")
        self.conversation.save(path, self.session.model.path.name)
        note(f"{len(self.conversation.history)} messages saved in {path}")

    def _load(self, argument: str) -> None:
        path = _path(argument, "/load")
        self.conversation = Conversation.load(path)
        note(f"{len(self.conversation.history)} messages loaded from {path}")

    def _stats(self, _argument: str) -> None:
        if self.stats is None:
            raise ConfigError("there is no answer yet, so there are no statistics")
        explanation = self.session.explain(self.stats)
        console().print(stats_table(self.stats, explanation, kernels=self.session.model.kernels))


def _say(text: str) -> None:
    console().print(text, markup=False, soft_wrap=True)


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise ConfigError(f"{command} needs the name of a file")
    try:
        return Path(argument).expanduser()
    except RuntimeError:
        user = Path(argument).parts[0]
        raise ConfigError(f"{command}: {user} has no home directory; write its path out, or ./{user}") from None
