"""The proof of a purge: a walk through the names and contents of all keys of a queue, as a flow (see effects.py).

A key is judged by its kind. Data of another tenant's job or file may contain any word: it is only searched for removed
ids, in the positions of ids. Keys of kinds that are not listed here are searched for all words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pagemill.producer.client.effects import Flow
from pagemill.producer.client.purge.names import (
    candidate_names,
    id_of_key,
    job_of_file,
    tenant_of_key,
    tenant_of_lane,
)
from pagemill.producer.client.purge.report import Leftover
from pagemill.producer.wire.calls import purge
from pagemill.producer.wire.calls.purge import Content, Key

MAX_LEFTOVERS = 1000
"""Maximum number of reported leftovers; the search then ends."""
_SHORTEST_WORD = 8
"""Shorter ids, chosen by callers, are only searched for in positions of ids: `1` may be any number."""

# Kinds by the type of their members; those of a hash include their values.
_IDS = frozenset({
    "leases", "delayed", "retrying", "deadlines", "dead", "outbox", "awaited", "settling", "suspects",
    "children", "followers", "bjobs", "bfeed", "backed", "bexpiry", "stored", "wait", "fileuses", "ableases",
    "abatches", "chats", "files", "hooks", "sampled", "canary"
})  # fmt: skip
_FIELDS = frozenset({"files", "fileuses", "hooks", "overtaken", "started", "weights", "quotas", "abopen"})
"""Hashes whose fields are searched, but not their values."""
_LANES = frozenset({"lanes", "overtaken", "started"})
_TENANTS = frozenset({"turns", "weights", "quotas", "parked", "abopen"})
# Named by models and workers, which may have the same name as a tenant.
_FLEET = frozenset({
    "bell", "serves", "served", "kept", "needs", "worker", "workers", "puller", "commands", "asked", "answers",
    "jobs_page", "alive", "spells", "counts", "synced", "meta", "batch", "rollouts", "rollout", "ran"
})  # fmt: skip

Search = Literal["ids", "lanes", "tenants", "ids in text", "all"]


class Proof:
    """Finds references to a tenant, or to one of the removed ids."""

    def __init__(self, queue: str, tenant: str, ids: set[str], kept: frozenset[str]) -> None:
        """`kept`: kinds of keys that are not removed, and are skipped."""
        self.leftovers: list[Leftover] = []
        self._queue = queue
        self._tenant = tenant
        self._ids = ids
        self._long_ids = {name for name in ids if len(name) >= _SHORTEST_WORD and not name.isdigit()}
        self._kept = kept
        self._others_files: set[str] = set()
        self._chunks: list[Key] = []

    @property
    def is_full(self) -> bool:
        return len(self.leftovers) >= MAX_LEFTOVERS

    def judge(self, key: Key) -> Flow[None]:
        """Check one key."""
        if key.kind in self._kept:
            return
        if (found := self._in_name(key)) is not None:
            self.leftovers.append(Leftover(key.name, "name", found))
        elif key.kind == "file":
            self._chunks.append(key)  # its owner is in a list that may follow later
        elif key.values:
            yield from self._note(key, self._in_values(key))
        else:
            yield from self._search(key, _search_of(key))

    def judge_files(self) -> Flow[None]:
        """Check the chunks of files, after all lists of files."""
        for key in self._chunks:
            if id_of_key(key.kind, key.rest) not in self._others_files and not self.is_full:
                yield from self._search(key, "all")

    def _in_name(self, key: Key) -> str | None:
        if key.owner == "ours" or tenant_of_key(key.kind, key.rest) == self._tenant:
            return self._tenant
        if key.kind in _FLEET and key.kind != "batch":
            return None
        about = id_of_key(key.kind, key.rest)
        if about is not None:
            return about if about in self._ids else None
        is_known = key.kind in _IDS | _LANES | _TENANTS or tenant_of_key(key.kind, key.rest) is not None
        return None if is_known else self._word_in(key.name.encode(), self._names)

    @property
    def _names(self) -> set[str]:
        return self._long_ids | {self._tenant}

    def _in_values(self, key: Key) -> Iterator[str]:
        for value in key.values:
            if key.kind == "bowner" and value == self._tenant:
                yield value
            yield from self._ids_in(value)

    def _ids_in(self, text: str) -> Iterator[str]:
        """Yield the ids in a value that contains some separated by spaces, the name of an end, or of a file."""
        for part in text.split():
            for name in (part, id_of_key("end", part), job_of_file(part)):
                if name in self._ids:
                    yield name

    def _search(self, key: Key, search: Search) -> Flow[None]:
        place = ""
        while not self.is_full:
            content: Content = yield purge.read(self._queue, key.name, place)
            items = content.items
            if key.kind in _FIELDS:
                items = items[::2]
            elif key.kind == "suspects":
                items = items[1::2]
            if key.kind == "files":
                self._others_files.update(item.decode(errors="replace") for item in items)
            found = (name for item in items for name in self._in_item(item, search))
            if (yield from self._note(key, found)) or not content.place:
                return
            place = content.place

    def _note(self, key: Key, found: Iterable[str]) -> Flow[bool]:
        yield from ()
        name = next(iter(found), None)
        if name is not None:
            self.leftovers.append(Leftover(key.name, "content", name))
        return name is not None

    def _in_item(self, item: bytes, search: Search) -> Iterator[str]:
        text = item.decode(errors="replace")
        match search:
            case "ids":
                yield from self._ids_in(text)
            case "lanes" if tenant_of_lane(text) == self._tenant:
                yield self._tenant
            case "tenants" if text == self._tenant:
                yield self._tenant
            case "ids in text":
                yield from filter(None, [self._word_in(item, self._long_ids)])
            case "all":
                yield from filter(None, [self._word_in(item, self._names)])

    def _word_in(self, text: bytes, names: set[str]) -> str | None:
        return next((word for word in candidate_names(text) if word in names), None)


def _search_of(key: Key) -> Search:
    if key.kind in _IDS:
        return "ids"
    if key.kind in _LANES:
        return "lanes"
    if key.kind in _TENANTS:
        return "tenants"
    if key.kind in _FLEET or key.owner == "theirs":
        return "ids in text"
    return "all"
