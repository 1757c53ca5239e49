"""Tries a schema out in a process of its own, where it may take too long or too much memory and be ended for it.

A schema comes from anybody, and a thread can't be stopped. What the probe has survived is compiled again in the
engine's process, in about the same short time.

The child sets its own alarm before each schema: the kernel ends it even inside the library's code, and also when
the parent is gone. It reads a line of JSON per schema and answers with one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path

from pagemill.engine.errors import (
    EngineError,
    InvalidRequest,
    SchemaInvalid,
    SchemaTooComplex,
    UnsupportedFeature,
)
from pagemill.engine.structured_output.matcher import CompiledSchema, compile_schema
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary

TIME_LIMIT_S = 5.0
"""Seconds of real time for one schema: to compile it and to follow it for a few tokens."""
MEMORY_LIMIT_MIB = 1024
"""On top of what the process has before the first schema."""
_STEPS_FOLLOWED = 16
_NICENESS = 5
_ERRORS: dict[str, type[InvalidRequest]] = {
    error.code: error for error in (SchemaInvalid, SchemaTooComplex, UnsupportedFeature)
}


class SchemaProbe:
    """The parent's side. Starts the process at the first schema, and another one after it ended. For one thread."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit_mib: int = MEMORY_LIMIT_MIB,
    ) -> None:
        self._vocabulary = vocabulary
        self._time_limit_s = time_limit_s
        self._memory_limit_mib = memory_limit_mib
        self._process: subprocess.Popen[str] | None = None

    def check(self, kind: str, text: str) -> None:
        """Raises SchemaInvalid, SchemaTooComplex or UnsupportedFeature unless the schema can be used."""
        process = self._running()
        answer = _exchange(process, json.dumps([kind, text]))
        if not answer:
            self._process = None
            _end(process)
            raise SchemaTooComplex(
                f"structured_outputs.{kind}: takes more than {self._time_limit_s:g} s or "
                f"{self._memory_limit_mib} MiB"
            )
        code, message = json.loads(answer)
        if code is not None:
            raise _ERRORS[code](message)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        root = str(Path(sys.modules["pagemill"].__path__[0]).parent)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._time_limit_s), str(self._memory_limit_mib)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the parent; the child ends when its input does
        )
        weakref.finalize(self, _end, process)
        if not _exchange(process, self._vocabulary.dump()):
            raise EngineError("the process that tries schemas out does not start")
        self._process = process
        return process


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """The child's answer to a line; empty if it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except OSError:
        return ""
    return process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not sent has nobody to read it
            pipe.close()


def main(time_limit_s: float, memory_limit_mib: int) -> None:
    """The child: the vocabulary on the first line, then a schema on each."""
    os.nice(_NICENESS)
    tokenizer = GrammarVocabulary.load(sys.stdin.readline()).build()
    _limit_memory(memory_limit_mib << 20)
    _answer(["ready"])
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        try:
            _follow(compile_schema(tokenizer, kind, text), tokenizer.vocab_size)
            verdict: list[str | None] = [None, None]
        except InvalidRequest as error:
            verdict = [error.code, str(error)]
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _answer(verdict)


def _follow(schema: CompiledSchema, vocab_size: int) -> None:
    """Write some output, any: limits that the first tokens run into are told before anything is generated."""
    grammar, draw = schema.start(), random.Random(0)
    for _ in range(_STEPS_FOLLOWED):
        mask = grammar.token_mask()
        allowed = [token for token in range(vocab_size) if mask[token >> 3] >> (token & 7) & 1]
        grammar.advance(draw.choice(allowed))
        if grammar.failure is not None:
            raise grammar.failure
        if grammar.is_complete:
            return


def _limit_memory(more_bytes: int) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():  # macOS does not keep to RLIMIT_AS anyway: there the alarm alone has to do
        return
    size = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more_bytes, resource.RLIM_INFINITY))


def _answer(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
