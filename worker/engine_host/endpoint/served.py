"""The model and the abilities of an endpoint, determined by a few short requests at startup."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.engine.adapters.pool import NoAdapters
from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.parts import Tier
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.input_processor import InputLimits
from pagemill.engine.text.token_texts import TokenTexts
from pagemill.engine.text.tokenizer import Tokenizer, load_tokenizer
from pagemill.worker.endpoint_settings import NO_TOKENIZER
from pagemill.worker.engine_host.endpoint.connection import (
    ANSWER_S,
    BadAnswer,
    Connection,
    Interrupted,
    Refused,
    Unavailable,
)
from pagemill.worker.engine_host.endpoint.dialect import (
    DIALECTS,
    Dialect,
    Query,
    accepts_all,
    body,
    pieces,
)
from pagemill.worker.engine_host.endpoint.inputs import NEVER, EndpointInputs

logger = logging.getLogger(__name__)

DEFAULT_ROWS = 64
DEFAULT_CONTEXT = 131_072
"""The context length if neither the endpoint nor the operator sets one."""
_VERSION_PATHS = ("/version", "/get_server_info", "/info", "/props")
_STABLE = ("id", "root", "parent", "owned_by", "max_model_len", "meta")
"""The fields of a model's list entry that do not change between two requests."""
_WORD = "pagemill"
_PROBE = {"max_tokens": 16, "temperature": 0}
_UNLIMITED = 2**40
_NO_TEXTS = TokenTexts(None)
_NO_ADAPTERS = NoAdapters("the engine is an endpoint")


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of the model that the endpoint serves."""

    model: str
    """Its name for the model."""
    dialect: Dialect
    max_model_len: int | None
    digest: str
    """Digest of the entry in the list of models and the engine's version."""


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """The endpoint as the worker's threads see it. `EngineFace` describes the fields."""

    identity: Identity
    served_models: tuple[str, ...]
    fingerprint: str
    lacks: frozenset[str]
    limits: SchedulerConfig
    tokenizer: Tokenizer | None
    input_processor: EndpointInputs
    tier: Tier = "continues"
    model_parts: str = ""
    token_texts: TokenTexts = _NO_TEXTS
    adapters: NoAdapters = _NO_ADAPTERS


async def identify(connection: Connection, names: tuple[str, ...]) -> Identity:
    """Return the identity of the first of these models that the endpoint serves, or of its only model.

    Raises:
        ConfigError: it serves several other models.
        Unavailable: it does not answer, or does not serve a model yet.
    """
    try:
        listed = (await connection.get_json("/models")).get("data")
    except (BadAnswer, Refused) as error:
        raise Unavailable(f"the list of models cannot be read: {error}") from None
    models = [
        model for model in listed if isinstance(model, dict) and isinstance(model.get("id"), str)
    ] if isinstance(listed, list) else []  # fmt: skip
    named = [model for model in models if model["id"] in names] or (models if len(models) == 1 else [])
    if not models:
        raise Unavailable("the endpoint serves no model yet")
    if not named:
        shown = ", ".join(model["id"][:64] for model in models[:8])
        message = f"served_model_name: the endpoint serves none of {', '.join(names)}, but {shown}"
        raise ConfigError(message, setting="served_model_name")
    entry, version = named[0], await _version(connection)
    stable = json.dumps([{name: entry.get(name) for name in _STABLE}, version], sort_keys=True)
    owner, length = entry.get("owned_by"), _length(entry)
    dialect = DIALECTS.get(owner, Dialect()) if isinstance(owner, str) else Dialect()
    return Identity(entry["id"], dialect, length, hashlib.sha256(stable.encode()).hexdigest())


