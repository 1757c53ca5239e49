"""Parses a model's name: a folder, a repository of a hub, the packaged model or echo.

Does not import torch or access the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagemill.common.plugins import Plugins
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.echo import echo_name, is_echo
from pagemill.engine.models.formats.gguf import is_gguf
from pagemill.engine.models.packaged import PACKAGED_MODEL

MODELSCOPE_PREFIX = "modelscope:"
HOW_TO_NAME = (
    "give a folder, a .gguf file, org/name[@revision] of the Hugging Face Hub, "
    f"{MODELSCOPE_PREFIX}org/name[@revision], {PACKAGED_MODEL!r} or 'echo'"
)

# The Hub's rule for names; a revision is a branch, a tag, a commit or refs/pr/N.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9_][A-Za-z0-9._/-]{{0,254}}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
HUBS: Plugins[Any] = Plugins(
    "pagemill.hubs", "callable", callable, ("echo", "huggingface", MODELSCOPE_PREFIX.removesuffix(":"))
)
"""Hubs of other packages, by model prefix: see `engine/models/directory.py`."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model. `engine/models/directory.py` has a function for each kind."""

    kind: Literal["echo", "packaged", "folder", "gguf", "huggingface", "modelscope", "plugin"]
    name: str
    """The repository's or the packaged model's name, or the specified path of the folder or file."""
    revision: str | None = None
    """A hub's branch, tag or commit; None: its default branch."""
    hub: str = ""
    """The prefix that another package registers for its hub, for the kind `plugin`."""

    @classmethod
    def parse(cls, model: str) -> ModelSource:
        """Parse a name. An existing folder takes precedence over a repository of the same name.

        Raises:
            ModelLoadError: the name does not have any of these forms.
        """
        if is_echo(model):
            return cls("echo", model)
        if model == PACKAGED_MODEL:
            return cls("packaged", model)
        if model.startswith(MODELSCOPE_PREFIX):
            return cls("modelscope", *_repository(model, model.removeprefix(MODELSCOPE_PREFIX)))
        hub, colon, repository = model.partition(":")
        if colon and hub in HUBS.names:
            return cls("plugin", *_repository(model, repository), hub)
        if is_gguf(model) and not Path(model).expanduser().is_dir():
            return cls("gguf", model)
        if _is_path(model):
            return cls("folder", model)
        if "/" in model:
            return cls("huggingface", *_repository(model, model))
        raise ModelLoadError(f"no model at {model!r}: {HOW_TO_NAME}")

    @property
    def is_remote(self) -> bool:
        """True for a repository of a hub."""
        return self.kind in ("huggingface", "modelscope", "plugin")

    @property
    def is_file(self) -> bool:
        """True for a GGUF file, such as the packaged model's."""
        return self.kind in ("packaged", "gguf")

    @property
    def served_name(self) -> str:
        """The name that jobs use unless another is configured: the repository's, the folder's, or the file's."""
        if self.kind == "echo":
            return echo_name(self.name)
        if self.kind == "gguf":
            return Path(self.name).stem
        return Path(self.name).expanduser().resolve().name if self.kind == "folder" else self.name

    def __str__(self) -> str:
        prefix = f"{self.hub}:" if self.hub else MODELSCOPE_PREFIX if self.kind == "modelscope" else ""
        return f"{prefix}{self.name}" + (f"@{self.revision}" if self.revision else "")


def is_commit(revision: str | None) -> bool:
    """Return True for a full commit hash, which always identifies the same files."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def _is_path(model: str) -> bool:
    if model.startswith(("/", "./", "../", "~")) or model.endswith("/"):
        return True
    try:
        return bool(model) and Path(model).is_dir()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False


def _repository(given: str, text: str) -> tuple[str, str | None]:
    match = _REPOSITORY.fullmatch(text)
    if match is None or ".." in text or "--" in match[1] or "//" in text or match[1].endswith(".git"):
        raise ModelLoadError(f"{given!r} is neither a folder nor a repository's name: {HOW_TO_NAME}")
    return match[1], match[2]
