"""Continuous batching: every round admits requests, prefills a little, and decodes one pass for all slots together."""

from __future__ import annotations

import atexit
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from esp_edge.config import MAX_BLOCK, DraftConfig, GenerationParams
from esp_edge.drafters.base import Budget
from esp_edge.drafters.draft_model import DraftModelDrafter
from esp_edge.engine.cache import Part, PromptPrefill, SharedCache
from esp_edge.engine.ledger import Ledger
from esp_edge.engine.slot import Request, Settings, Slot
from esp_edge.engine.ticket import Ticket
from esp_edge.errors import ConfigError, EngineClosedError, QueueFullError
from esp_edge.models.model import BATCH_ROWS
from esp_edge.planner.plan import Planner
from esp_edge.session import Drafting, Generation, Model, Prompt
from esp_edge.step import MAX_EXACT_ROWS, NoRoomError

__all__ = ["Engine"]

_MAX_SLOTS = 64
_PREFILL_ROWS = 128  # of a pass in which one session decodes; shared where more do
_LEAST_PREFILL_ROWS = 32
_RESUME_MARGIN = 64  # cells that must be free beyond a saved trunk before it comes back beside others
_FIRST_GUESS_S = 5.0  # of how long an answer takes
_MEMORY = 0.8
_KNOWN_SETTINGS = 256


