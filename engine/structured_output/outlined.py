"""A grammar for the part of an output after the reasoning, or after each trigger. The rest is free text.

A tag may end within a token, so tokens that would extend past it are forbidden: the structure then receives all of
its characters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property

from pagemill.common.chat.markers import held_back
from pagemill.engine.errors import EngineError, InvalidRequest
from pagemill.engine.structured_output.replayed import ReplayedGrammar
from pagemill.engine.tasks import Outline, Thinking

_TAIL = 256
"""Number of stored characters of free text; longer than any tag."""


class TagVocabulary:
    """A vocabulary's tokens by text, to find those that would extend past the end of a tag."""

    def __init__(
        self, token_text: Callable[[int], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.token_text = token_text
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._masks: dict[tuple[str, bool], bytes] = {}

    def free_mask(self, unwritten: str, *, may_end: bool) -> bytes:
        """Return a mask of all tokens except those that start with `unwritten`, a tag's rest, and extend past it.

        Args:
            unwritten: empty if no tag has started.
            may_end: allow EOS.
        """
        mask = self._masks.get((unwritten, may_end))
        if mask is None:
            bits = bytearray(b"\xff" * -(-self._vocab_size // 8))
            barred = [] if may_end else list(self._eos_token_ids)
            for token_id in [*barred, *(self._longer_than(unwritten) if unwritten else ())]:
                bits[token_id >> 3] &= ~(1 << (token_id & 7))
            mask = self._masks[unwritten, may_end] = bytes(bits)
        return mask

    def _longer_than(self, text: str) -> list[int]:
        start = bisect_left(self._sorted, (text, self._vocab_size))
        found = []
        for token_text, token_id in self._sorted[start:]:
            if not token_text.startswith(text):
                break
            if len(token_text) > len(text):
                found.append(token_id)
        return found

    @cached_property
    def _sorted(self) -> list[tuple[str, int]]:
        # Takes a few tenths of a second, once, with a large vocabulary.
        return sorted((self.token_text(token_id), token_id) for token_id in range(self._vocab_size))


class OutlinedGrammar:
    """One sequence's position in an outline (a `Grammar`)."""

    def __init__(
        self, outline: Outline, vocabulary: TagVocabulary, start: Callable[[], ReplayedGrammar] | None
    ) -> None:
        """`start` creates the grammar of the structured part; None: there is none."""
        self._outline = outline
        self._vocabulary = vocabulary
        self._start = start
        self._inner = None if start is None else start()
        self._num_thoughts = 0
        self._tail = ""
        self._is_prepared = False
        """True if the structured part has received an undecided output's token."""
        self._num_opening = 0
        """Tokens of the opening tag in an undecided output."""
        self._pending: list[int] = []
        """Tokens that must follow them if they belong to the structure."""
        thinking = outline.thinking
        if thinking is None:
            self._state = self._after_thinking
        else:
            self._state = "thinking" if thinking.is_open else "start"

    @property
    def _after_thinking(self) -> str:
        return "structure" if self._inner is not None and not self._outline.trigger else "free"

    @property
    def _is_bounded(self) -> bool:
        """True if a structure starts directly after the reasoning."""
        return self._inner is not None and not self._outline.trigger

    def allowed_token_ids(self) -> list[int] | None:
        thinking, inner = self._outline.thinking, self._inner
        if self._state == "structure" and inner is not None:
            return inner.allowed_token_ids()
        if self._is_undecided and thinking is not None and inner is not None:
            allowed = self._pending[:1] or inner.allowed_token_ids()
            return None if allowed is None else [*allowed, thinking.opening_ids[self._num_opening]]
        if self._state == "thinking" and thinking is not None and (rest := self._decided(thinking)):
            return rest[:1]
        if self._state == "thinking" and thinking is not None and thinking.budget == 0:
            return [thinking.closing_ids[0]]
        return None

    def token_mask(self) -> bytes | None:
        thinking, inner = self._outline.thinking, self._inner
        if inner is None:
            return None
        if self._state == "structure":
            return inner.token_mask()
        if self._is_undecided and thinking is not None:
            mask = None if self._pending else inner.token_mask()
            return None if mask is None else _with_token(mask, thinking.opening_ids[self._num_opening])
        if self._state == "thinking" and thinking is not None and self._is_bounded:
            return self._vocabulary.free_mask(self._unwritten(thinking.closing), may_end=False)
        unwritten = self._unwritten(self._outline.trigger) if self._state == "free" else ""
        return self._vocabulary.free_mask(unwritten, may_end=True) if unwritten else None

    def prepare(self, token_id: int) -> None:
        inner = self._inner
        if inner is None:
            return
        if self._is_undecided:
            self._is_prepared = not self._pending and _allows(inner, token_id)
        if self._state == "structure" or self._is_prepared:
            inner.prepare(token_id)

    @property
    def is_ready(self) -> bool:
        is_asked = self._state == "structure" or self._is_prepared
        return not is_asked or self._inner is None or self._inner.is_ready

    def advance(self, token_id: int) -> list[int]:
        """Accept the prepared token; return the tokens that must follow it."""
        if self._is_undecided:
            return self._decide(token_id)
        if self._state == "structure" and self._inner is not None:
            forced = self._inner.advance(token_id)
            self._end_structure()
            return forced
        self._read(token_id)
        return self._spent_budget(token_id)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by an earlier run's tokens. Raises `InvalidRequest` if that is not possible."""
        if token_ids and self._outline.trigger:
            raise InvalidRequest("a request with strict tools starts from the prompt and cannot resume")
        thinking = self._outline.thinking
        if token_ids and self._is_undecided and thinking is not None:
            opening = list(thinking.opening_ids)
            if list(token_ids[: len(opening)]) == opening:
                self._state, token_ids = "thinking", token_ids[len(opening) :]
            else:
                self._state = "structure"
        for number, token_id in enumerate(token_ids):
            if self._state == "structure" and self._inner is not None:
                self._inner.replay(token_ids[number:])
                return
            self._read(token_id)

    @property
    def may_sample_again(self) -> bool:
        return self._state != "structure" or self._inner is None or self._inner.may_sample_again

    @property
    def is_complete(self) -> bool:
        return self._state == "structure" and self._inner is not None and self._inner.is_complete

    @property
    def failure(self) -> EngineError | None:
        return None if self._inner is None else self._inner.failure

    @property
    def _is_undecided(self) -> bool:
        """True while the output may be the start of the opening tag, of the structure, or of both."""
        return self._state == "start" and self._is_bounded

    def _decide(self, token_id: int) -> list[int]:
        """Accept a token of an output that may start with reasoning or with the structure."""
        thinking, inner = self._outline.thinking, self._inner
        assert thinking is not None
        assert inner is not None
        assert self._start is not None
        rest = list(thinking.opening_ids[self._num_opening + 1 :])
        is_opening = token_id == thinking.opening_ids[self._num_opening]
        if self._is_prepared or self._pending[:1] == [token_id]:
            forced = self._pending[1:] if self._pending else inner.advance(token_id)
            self._is_prepared = False
            if is_opening and rest and not (inner.is_complete and not forced):
                self._num_opening, self._pending = self._num_opening + 1, forced
                return []
            self._state, self._pending = "structure", []
            return forced
        self._state, self._pending, self._inner = "thinking", [], self._start()
        return rest + self._spent_budget(token_id)

    def _spent_budget(self, token_id: int) -> list[int]:
        """Return the closing tag if the reasoning must not continue."""
        thinking = self._outline.thinking
        if self._state != "thinking" or thinking is None or thinking.budget is None:
            return []
        if self._num_thoughts < thinking.budget:
            return []
        has_begun = thinking.budget == 0 and thinking.is_open and token_id == thinking.closing_ids[0]
        closing = list(thinking.closing_ids[1:] if has_begun else thinking.closing_ids)
        for token in closing:
            self._read(token)
        return closing

    def _read(self, token_id: int) -> None:
        """Follow the free text up to the next tag."""
        thinking = self._outline.thinking
        self._tail = (self._tail + self._vocabulary.token_text(token_id))[-_TAIL:]
        if self._state == "start" and thinking is not None:
            begun = self._tail.lstrip()
            if begun.startswith(thinking.opening):
                self._state, self._tail = "thinking", begun[len(thinking.opening) :]
                return
            if thinking.opening.startswith(begun):
                return
            self._state = "free"
        if self._state == "thinking" and thinking is not None:
            self._num_thoughts += 1
            _, closing, after = self._tail.partition(thinking.closing)
            if not closing:
                return
            self._state, self._tail = self._after_thinking, after
        trigger = self._outline.trigger
        if self._state == "free" and self._inner is not None and trigger in self._tail:
            self._state, self._tail = "structure", ""

    def _decided(self, thinking: Thinking) -> list[int]:
        """Return the remaining tokens of the closing tag after its start has ended the reasoning."""
        written = held_back(self._tail, thinking.closing) if thinking.decided_by else 0
        if not written or written < len(thinking.decided_by):
            return []
        for number, token_id in enumerate(thinking.closing_ids):
            written -= len(self._vocabulary.token_text(token_id))
            if written <= 0:
                return list(thinking.closing_ids[number + (written == 0) :])
        return []

    def _end_structure(self) -> None:
        is_over = self._inner is not None and self._inner.is_complete
        if is_over and self._outline.is_repeated and self._outline.trigger and self._start is not None:
            self._state, self._inner = "free", self._start()

    def _unwritten(self, tag: str) -> str:
        written = held_back(self._tail, tag)
        return tag[written:] if written else ""


def _allows(grammar: ReplayedGrammar, token_id: int) -> bool:
    allowed = grammar.allowed_token_ids()
    if allowed is not None:
        return token_id in allowed
    mask = grammar.token_mask()
    return mask is None or bool(mask[token_id >> 3] >> (token_id & 7) & 1)


def _with_token(mask: bytes, token_id: int) -> bytes:
    bits = bytearray(mask)
    bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)
