"""The classic baseline: a second, smaller model of the same vocabulary drafts a greedy chain."""

from __future__ import annotations

from dataclasses import replace

from esp_edge.config import DraftConfig
from esp_edge.drafters.builder import NO_NODE, TreeBuilder
from esp_edge.drafters.maskless import MasklessDrafter
from esp_edge.errors import ConfigError
from esp_edge.models.model import Context, TargetModel
from esp_edge.step import Outputs, Step
from esp_edge.tree import DraftTree, Verdict

__all__ = ["DraftModelDrafter", "open_draft_model", "require_same_vocabulary"]

_PADDING = 128  # models of one family pad their vocabularies differently


def require_same_vocabulary(target: TargetModel, draft: TargetModel) -> None:
    """Raise ConfigError unless token ids mean the same in both; up to 128 ids of padding may differ.

    As llama.cpp does for its own draft models.
    """
    mine, theirs = target.tokenizer, draft.tokenizer
    if abs(mine.n_vocab - theirs.n_vocab) > _PADDING:
        what = f"it has {theirs.n_vocab} tokens and the target model {mine.n_vocab}"
    else:
        shared = range(min(mine.n_vocab, theirs.n_vocab))
        differing = next((i for i in shared if mine.raw_piece(i) != theirs.raw_piece(i)), None)
        if differing is None:
            return
        what = (
            f"token {differing} is {theirs.raw_piece(differing)!r}, in the target model {mine.raw_piece(differing)!r}"
        )
    raise ConfigError(f"a draft model needs the vocabulary of the target model, but {what}; choose one of its family")


def open_draft_model(config: DraftConfig, target: TargetModel) -> DraftModelDrafter:
    """Load ``config.draft_model`` on the same device as the target, never in exact mode: drafts may be inexact.

    Raises:
        ConfigError: none was named, or its vocabulary is another one.
        ModelError: it cannot be loaded.
    """
    if config.draft_model is None:
        raise ConfigError("drafter draft-model needs a second model: name its file with --draft-model")
    settings = replace(target.config, exact=False, n_ctx=target.n_ctx)
    draft = TargetModel(config.draft_model, settings)
    try:
        require_same_vocabulary(target, draft)
        return DraftModelDrafter(config, draft, target.tokenizer.n_vocab)
    except BaseException:
        draft.close()
        raise


class DraftModelDrafter(MasklessDrafter):
    """A chain of the draft model's own choices, as long as the block complexity leaves; one pass of it a token.

    Owns the model and its KV cache, which keeps what it has in common with the next prompt: that cannot change a
    draft. Once closed it drafts nothing.
    """

    name = "draft-model"

    def __init__(self, config: DraftConfig, model: TargetModel, n_vocab: int) -> None:
        """``n_vocab``: of the target; other tokens are never proposed."""
        super().__init__(config)
        self._model = model
        self._n_vocab = n_vocab
        self._context: Context | None = model.new_context(1)
        self._step = Step(self._context)
        self._text: list[int] = []
        self._stored: list[int] = []  # tokens that have a cell
        self._n_sure = 0  # of which these are known to agree with the text

    def close(self) -> None:
        """Free the model; calling it twice is harmless."""
        if self._context is not None:
            self._context = None
            self._model.close()

    def _start(self, prompt_ids: list[int]) -> None:
        self._text = prompt_ids
        self._n_sure = 0

    def _grow(self, builder: TreeBuilder) -> None:
        room = self._model.n_ctx - len(self._text)
        if self._context is None or room < 1 or not builder.has_room(0):
            return
        self._synchronise()
        node = 0
        for _ in range(room):
            token = self._choose(builder.token_ids[node])
            node = builder.add(node, token, self.name) if token < self._n_vocab else NO_NODE
            if node == NO_NODE or not builder.has_room(node):
                return

    def _synchronise(self) -> None:
        """Bring every token but the root into the cache, and nothing else."""
        wanted = self._text[:-1]
        while self._n_sure < min(len(self._stored), len(wanted)):
            if self._stored[self._n_sure] != wanted[self._n_sure]:
                break
            self._n_sure += 1
        self._step.truncate(self._n_sure)
        self._step.prefill(wanted[self._step.n_past :])  # a memory that cannot go back has dropped everything
        self._stored = wanted
        self._n_sure = len(wanted)

    def _choose(self, token: int) -> int:
        """Feed a token; the likeliest one after it."""
        outputs = self._step.run(DraftTree.root_only(token))
        best = outputs.argmax(0)
        self._step.commit(())
        self._stored.append(token)
        return best

    def _learn(self, tree: DraftTree, outputs: Outputs, verdict: Verdict) -> None:
        del tree, outputs
        self._text += verdict.token_ids
