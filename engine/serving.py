"""Selects a model's engine: one that generates, or one that computes vectors or scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pagemill.engine.builder import located, obtain_runnable
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.models.directory import check_model
from pagemill.engine.models.echo import is_echo
from pagemill.engine.models.source import ModelSource
from pagemill.engine.pooling.folder import read_pooling_folder

if TYPE_CHECKING:
    from pagemill.engine.pooling.engine import (
        PoolingEngine,  # imports numpy, which an echo worker does not need
    )

AnyEngine: TypeAlias = "Engine | PoolingEngine"


def load_engine(config: EngineConfig) -> AnyEngine:
    """Load the model into the engine that it requires. Raises `ConfigError`, mostly `ModelLoadError`."""
    check_model(config.model)
    if is_echo(config.model) or ModelSource.parse(config.model).is_file:
        return Engine.from_config(config)
    model = obtain_runnable(config)
    folder = read_pooling_folder(model.directory)
    if folder is None:
        return Engine.from_config(config, model)
    from pagemill.engine.pooling.builder import build_pooling_engine  # imports torch

    return build_pooling_engine(located(config, model), model, folder)
