"""Assignment of GPUs to workers, and division of the CPU among workers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

import psutil

Group = tuple[str, ...]

ALL = "all"
KV_SHARE = 0.5
"""Fraction of the available memory for the KV pools of all CPU workers together."""
KV_MAX_BYTES = 4 * 1024**3
_CARD = re.compile(r"[0-9]{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{4,100}")
_LISTED = re.compile(r"^GPU ([0-9]+):", re.MULTILINE)
LIST_TIMEOUT_S = 30.0


def parse_groups(text: str, environment: Mapping[str, str] = os.environ) -> tuple[Group, ...]:
    """Parse `0|1|2,3`, a worker's GPUs between bars, or `all`, a worker per GPU.

    If CUDA_VISIBLE_DEVICES is set, numbers are indexes into it, as in CUDA programs. Raises ValueError.
    """
    visible = [
        card.strip() for card in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if card.strip()
    ]
    if text.strip() == ALL:
        cards = visible or list_cards()
        if not cards:
            raise ValueError("no GPU found: nvidia-smi lists none, and CUDA_VISIBLE_DEVICES is not set")
        return tuple((card,) for card in cards)
    groups = tuple(tuple(card.strip() for card in group.split(",")) for group in text.split("|"))
    named = [card for group in groups for card in group]
    for card in named:
        if not _CARD.fullmatch(card):
            raise ValueError(f"{card[:40]!r} is not a GPU: write numbers or UUIDs, such as 0|1|2,3")
    if len(set(named)) < len(named):
        raise ValueError("a GPU is named twice: each belongs to one worker")
    return tuple(tuple(_resolve(card, visible) for card in group) for group in groups)


def _resolve(card: str, visible: list[str]) -> str:
    if not visible or not card.isdecimal():
        return card
    if int(card) >= len(visible):
        raise ValueError(f"GPU {card} does not exist: CUDA_VISIBLE_DEVICES names {len(visible)}")
    return visible[int(card)]


def list_cards() -> list[str]:
    """Return the numbers of this machine's NVIDIA GPUs; none without a driver."""
    try:
        run = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return _LISTED.findall(run.stdout) if run.returncode == 0 else []


def cores() -> int:
    """Return the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def divided_threads(workers: int) -> int:
    """Return each worker's number of threads, so that together they use each core once."""
    return max(1, cores() // workers)


def divided_kv_bytes(workers: int) -> int:
    """Return each worker's bytes for KV blocks: a single worker uses a quarter of the available memory."""
    return int(min(KV_MAX_BYTES, psutil.virtual_memory().available * KV_SHARE / workers))
