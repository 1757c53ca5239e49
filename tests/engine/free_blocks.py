"""Freed blocks that must not be read."""

from __future__ import annotations

from typing import Any

import torch

from pagemill.engine.llm import LLM
from pagemill.engine.plan import StepPlan


def poison_free_blocks(llm: LLM) -> None:
    """Fill free blocks with NaN before each step, so that any read of them is detected."""
    executor: Any = llm.engine._parts.executor
    scheduler, launch = llm.engine._scheduler, executor.launch

    def poisoned(plan: StepPlan) -> Any:
        leaving = {block for block, _ in plan.host_stores}
        free = [block.block_id for block in scheduler.kv_cache.pool.free_queue() if block.block_hash is None]
        for layer in executor.kv_cache.layers:
            for tensor in layer.tensors():
                tensor[sorted(set(free) - leaving)] = torch.nan
        return launch(plan)

    executor.launch = poisoned
