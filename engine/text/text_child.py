"""The process in which a model's chat template is rendered and an unusual tokenizer encodes: see `text_process.py`.

Both run code or patterns of the model's publisher.
"""

from __future__ import annotations

import json
import marshal
import os
import socket
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

from pagemill.engine.child_process import limit_memory
from pagemill.engine.limited_server import LimitedServer

LOAD_S = 30.0
"""Seconds of CPU time to load a tokenizer."""
CALL_S = 2.0
"""Seconds of CPU time for one call."""
CHARACTERS_PER_S = 50_000
"""Additional CPU time for the texts of a call."""
MEMORY_MIB = 1024
"""Memory in addition to that of the started process."""
_SPARE_CHARACTERS = 1 << 20
_GROWTH = 4
"""Maximum number of rendered characters per character of input."""
_NICENESS = 5
_SAMPLE = "Hello, wörld! 123  \n\n" + "a" * 40 + " " * 40 + "!" * 40


class TextServer(LimitedServer):
    """Renders templates, and encodes texts with one tokenizer."""

    def __init__(self, connection: socket.socket, call_s: float) -> None:
        super().__init__(connection)
        self._call_s = call_s
        self._tokenizer: Any = None

    def _load(self, tokenizer: str, is_trial: bool) -> None:
        self._arm(LOAD_S)
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if is_trial:
            for text in (_SAMPLE, *_SAMPLE.split()):
                self._tokenizer.encode(text)

    def _encode(
        self, texts: list[Any], add_special_tokens: bool, shorten_to: int | None
    ) -> list[tuple[list[int], list[int], list[int]]]:
        self._arm_for(
            sum(len(part) for text in texts for part in ([text] if isinstance(text, str) else text))
        )
        if shorten_to is None:
            self._tokenizer.no_truncation()
        else:
            self._tokenizer.enable_truncation(shorten_to)
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [(one.ids, one.type_ids, one.special_tokens_mask) for one in encodings]

    def _render(self, template: str, packed: bytes) -> str:
        self._arm_for(len(packed))
        most = _SPARE_CHARACTERS + _GROWTH * len(packed)
        pieces, length = [], 0
        for piece in compiled(template).generate(marshal.loads(packed)):
            length += len(piece)
            if length > most:
                raise ValueError(f"the template renders more than {most:,} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _arm_for(self, num_characters: int) -> None:
        """Stop the process after this call's CPU time."""
        self._arm(self._call_s + num_characters / CHARACTERS_PER_S)


@lru_cache(maxsize=4)
def compiled(template: str) -> Any:
    """Return a template that can be rendered. Compilation may compute its constants."""
    return environment().from_string(template)


@lru_cache(maxsize=1)
def environment() -> Any:
    """Return Jinja's sandbox with the names that models' templates use."""
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """Reads `{% generation %}`, which marks a part for training, as its content."""

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    Generation.tags = {"generation"}

    class PublicNamespace(Namespace):
        """A namespace without names that start with an underscore."""

        def __init__(*args: Any, **names: Any) -> None:
            given = dict(*args[1:], **names)
            Namespace.__init__(args[0])
            for name, value in given.items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace must not have the name {name!r}")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda text: datetime.now().strftime(text),
        "dict": lambda *pairs, **names: dict(*pairs, **names),
        "namespace": PublicNamespace,
    }
    return sandbox


def main(connection: socket.socket, call_s: float, memory_mib: int) -> None:
    """Serve one connection."""
    os.nice(_NICENESS)
    environment()
    limit_memory(memory_mib << 20)
    TextServer(connection, call_s).run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
