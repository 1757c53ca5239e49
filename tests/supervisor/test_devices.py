"""Groups of GPUs, and shares of the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from pagemill.supervisor import devices
from pagemill.supervisor.devices import KV_MAX_BYTES, parse_groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("0", (("0",),)),
        ("0,1|2,3", (("0", "1"), ("2", "3"))),
        (" 0 | GPU-8f6d , 3", (("0",), ("GPU-8f6d", "3"))),
    ],
)
def test_groups_are_parsed(text: str, groups: tuple[tuple[str, ...], ...]) -> None:
    assert parse_groups(text, {}) == groups


@pytest.mark.parametrize("text", ["", "0|", "0,,1", "a", "0|0", "0,1|1", "-1", "0;1", "0 1"])
def test_what_names_no_cards_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GPU"):
        parse_groups(text, {})


def test_numbers_count_in_what_is_visible() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "4, GPU-8f6d,6"}
    assert parse_groups("0|1,2", environment) == (("4",), ("GPU-8f6d", "6"))
    assert parse_groups("all", environment) == (("4",), ("GPU-8f6d",), ("6",))
    with pytest.raises(ValueError, match="GPU 3 does not exist: CUDA_VISIBLE_DEVICES names 3"):
        parse_groups("3", environment)


def test_all_asks_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "nvidia-smi"
    listing.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA L4 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA L4 (UUID: GPU-2)'\n"
    )
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert parse_groups("all", {}) == (("0",), ("1",))
    listing.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    with pytest.raises(ValueError, match="no GPU found"):
        parse_groups("all", {})


def test_workers_share_the_machine() -> None:
    assert devices.divided_threads(1) == devices.cores()
    assert devices.divided_threads(10_000) == 1
    for workers in (1, 2, 8):
        assert devices.divided_threads(workers) * workers <= max(workers, devices.cores())
        total = workers * devices.divided_kv_bytes(workers)
        assert total <= max(KV_MAX_BYTES * workers, 1)
        assert total <= psutil.virtual_memory().total * devices.KV_SHARE
