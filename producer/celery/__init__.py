"""Celery in front of the native queue: tasks for an app, its worker, and a relay for its results."""

from __future__ import annotations

from pagemill.producer.celery.native import GenerationTask, generation_task

__all__ = ["GenerationTask", "generation_task"]
