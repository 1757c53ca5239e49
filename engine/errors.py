"""The engine's error tree. Every error has a `code`, which is reported to the caller.

EngineError
├── InvalidRequest            the request is invalid; only this request fails
│   ├── PromptTooLong         prompt_too_long: longer than max_model_len
│   ├── InvalidImage          invalid_image: not a picture, damaged, or over a limit
│   ├── NeverFits             never_fits: needs more KV blocks than the pool has
│   ├── UnsupportedFeature    unsupported_feature: rejected, never ignored
│   ├── UnknownAdapter        unknown_adapter: names an adapter that does not exist
│   ├── SchemaInvalid         schema_invalid: an invalid regex, JSON schema or grammar
│   ├── SchemaTooComplex      schema_too_complex: one that takes too much time or memory
│   └── SchemaMismatch        schema_mismatch: a complete output that its JSON schema does not allow
├── ConfigError               an invalid configuration, detected at startup
│   ├── ModelLoadError        the model does not exist, or its checkpoint is unreadable or unsupported
│   └── AdapterError          the adapter does not exist, or does not fit the model
├── LacksAbility              only another engine may support the request; the request does not fail
├── StepError                 the step raised; its requests are retried, then fail alone
└── DeviceLost                no further step can succeed on this device; the engine must be restarted
    └── RankLost              a process of a model that is spread over several crashed
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class EngineError(Exception):
    """The root of the tree."""

    code = "engine_error"


class InvalidRequest(EngineError, ValueError):
    code = "invalid_job"

    @classmethod
    def with_code(cls, code: str, message: str) -> InvalidRequest:
        """Return the error for a code.

        Args:
            code: an error code of a job.
            message: the error's message.

        Returns:
            An instance of the class with this code.
        """
        kinds: list[type[InvalidRequest]] = [cls, *cls.__subclasses__()]
        return next(kind for kind in kinds if kind.code == code)(message)


class PromptTooLong(InvalidRequest):
    code = "prompt_too_long"


class InvalidImage(InvalidRequest):
    code = "invalid_image"


class NeverFits(InvalidRequest):
    code = "never_fits"


class UnsupportedFeature(InvalidRequest):
    code = "unsupported_feature"


class UnknownAdapter(InvalidRequest):
    """The request names an adapter that does not exist."""

    code = "unknown_adapter"


class SchemaInvalid(InvalidRequest):
    code = "schema_invalid"


class SchemaTooComplex(InvalidRequest):
    code = "schema_too_complex"


class SchemaMismatch(InvalidRequest):
    """A complete output does not match its schema, which its grammar can't enforce in full."""

    code = "schema_mismatch"


class LacksAbility(EngineError):
    """This engine does not support the request, but other engines of the model may."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words`: the abilities that it lacks."""
        super().__init__(f"the engine lacks {', '.join(words)}")
        self.words = tuple(words)


class ConfigError(EngineError, ValueError):
    """An invalid configuration; `setting` names the option at fault, if there is one."""

    code = "config_error"

    def __init__(self, message: str, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


class ModelLoadError(ConfigError):
    """The model does not exist, or its checkpoint is unreadable or unsupported."""

    code = "model_load_error"


class AdapterError(ConfigError):
    """The adapter folder does not exist or does not fit the model; the message names it and the reason."""

    code = "adapter_error"


class DeviceLost(EngineError):
    """The device can run no more steps. Nothing is retried: the process exits, and other workers resume its jobs."""

    request_ids: frozenset[str] = frozenset()
    """The requests in a step at that time: only one of these can be the cause."""


class RankLost(DeviceLost):
    """A process of a model spread over several crashed."""


class StepError(EngineError):
    """A step failed; `request_ids` are its requests."""

    def __init__(self, message: str, request_ids: list[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


def complaint(error: ValidationError, *, is_secret: bool = False) -> str:
    """Describe an invalid setting and the allowed values, as part of a line. Secrets are not quoted."""
    first = error.errors(include_url=False, include_context=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    given = repr(first["input"])
    if is_secret or len(given) > 100:
        return message
    return f"{given} is not valid: {message}"


_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_exhausted(error: OSError) -> bool:
    """Return True if the cause is a lack of disk space or memory, not a name or a permission."""
    return error.errno in _EXHAUSTED
