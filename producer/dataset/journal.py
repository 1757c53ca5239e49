"""The state of a run, next to its output: one SQLite file that survives SIGKILL at any point.

Outputs are stored together with the position read in the batch, in one synchronous transaction; only then is the server
asked to free them. SQLite's exclusive lock prevents a second run.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagemill.producer.dataset.errors import DatasetError, DiskError
from pagemill.producer.dataset.tables.rows import Row, RowError

VERSION = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outputs (key TEXT PRIMARY KEY, result TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures (
    key TEXT PRIMARY KEY, code TEXT NOT NULL, message TEXT NOT NULL, retryable INTEGER NOT NULL,
    tries INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spool (number INTEGER PRIMARY KEY, fields TEXT, error TEXT);
CREATE TEMP TABLE pending (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TEMP TABLE occurrences (digest TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason that a row's job ended without a result."""

    code: str
    message: str
    retryable: bool = False


class Journal:
    """One run's state. Not thread-safe. Raises DatasetError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_new = not path.exists()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0.0)
        except sqlite3.OperationalError as error:
            raise _explained(error, path) from error
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        path = self.path
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA temp_store = FILE")
            self._db.execute("BEGIN EXCLUSIVE")
            self._db.execute("COMMIT")
            self._db.executescript(_TABLES)
        except sqlite3.OperationalError as error:
            raise _explained(error, path) from error
        except sqlite3.DatabaseError as error:
            raise DatasetError(
                f"{path} is not the journal of a run ({error}); move it away to start over"
            ) from error
        if int(self.fact("version") or VERSION) != VERSION:
            raise DatasetError(f"{path} was written by another version; finish it there, or move it away")
        self.set_facts(version=str(VERSION), run_id=self.fact("run_id") or secrets.token_hex(8))

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all changes of the block to disk, or none."""
        try:
            self._db.execute("BEGIN")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:  # SQLite itself has rolled back if the disk is full
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise _explained(error, self.path) from error

    def _execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise _explained(error, self.path) from error

    def fact(self, name: str) -> str | None:
        found = self._execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def set_facts(self, **facts: str) -> None:
        for fact in facts.items():
            self._execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", fact)

    def occurrence(self, digest: str) -> int:
        """Count and return the occurrences of this content in the current reading of the rows."""
        found = self._execute(
            "INSERT INTO occurrences VALUES (?, 1) "
            "ON CONFLICT (digest) DO UPDATE SET count = count + 1 RETURNING count",
            (digest,),
        ).fetchone()
        return int(found[0])

    def start_over(self) -> None:
        """Delete everything except the run's name."""
        with self.transaction():
            for table in ("outputs", "failures", "pending"):
                self._execute(f"DELETE FROM {table}")
            self._execute("DELETE FROM facts WHERE name NOT IN ('version', 'run_id')")

    def start_reading(self) -> None:
        """Reset the counts of occurrences, before the rows are read from the start."""
        self._execute("DELETE FROM occurrences")

    def forget_pending(self) -> None:
        """Delete all work in progress."""
        self._execute("DELETE FROM pending")

    def forget_retryable(self) -> int:
        """Mark retryable failures for another attempt. Returns their number."""
        self._execute("UPDATE failures SET retryable = 2 WHERE retryable = 1")
        found = self._execute("SELECT count(*) FROM failures WHERE retryable = 2").fetchone()
        return int(found[0])

    def needs(self, key: str) -> str | None:
        """Return the name to submit this work under; None if it is done, in progress, or has failed permanently.

        Work that is retried gets a new name, since the batch remembers the old one.
        """
        if self._execute("SELECT 1 FROM outputs WHERE key = ?", (key,)).fetchone():
            return None
        failed = self._execute("SELECT retryable FROM failures WHERE key = ?", (key,)).fetchone()
        if failed is not None and failed[0] != 2:
            return None
        if not self._execute("INSERT OR IGNORE INTO pending VALUES (?)", (key,)).rowcount:
            return None
        return self.name(key)

    def name(self, key: str) -> str:
        """Return the name under which work that has not ended was, or will be, submitted."""
        failed = self._execute("SELECT tries FROM failures WHERE key = ?", (key,)).fetchone()
        return key if failed is None else f"{key}~{failed[0]}"

    def record(self, name: str, result: dict[str, Any] | None, failure: Failure | None) -> bool:
        """Store the end of a job; returns whether it was pending."""
        key = name.partition("~")[0]
        if result is not None:
            text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
            self._execute("INSERT OR REPLACE INTO outputs VALUES (?, ?)", (key, text))
            self._execute("DELETE FROM failures WHERE key = ?", (key,))
        elif failure is not None:
            self._execute(
                "INSERT INTO failures VALUES (?, ?, ?, ?, 1) ON CONFLICT (key) DO UPDATE SET code = excluded.code, "
                "message = excluded.message, retryable = excluded.retryable, tries = tries + 1",
                (key, failure.code, failure.message, int(failure.retryable)),
            )
        return bool(self._execute("DELETE FROM pending WHERE key = ?", (key,)).rowcount)

    def output(self, key: str) -> dict[str, Any] | None:
        found = self._execute("SELECT result FROM outputs WHERE key = ?", (key,)).fetchone()
        return None if found is None else json.loads(found[0])

    def failure(self, key: str) -> Failure | None:
        found = self._execute(
            "SELECT code, message, retryable FROM failures WHERE key = ?", (key,)
        ).fetchone()
        return None if found is None else Failure(found[0], found[1], bool(found[2]))

    def end(self, key: str) -> dict[str, Any] | Failure | None:
        """Return the output or the failure of this work; None if it has not ended, or will be retried."""
        if (kept := self.output(key)) is not None:
            return kept
        found = self._execute(
            "SELECT code, message FROM failures WHERE key = ? AND retryable != 2", (key,)
        ).fetchone()
        return None if found is None else Failure(*found)

    def tokens_of(self, stage: str) -> int:
        """Return the tokens of all outputs of a cascade's later stage."""
        query = "SELECT result FROM outputs WHERE substr(key, ?) = ?"
        found = self._execute(query, (-len(stage) - 1, f"@{stage}"))
        usages = (json.loads(text).get("usage") or {} for (text,) in found)
        return sum(
            (usage.get("prompt_tokens") or 0) + (usage.get("completion_tokens") or 0) for usage in usages
        )

    def count(self) -> int:
        """Return the number of outputs."""
        return int(self._execute("SELECT count(*) FROM outputs").fetchone()[0])

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield every output, in arbitrary order."""
        for (text,) in self._db.execute("SELECT result FROM outputs"):
            yield json.loads(text)

    def spool(self, rows: Iterable[Row]) -> None:
        """Store rows that cannot be read a second time, in one transaction."""
        with self.transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO spool VALUES (?, ?, ?)",
                (
                    (
                        row.number,
                        None if row.fields is None else json.dumps(row.fields, ensure_ascii=False),
                        None if row.error is None else json.dumps(astuple(row.error)),
                    )
                    for row in rows
                ),
            )

    def clear_spool(self) -> None:
        self._execute("DELETE FROM spool")

    def spool_size(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM spool").fetchone()[0])

    def spooled(self) -> Iterator[Row]:
        for number, fields, error in self._db.execute("SELECT * FROM spool ORDER BY number"):
            if error is not None:
                yield Row(number, error=RowError(*json.loads(error)))
            else:
                yield Row(number, json.loads(fields))

    def remove(self) -> None:
        """Close and delete the journal, once the output is complete."""
        self.close()
        self.path.unlink(missing_ok=True)


def _explained(error: sqlite3.OperationalError, path: Path) -> DatasetError:
    text = str(error)
    if "locked" in text:
        return DatasetError(f"another run is writing {path}; wait for it, or choose another --out")
    if "full" in text:
        return DiskError(
            f"the disk is full: {path} could not grow, or a temporary file. "
            "Free some space and run the same command again; nothing that was done is lost"
        )
    if "unable to open" in text:
        return DatasetError(f"{path} cannot be created: is the directory there, and writable?")
    return DiskError(
        f"{path} could not be written ({text}). Fix that and run the same command again; "
        "nothing that was done is lost"
    )