async def probe(
    connection: Connection, identity: Identity, config: EngineConfig, revision: str
) -> EndpointModel:
    """Determine the abilities of the endpoint.

    Args:
        config: the names, limits and tokenizer that the operator set.
        revision: the operator's name for the model's revision.

    Raises:
        ConfigError: it cannot run jobs.
        Unavailable: it does not answer.
    """
    tokenizer = None
    if config.model != NO_TOKENIZER:
        tokenizer = load_tokenizer(Path(config.model).expanduser(), config.chat_template)
    lacks = await _lacks(connection, identity)
    if tokenizer is not None and "tokens" in lacks:
        raise ConfigError("model: the endpoint does not take token ids; leave out --model", setting="model")
    if {"prompt", "chat"} <= lacks:
        raise ConfigError(
            "engine_url: the endpoint answers neither completions nor chats", setting="engine_url"
        )
    await _check_stream(connection, identity, lacks)
    lacks |= NEVER if tokenizer is not None else NEVER | {"tools"}
    if tokenizer is not None:
        lacks -= {"prompt", "chat"}
    rows = config.max_num_seqs or DEFAULT_ROWS
    length = min(
        config.max_model_len or 2**31, identity.max_model_len or config.max_model_len or DEFAULT_CONTEXT
    )
    vocab = 2**31  # the endpoint checks ids
    inputs = EndpointInputs(
        tokenizer,
        InputLimits(vocab, length, _UNLIMITED, rows),
        identity.dialect,
        lacks,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    identity_text = f"{identity.digest} {revision}"
    logger.info("the endpoint is %s; it lacks %s", identity.dialect.name, ", ".join(sorted(lacks)))
    return EndpointModel(
        identity,
        config.served_model_name,
        hashlib.sha256(identity_text.encode()).hexdigest()[:16],
        lacks,
        SchedulerConfig(
            block_size=1, num_kv_blocks=0, max_model_len=length, max_num_seqs=rows, max_num_batched_tokens=0
        ),
        tokenizer,
        inputs,
    )


async def _check_stream(connection: Connection, identity: Identity, lacks: frozenset[str]) -> None:
    """Send a request like those of jobs: an endpoint that rejects a common field would fail all jobs.

    Raises:
        ConfigError: the endpoint rejects it.
        Unavailable: it fails.
    """
    has_prompts = "prompt" not in lacks
    query = Query(
        model=identity.model,
        prompt=_WORD if has_prompts else None,
        messages=None if has_prompts else [{"role": "user", "content": _WORD}],
        params=SamplingParams(seed=1),
        max_tokens=1,
    )
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            aclosing(connection.events(query.path, body(query, identity.dialect))) as events,
        ):
            async for event in events:
                pieces(event, 1)
    except Refused as error:
        raise ConfigError(f"engine_url: a streaming request fails: {error}", setting="engine_url") from None
    except (BadAnswer, Interrupted, TimeoutError) as error:
        reason = str(error) or "the engine sent nothing for too long"
        raise Unavailable(f"a stream fails: {reason}") from None


async def _lacks(connection: Connection, identity: Identity) -> frozenset[str]:
    """Return the abilities that the endpoint does not have. A field without effect counts as lacking."""
    text = {"prompt": f"Write {_WORD}."}
    chat = {"messages": [{"role": "user", "content": f"Write {_WORD}."}]}
    schema = {
        "type": "object",
        "properties": {_WORD: {"const": 1}},
        "required": [_WORD],
        "additionalProperties": False,
    }
    as_json = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    }
    as_choice = {"structured_outputs": {"choice": [_WORD]}}
    missing = set() if accepts_all(identity.dialect) else {"sampling"}
    ways: dict[str, dict[str, Any]] = {"prompt": text, "chat": chat, "tokens": {"prompt": [1, 2]}}
    for word, fields in ways.items():
        if await _try(connection, identity.model, fields | {"max_tokens": 1}) is None:
            missing.add(word)
    way = ways["chat"] if "prompt" in missing else ways["prompt"]
    if not _is_json(await _try(connection, identity.model, way | as_json)):
        missing.add("json")
    if await _try(connection, identity.model, way | as_choice) != _WORD:
        missing.add("structure")
    return frozenset(missing)


async def _try(connection: Connection, model: str, fields: dict[str, Any]) -> str | None:
    """Return the text of the endpoint's response; None if it rejects the request."""
    path = "/chat/completions" if "messages" in fields else "/completions"
    try:
        answer = await connection.post(path, {"model": model} | _PROBE | fields)
    except (BadAnswer, Refused):
        return None
    except Unavailable as error:
        if error.status in (404, 405):
            return None
        raise
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return None
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def _is_json(text: str | None) -> bool:
    try:
        return bool(json.loads(text or "") == {_WORD: 1})
    except (ValueError, RecursionError):
        return False


async def _version(connection: Connection) -> str:
    """Return the engine's version, if the endpoint reports one."""
    for path in _VERSION_PATHS:
        try:
            found = await connection.get_json(path, at_root=True)
        except (BadAnswer, Refused):
            continue
        except Unavailable as error:
            if error.status is None:
                raise
            continue
        for name in ("version", "build_info"):
            if isinstance(found.get(name), str):
                return f"{path} {found[name][:256]}"
    return ""


def _length(entry: dict[str, Any]) -> int | None:
    meta = entry.get("meta")
    found = [entry.get("max_model_len"), meta.get("n_ctx_train") if isinstance(meta, dict) else None]
    return next((value for value in found if type(value) is int and 0 < value < 2**31), None)