class Engine:
    """Answers many requests at once in one KV cache. Its methods may be called from any thread.

    A pass holds a draft tree of every session that decodes and, outside of exact mode, a share of the prompts that are
    being prefilled. In exact mode prompts are prefilled one chunk at a time in a context of their own, and an answer is
    the same as that of a session alone (:mod:`esp_edge.engine.cache` says why).

    Close it before its model, or use it as a context manager.

    Attributes:
        model: the target model.
        n_slots: sessions at the same time.
        max_queue: requests that may wait.
    """

    def __init__(
        self,
        model: Model,
        *,
        draft: DraftConfig | None = None,
        n_slots: int = 4,
        max_queue: int = 64,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make the cache and start the thread.

        Args:
            draft: how requests draft that do not say otherwise; default ``auto``.
            n_slots: 1..64; all share the ``model.n_ctx`` cells.
            progress: as for :meth:`Model.session`.

        Raises:
            ConfigError: a setting is out of range, or the drafter cannot be used in exact mode.
        """
        if not 1 <= n_slots <= _MAX_SLOTS:
            raise ConfigError(f"the number of slots must be between 1 and {_MAX_SLOTS}, but {n_slots} was given")
        if max_queue < 0:
            raise ConfigError(f"the length of the queue must be 0 or more, but {max_queue} was given")
        self.model = model
        self.n_slots = n_slots
        self.max_queue = max_queue
        self._progress = progress
        self._planners: dict[str, Planner] = {}
        self._ledger = Ledger()
        self._settings: dict[DraftConfig, Settings] = {}
        self._settling = threading.Lock()
        self._default = draft or DraftConfig()
        self._settle(self._default)
        self._exact = model.config.exact
        self._cache = SharedCache(model, n_slots)
        self._prompts = PromptPrefill(model) if self._exact else None
        self._slots = [Slot(number, model, step) for number, step in enumerate(self._cache.steps)]
        self._serial = itertools.count()
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._accepting = True
        self._stopping = False
        self._submitting = 0  # calls of submit that use the model now
        self._rounds = 0
        self._pass_began = 0.0
        self._answer_s = _FIRST_GUESS_S
        self._totals = dict.fromkeys(
            ("requests", "finished", "cancelled", "failed", "preempted", "passes", "prompt_tokens", "cached_tokens"), 0
        )
        self._totals["tokens"] = 0
        self._thread = threading.Thread(target=self._work, name="esp-edge-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a pass must not run while the interpreter goes away

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Prompt, params: GenerationParams | None = None, *, draft: DraftConfig | None = None
    ) -> Ticket:
        """Ask for an answer. The prompt is checked at once; the answer comes through the ticket.

        Raises:
            QueueFullError: too many requests wait; carries when to try again.
            EngineClosedError: the engine takes no more requests.
            PromptError, ContextLengthError: the prompt cannot be used.
            GrammarError: the grammar or JSON schema cannot be used.
            ConfigError: the draft settings cannot be used.
        """
        with self._changed:
            self._require_room()
            self._submitting += 1
        try:
            return self._submit(prompt, params, draft or self._default)
        finally:
            with self._changed:
                self._submitting -= 1
                self._changed.notify_all()

    def _submit(self, prompt: Prompt, params: GenerationParams | None, draft: DraftConfig) -> Ticket:
        settings = self._settle(draft)
        generation = Generation(self.model, prompt, params)
        ticket = Ticket(generation, self._position)
        if generation.limit == 0:
            ticket.push(generation.nothing())
            ticket.finish()
            return ticket
        ticket.on_cancel(self._wake)
        with self._changed:
            self._require_room()
            self._queue.append(Request(ticket, generation, settings, next(self._serial)))
            self._totals["requests"] += 1
            self._changed.notify_all()
        return ticket

    def status(self) -> dict[str, Any]:
        """What the engine does now, JSON-ready.

        Keys: ``slots`` (per slot ``state`` idle, prefill or decode, ``tokens`` stored, ``request`` number or None),
        ``queue`` (waiting), ``max_queue``, ``active``, ``cells`` and ``used_cells``, ``accepting``, ``exact``, and
        ``totals`` since the start (requests, finished, cancelled, failed, preempted, passes, prompt_tokens,
        cached_tokens, tokens).
        """
        slots = [self._slot_status(slot) for slot in self._slots]
        with self._changed:
            waiting, totals, accepting = len(self._queue), dict(self._totals), self._accepting
        return {
            "slots": slots,
            "active": sum(slot["state"] != "idle" for slot in slots),
            "queue": waiting,
            "max_queue": self.max_queue,
            "cells": self._cache.n_cells,
            "used_cells": sum(slot["tokens"] for slot in slots),
            "accepting": accepting,
            "exact": self._exact,
            "totals": totals,
        }

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait for those there; False when ``timeout`` seconds passed before."""
        with self._changed:
            self._accepting = False
            self._changed.notify_all()
            return self._changed.wait_for(self._is_idle, timeout)

    def clear(self) -> None:
        """Forget the trunks that idle slots keep for the next request."""
        with self._changed:
            if self._changed.wait_for(lambda: self._is_idle() or self._stopping) and not self._stopping:
                for slot in self._slots:
                    self._forget(slot)

    def close(self, timeout: float | None = 0.0) -> None:
        """Stop and free the caches; calling it twice is harmless.

        Args:
            timeout: seconds that answers may take to complete; None = as long as they need. What is not complete then
                ends with EngineClosedError.
        """
        self.drain(timeout)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            with self._changed:  # the model may be closed after this
                self._changed.wait_for(lambda: not self._submitting)
        atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_room(self) -> None:
        if not self._accepting:
            raise EngineClosedError("the engine takes no more requests: it is being closed")
        # those that a free slot will take at once do not wait
        idle = sum(slot.request is None for slot in self._slots)
        if len(self._queue) >= self.max_queue + idle:
            raise QueueFullError(self.max_queue, self._answer_s * (len(self._queue) + 1) / self.n_slots)

    def _position(self, ticket: Ticket) -> int | None:
        with self._changed:
            return next((n for n, request in enumerate(self._queue) if request.ticket is ticket), None)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _settle(self, draft: DraftConfig) -> Settings:
        """Check draft settings and resolve ``auto`` in them; measures once per model file where needed."""
        found = self._settings.get(draft)
        if found is not None:
            return found  # does not wait while other settings are measured
        with self._settling:
            found = self._settings.get(draft)
            if found is None:
                if len(self._settings) >= _KNOWN_SETTINGS:
                    self._settings.clear()
                found = _Settler(self.model, self._planners, self._progress).settle(draft)
                self._settings[draft] = found
            return found

    @staticmethod
    def _slot_status(slot: Slot) -> dict[str, Any]:
        request = slot.request
        state = "idle" if request is None else "decode" if slot.decoding else "prefill"
        return {"state": state, "tokens": len(slot.token_ids), "request": request.serial if request else None}

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or not self._is_idle())
                    if self._stopping:
                        return
                try:
                    self._round()
                except Exception as error:  # nobody may be left waiting for an answer
                    self._fail_all(error)
        finally:
            self._shut_down()

    def _is_idle(self) -> bool:
        return not self._queue and all(slot.request is None for slot in self._slots)

    def _round(self) -> None:
        self._rounds += 1
        self._sweep()
        self._admit()
        if self._prompts is not None:
            self._prefill_chunk(self._prompts)
        self._make_room()
        self._pass_began = time.perf_counter()
        for parts in self._pack(self._draft_trees(), [] if self._exact else self._prompt_parts()):
            self._pass(parts)
        with self._changed:
            self._changed.notify_all()  # drain and clear look

    def _sweep(self) -> None:
        """Let cancelled requests go."""
        with self._changed:
            gone = [request for request in self._queue if request.ticket.cancelled]
            for request in gone:
                self._queue.remove(request)
        for request in gone:
            self._end(request, "cancelled")
        for slot in self._active():
            if slot.request is not None and slot.request.ticket.cancelled:
                self._vacate(slot, "cancelled")

    def _active(self) -> list[Slot]:
        """Slots with a request, the oldest one first."""
        taken = [(slot.request.serial, slot) for slot in self._slots if slot.request is not None]
        return [slot for _, slot in sorted(taken, key=lambda pair: pair[0])]

    # -- seats -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Seat waiting requests in their order while slots and cells are free."""
        while True:
            with self._changed:
                request = self._queue[0] if self._queue else None
            slot = self._choose(request) if request else None
            if request is None or slot is None or not self._find_cells(request, slot):
                return
            with self._changed:
                if self._queue[0] is not request:
                    continue
                self._queue.popleft()
                slot.request = request  # not idle for a moment
            try:
                self._seat(slot, request)
            except Exception as error:
                self._fail(slot, error)

    def _choose(self, request: Request) -> Slot | None:
        """The free slot whose trunk the prompt continues, else an empty one, else the one unused for longest."""
        free = [slot for slot in self._slots if slot.request is None]
        if not free:
            return None
        return max(free, key=lambda slot: (self._continues(slot, request), not slot.token_ids, -slot.last_used))

    def _continues(self, slot: Slot, request: Request) -> int:
        """Tokens of a slot's trunk that start the prompt; 0 where most of the trunk would be lost for a few."""
        n = self._reuse(slot, request)
        return n if 2 * n >= slot.step.n_past else 0

    def _reuse(self, slot: Slot, request: Request) -> int:
        if request.saved is not None:
            return 0
        return slot.reusable(request.generation.token_ids, self._cache.keeps_prefixes)

    def _find_cells(self, request: Request, chosen: Slot) -> bool:
        """Make room for a request, dropping trunks of idle slots; False: active ones need it, wait."""
        active = [slot for slot in self._slots if slot.request is not None]
        needed = request.generation.n_prompt + 1
        if request.saved is not None:
            needed = request.saved.n_past + len(request.saved.refeed) + 2 + (_RESUME_MARGIN if active else 0)
        free = self._cache.n_cells - sum(slot.n_cells for slot in active)
        if active and needed > free:
            return False
        idle = [slot for slot in self._slots if slot.request is None and slot is not chosen and slot.step.n_past]
        for slot in sorted(idle, key=lambda slot: slot.last_used):
            if needed + sum(other.step.n_past for other in idle if other.step.n_past) <= free:
                break
            self._forget(slot)
        return True

    def _seat(self, slot: Slot, request: Request) -> None:
        slot.seat(request)
        generation = request.generation
        if request.saved is not None:
            saved, request.saved = request.saved, None
            if not self._cache.restore(slot.step, saved):
                raise NoRoomError("the KV cache has no room for a request that had to wait: raise --ctx-size")
            slot.token_ids = generation.token_ids
            slot.decoding = True
            return
        n = self._start_trunk(slot, request)
        generation.stats.cached_tokens = n
        with self._changed:
            self._totals["prompt_tokens"] += generation.n_prompt
            self._totals["cached_tokens"] += n
        self._prefilled(slot)

    def _start_trunk(self, slot: Slot, request: Request) -> int:
        """Keep what the slot has of the prompt, or take over what another slot has: the number of tokens."""
        own = self._reuse(slot, request)
        others = [other for other in self._slots if other is not slot and self._cache.keeps_prefixes]
        best = max(others, key=lambda other: self._reuse(other, request), default=slot)
        n = self._reuse(best, request)
        if n <= own:
            slot.step.truncate(own)
            return slot.step.n_past
        if self._exact:  # a copy, through the prefill context: the cells must stay in order
            request.partial, request.n_partial = best.step.save(), n
            self._forget(slot)
            return n
        slot.step.share(best.step, n)
        return n

    def _vacate(self, slot: Slot, outcome: str, error: Exception | None = None) -> None:
        """A request ends and leaves its trunk to the next one."""
        request = slot.request
        if request is None:
            return
        if self._prompts is not None:
            self._prompts.release(request)
        slot.step.truncate(self._worth_keeping(slot) if error is None else 0)
        with self._changed:
            slot.leave()
        slot.last_used = self._rounds
        self._answer_s = _MEMORY * self._answer_s + (1.0 - _MEMORY) * (time.perf_counter() - request.seated)
        self._end(request, outcome, error)

    def _worth_keeping(self, slot: Slot) -> int:
        """Tokens of a trunk that a later prompt can reuse."""
        n_past = slot.step.n_past
        n = slot.step.reusable(n_past)
        return n if n == n_past or self._cache.keeps_prefixes else 0

    def _end(self, request: Request, outcome: str, error: Exception | None = None) -> None:
        with self._changed:
            self._totals[outcome] += 1
        if request.drafter is not None and isinstance(request.drafter[2], DraftModelDrafter):
            request.drafter[2].close()  # it ends in the queue: no slot keeps the drafter
        request.ticket.finish(error)

    def _fail(self, slot: Slot, error: Exception) -> None:
        self._vacate(slot, "failed", error)

    def _forget(self, slot: Slot) -> None:
        slot.step.reset()
        slot.token_ids = []

    def _give_up_youngest(self, spared: int = 1) -> bool:
        """Send the youngest request back to the queue, its trunk saved; False when only ``spared`` ones are left."""
        active = self._active()
        if len(active) <= spared:
            return False
        slot = active[-1]
        if self._prompts is not None and slot.request is not None:
            self._prompts.release(slot.request)
        request = slot.give_up()
        slot.last_used = self._rounds
        with self._changed:
            self._queue.appendleft(request)
            self._totals["preempted"] += 1
        return True

    # -- prompts ---------------------------------------------------------------------------------------------------

    def _prefilling(self) -> list[Slot]:
        return [slot for slot in self._active() if not slot.decoding]

    def _prompt_parts(self) -> list[tuple[Slot, Part]]:
        """Rows of the pass for prompts: half for the oldest, so that none starves, the rest for the shortest first.

        Equal shares would let long prompts hold up each other, and all end together, late.
        """
        slots = self._prefilling()
        if not slots:
            return []
        n_decoding = len(self._active()) - len(slots)
        rows = max(_LEAST_PREFILL_ROWS, _PREFILL_ROWS // n_decoding) if n_decoding else BATCH_ROWS
        first = min(_missing(slots[0]), rows // 2)
        left, parts = rows - first, []
        for slot in sorted(slots, key=_missing):
            kept = first if slot is slots[0] else 0
            share = kept + min(_missing(slot) - kept, left)
            left -= share - kept
            n_past = slot.step.n_past
            if share > 0 and slot.request is not None:
                part = Part(slot.step, token_ids=slot.request.generation.token_ids[n_past : n_past + share])
                parts.append((slot, part))
        return parts

    def _prefill_chunk(self, prompts: PromptPrefill) -> None:
        """Exact mode: one chunk of one prompt, in turn."""
        slots = self._prefilling()
        if not slots:
            return
        slot = slots[self._rounds % len(slots)]
        request = slot.request
        if request is None:
            return
        try:
            self._hand_over(prompts, slot, request)
            prompts.advance(request.generation.token_ids[:-1])
            if prompts.n_past == request.generation.n_prompt - 1:
                prompts.release(request)
                if not self._cache.restore(slot.step, prompts.save()):
                    raise NoRoomError("the KV cache has no room for this prompt: raise --ctx-size")
                self._prefilled(slot)
        except Exception as error:
            self._fail(slot, error)

    def _hand_over(self, prompts: PromptPrefill, slot: Slot, request: Request) -> None:
        """Let the prefill context hold what is prefilled of a request."""
        if prompts.holds(request):
            return
        for other in self._prefilling():
            if other.request is not None and prompts.holds(other.request):
                other.request.partial, other.request.n_partial = prompts.save(), prompts.n_past
        trunk, n = request.partial, request.n_partial
        request.partial, request.n_partial = None, 0
        if trunk is None and slot.step.n_past:
            trunk, n = slot.step.save(), slot.step.n_past
        prompts.load(request, trunk, n)

    def _prefilled(self, slot: Slot) -> None:
        """Start decoding once the cache holds the prompt but for its last token."""
        if slot.request is None:
            return
        generation = slot.request.generation
        n_past = slot.step.n_past
        slot.token_ids = generation.token_ids[:n_past]
        if n_past == generation.n_prompt - 1:
            slot.begin(generation, self._share(len(self._active())))

    # -- decoding --------------------------------------------------------------------------------------------------

    def _share(self, n: int) -> int:
        """Rows of a tree when ``n`` sessions share a pass."""
        return max(1, (MAX_EXACT_ROWS if self._exact else MAX_BLOCK) // n)

    def _spare(self) -> int:
        """Cells that are left when every decoding session has its re-fed tokens and its root."""
        decoding = [slot for slot in self._slots if slot.decoding]
        used = sum(slot.n_cells for slot in self._slots)
        return self._cache.n_cells - used - sum(len(slot.step.refeed) + 1 for slot in decoding)

    def _make_room(self) -> None:
        """See to it that every decoding session has cells for its root, and drafts where only idle trunks hinder."""
        wanted = sum(slot.most_rows for slot in self._slots if slot.decoding)
        idle = [slot for slot in self._slots if slot.request is None and slot.step.n_past]
        for slot in sorted(idle, key=lambda slot: slot.last_used):
            if self._spare() >= wanted:
                break
            self._forget(slot)
        while self._spare() < 0 and self._give_up_youngest():
            pass

    def _draft_trees(self) -> list[tuple[Slot, Part]]:
        slots = [slot for slot in self._active() if slot.decoding]
        spare = max(0, self._spare())
        parts: list[tuple[Slot, Part]] = []
        plain = rest = sum(1 + len(slot.step.refeed) for slot in slots)  # rows of the pass when nobody drafts
        rows = 0
        for slot in slots:
            if slot.request is None:
                continue
            generation, refeed = slot.request.generation, len(slot.step.refeed)
            rest -= 1 + refeed
            most = max(1, min(self._share(len(slots)) - (refeed if self._exact else 0), 1 + spare // len(slots)))
            try:
                if slot.needs_draft:
                    others = rows + refeed + rest
                    generation.draft(self._budget(slot, generation.left, most, others, (len(slots), plain)))
                    slot.needs_draft = False
                if generation.tree.n_rows > most:
                    generation.plain()
            except Exception as error:
                self._fail(slot, error)
                continue
            parts.append((slot, Part(slot.step, generation.tree)))
            rows += parts[-1][1].rows
        return parts

    def _budget(self, slot: Slot, left: int, most: int, others: int, plain: tuple[int, int]) -> Budget:
        """What a session's tree may use when ``left`` tokens are wanted, beside ``others`` rows of the same pass.

        Args:
            plain: tokens and rows of the pass when nobody drafts: its speed is a price that drafts must reach. What was
                observed so far may be of fewer sessions, whose time was worth less.
        """
        planner, width = slot.planner, self._cache.width
        if planner is None:
            return Budget(most, left - 1, width)
        n_past = slot.step.n_past
        tokens, rows = plain
        cost = planner.cost(min(most, slot.most_rows) + others, n_past, shared=tokens > 1)[others:]
        price = max(planner.price(n_past), tokens / planner.curve.ms(rows, n_past))
        if tokens > 1:
            price *= self._ledger.factor
        return Budget(most, left - 1, width, cost, price)

    def _pack(self, trees: list[tuple[Slot, Part]], prompts: list[tuple[Slot, Part]]) -> list[list[tuple[Slot, Part]]]:
        """Passes of at most 63 rows in exact mode, else one pass. What may drop most cells comes last."""
        trees.sort(key=lambda pair: pair[1].rows)
        most = MAX_EXACT_ROWS if self._exact else BATCH_ROWS
        passes: list[list[tuple[Slot, Part]]] = []
        rows = most
        for pair in (*prompts, *trees):
            if rows + pair[1].rows > most:
                passes.append([])
                rows = 0
            passes[-1].append(pair)
            rows += pair[1].rows
        return passes

    def _pass(self, parts: Sequence[tuple[Slot, Part]]) -> None:
        context = sum(part.step.n_past for _, part in parts) // len(parts)
        rows = sum(part.rows for _, part in parts)
        if not self._cache.run([part for _, part in parts]):
            for slot, part in parts:
                if slot.request is not None:  # else it gave up its slot for one of the others
                    self._cache.run([part])
                    self._after(slot, part)
            return
        emitted = sum(self._after(slot, part) for slot, part in parts)
        planner = next((slot.planner for slot, _ in parts if slot.planner is not None), None)
        if planner is not None and emitted and all(part.tree is not None for _, part in parts):
            planner.observe(rows, context, self._cache.last_ms, emitted)
            now = time.perf_counter()  # making drafts and learning from them takes time, too
            self._ledger.observe(len(parts), rows, 1000.0 * (now - self._pass_began), emitted)
            self._pass_began = now

    def _after(self, slot: Slot, part: Part) -> int:
        """Take up a part of a pass: the tokens it emitted."""
        request = slot.request
        if request is None:
            return 0
        if isinstance(part.error, NoRoomError) and self._give_up_youngest():
            return 0  # the next round tries again
        if part.error is not None:
            self._fail(slot, part.error)
            return 0
        try:
            if part.tree is not None:
                return self._take(slot, request, part)
            self._prefilled(slot)
        except Exception as error:
            self._fail(slot, error)
        return 0

    def _take(self, slot: Slot, request: Request, part: Part) -> int:
        generation = request.generation
        if part.outputs is None:
            raise RuntimeError("a pass without outputs")
        in_prefill = generation.stats.prefill_tokens == 0
        with self._cache.settling(part):
            try:
                chunk = generation.take(part.step, part.outputs)
            finally:
                part.step.rollback()
        slot.count_time(generation.stats, self._cache.last_ms, in_prefill=in_prefill)
        slot.needs_draft = True
        with self._changed:
            self._totals["passes"] += 1
            self._totals["tokens"] += len(chunk.token_ids)
        request.ticket.push(chunk)
        if generation.ended:
            self._vacate(slot, "finished")
        return len(chunk.token_ids)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _fail_all(self, error: Exception) -> None:
        """Something broke that belongs to no request: end those that run."""
        for slot in self._active():
            try:
                self._fail(slot, error)
            except Exception:  # the context is gone
                request, slot.request = slot.request, None
                if request is not None:
                    self._end(request, "failed", error)
        if self._cache.closed:
            with self._changed:
                self._accepting, self._stopping = False, True

    def _shut_down(self) -> None:
        error = EngineClosedError("the engine was closed before this answer was complete")
        with self._changed:
            self._accepting, self._stopping = False, True
            left = list(self._queue)
            self._queue.clear()
        for slot in self._slots:
            request, slot.request = slot.request, None
            if request is not None:
                left.append(request)
        for request in left:
            cancelled = request.ticket.cancelled
            self._end(request, "cancelled" if cancelled else "failed", None if cancelled else error)
        self._cache.close()
        if self._prompts is not None:
            self._prompts.close()
        for slot in self._slots:
            slot.close()
        with self._changed:
            self._changed.notify_all()


def _missing(slot: Slot) -> int:
    """Prompt tokens that are not in the cache yet, the last one left out."""
    return slot.request.generation.n_prompt - 1 - slot.step.n_past if slot.request is not None else 0


class _Settler(Drafting):
    """Resolves draft settings; planners are shared by all slots, because a pass is."""

    def __init__(self, model: Model, planners: dict[str, Planner], progress: Callable[[int, int], None] | None) -> None:
        super().__init__(model, progress=progress)
        self._planners = planners

    def settle(self, draft: DraftConfig) -> Settings:
        """Raises ConfigError as :attr:`Session.draft` does."""
        self._configure(draft)
        return Settings(self._draft, self._planner)

    def _make_planner(self, config: DraftConfig) -> Planner:
        if config.cost not in self._planners:
            self._planners[config.cost] = super()._make_planner(config)
        return self._planners[config.cost]
