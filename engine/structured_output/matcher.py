"""`regex`, `json` and `grammar`: a matcher of llguidance as a `Grammar`.

llguidance runs a lexer and an Earley parser along the output and computes, on request, which tokens keep it
matching. No automaton is built ahead of time, so most schemas take milliseconds to start. The limits below
bound most of a token's cost, but not all: one row of the parser can take minutes of native code that
holds the GIL. So all of this runs in the schema's process (`server.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import llguidance
from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark

from pagemill.common.schema_numbers import InexactInteger
from pagemill.common.schema_preparation import prepared_text
from pagemill.common.schema_rewriting import TooLarge, rewritten
from pagemill.engine.errors import InvalidRequest, SchemaInvalid, SchemaTooComplex, UnsupportedFeature
from pagemill.engine.structured_output.gbnf import is_gbnf, prepared

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from pagemill.engine.structured_output.verifier import Verifier

# One way to write each value, that of json.dumps. With free whitespace a small model may write only whitespace
# forever, and nothing between two values could be forced.
_JSON_FORMAT: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=200_000,
    step_max_items=20_000,  # a union of 300 objects takes 3,000
    verbose_errors=False,
)
_MAX_MESSAGE = 400
_LARK_START = re.compile(r"(?m)^([ \t]*)[?!]{1,2}start(?:\.-?[0-9]+)?[ \t]*:")
# llguidance distinguishes its errors only by their text.
_UNSUPPORTED = (
    "Unimplemented",
    "not supported",
    "Unknown format",
    "only supported when",
    "not disjoint",
    "stack level",
    "Failed to generate regex",
)
_TOO_COMPLEX = ("too large", "too many", "too complex", "items; max is", "limit", "Unable to determine")


@dataclass(frozen=True, slots=True)
class CompiledSchema:
    """A compiled schema, from which any number of outputs can start."""

    kind: str
    matcher: llguidance.LLMatcher
    mask: bytes
    forces_tokens: bool
    verifier: Verifier | None = None
    """Checks complete outputs."""
    warnings: tuple[str, ...] = ()
    """Warnings about an output for users."""

    def start(self) -> MatcherGrammar:
        return MatcherGrammar(self)


def compile_schema(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> CompiledSchema:
    """Compile a schema, up to the mask of the first token.

    A JSON schema with unsupported keywords is rewritten, and outputs are verified.

    Args:
        kind: regex, json (a schema) or grammar (Lark, or GBNF as llama.cpp writes it).

    Raises:
        SchemaInvalid, SchemaTooComplex, UnsupportedFeature.
    """
    try:
        exact = prepared_text(text) if kind == "json" else text
    except InexactInteger as error:
        raise UnsupportedFeature(_message(kind, str(error))) from None
    try:
        return _compile(tokenizer, kind, exact)
    except UnsupportedFeature as error:
        if kind != "json":
            raise
        reason: InvalidRequest = error
    # Imported late: most schemas do not need a verifier.
    from pagemill.engine.structured_output.verifier import Verifier

    for is_loose in (False, True):
        try:
            schema = rewritten(exact, is_loose=is_loose)
            compiled = _compile(tokenizer, kind, schema.text)
            # The grammar enforces an equivalent schema, and Python would read some patterns differently.
            verifier = Verifier(exact) if schema.wider else None
        except TooLarge:
            continue
        except InvalidRequest as error:
            reason = error
        else:
            return replace(compiled, verifier=verifier, warnings=schema.warnings)
    raise reason


def _compile(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> CompiledSchema:
    matcher = llguidance.LLMatcher(tokenizer, _grammar(kind, text), log_level=0, limits=_LIMITS)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise _compile_error(kind, matcher.get_error())
    # A tokenizer with several equally valid ways to write a text does not have forced tokens.
    return CompiledSchema(kind, matcher, mask, tokenizer.is_canonical)


def _grammar(kind: str, text: str) -> str:
    try:
        if kind == "regex":
            # \d is 0 to 9, as in JSON Schema: most readers can't use a number in other digits.
            regex = llguidance.regex_to_lark(text, use_ascii="d")
            return llguidance.LLMatcher.grammar_from_lark(f"start: /{regex}/")
        if kind == "json":
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=_JSON_FORMAT)
        if is_gbnf(text):
            return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(prepared(text)))
        # Lark's modifiers of the first rule shape its tree, which is not read.
        return llguidance.LLMatcher.grammar_from_lark(any_to_lark(_LARK_START.sub(r"\1start:", text)))
    except Exception as error:  # the GBNF converter raises Exception itself
        raise SchemaInvalid(_message(kind, str(error))) from None


def _compile_error(kind: str, reason: str) -> InvalidRequest:
    if "NoExtension" in reason:
        return SchemaInvalid(_message(kind, "no text matches it"))
    if any(word in reason for word in _TOO_COMPLEX):
        return SchemaTooComplex(_message(kind, reason))
    if any(word in reason for word in _UNSUPPORTED):
        return UnsupportedFeature(_message(kind, reason))
    return SchemaInvalid(_message(kind, reason))


def _message(kind: str, reason: str) -> str:
    one_line = " ".join(reason.removesuffix("<non-verbose/>").split())
    return f"structured_outputs.{kind}: {one_line[:_MAX_MESSAGE]}"


class MatcherGrammar:
    """One sequence's position in a schema, in the schema's process."""

    def __init__(self, schema: CompiledSchema) -> None:
        self._kind = schema.kind
        self._matcher = schema.matcher.deep_copy()
        self._mask = schema.mask
        self._forces_tokens = schema.forces_tokens
        self._failure: SchemaTooComplex | None = None

    def token_mask(self) -> bytes:
        return self._mask

    def advance(self, token_id: int) -> list[int]:
        forced: list[int] = []
        self._matcher.consume_token(token_id)
        while self._forces_tokens and not self._matcher.is_stopped():
            more = self._matcher.compute_ff_tokens()
            if not more or not self._matcher.consume_tokens(more):
                break
            forced += more
        self._update()
        return forced

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance along an earlier run's tokens. Raises `InvalidRequest` if they do not match."""
        if not token_ids:
            return
        if not self._matcher.consume_tokens(list(token_ids)):
            raise InvalidRequest("the checkpoint's tokens are not what structured_outputs allows")
        self._update()

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and self._failure is None

    @property
    def failure(self) -> SchemaTooComplex | None:
        return self._failure

    def _update(self) -> None:
        if not self._matcher.is_stopped():
            self._mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            # Only allowed tokens reach this line, so the failure is a limit of the library.
            self._failure = SchemaTooComplex(_message(self._kind, self._matcher.get_error()))
