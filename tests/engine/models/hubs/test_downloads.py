"""Downloads from a hub on loopback, each in a separate process: the libraries read their settings at import."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import run_python
from tests.hub_server import LoopbackHub, running_hub

OBTAIN = """
import json, logging, resource, sys
from pagemill.engine.errors import EngineError
from pagemill.engine.models.directory import obtain_model

if limit := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
said = []
try:
    found = obtain_model(sys.argv[1], said.append)
    print(json.dumps([str(found.directory), found.commit, said]))
except EngineError as error:
    print(json.dumps([type(error).__name__, str(error), said]))
"""
HUBS = ("", "modelscope:")
CHUNK = 10 * 2**20
"""huggingface_hub writes, and therefore resumes, in units of this size."""
WEIGHTS = bytes(range(256)) * (24 * 2**20 // 256)
SMALL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"}
SURPLUS = {
    "pytorch_model.bin": b"a pickle", "original/model.safetensors": b"other", "model.onnx": b"other",
    "README.md": b"hello", "../../evil.json": b"evil", "tokenizer/../../evil": b"evil",
}  # fmt: skip


class Outcome(NamedTuple):
    first: str
    """The directory, or the error's class."""
    second: str | None
    """The commit, or the error's line."""
    said: list[str]
    log: str

    @property
    def files(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in Path(self.first).iterdir()}


Get = Callable[..., Outcome]


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with running_hub() as hub:
        hub.add("org/tiny", {**SMALL, "model.safetensors": b"w" * 1000, **SURPLUS})
        yield hub


@pytest.fixture
def get(hub: LoopbackHub, tmp_path: Path) -> Get:
    """Get a model, with caches for this test only."""

    def run(model: str, limit: int = 0, **environment: str) -> Outcome:
        settings = {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1",
            "MODELSCOPE_ENDPOINT": hub.url, "MODELSCOPE_CACHE": str(tmp_path / "ms"), "MODELSCOPE_HOME": str(tmp_path),
            "MODELSCOPE_REPO_TREE_PAGE_MAX_ATTEMPTS": "1",  # it waits between them
        } | environment  # fmt: skip
        ran = run_python("-c", OBTAIN, model, str(limit), env=os.environ | settings)
        assert ran.returncode == 0, ran.stderr
        return Outcome(*json.loads(ran.stdout), log=ran.stderr)

    return run


def everything_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", HUBS)
def test_only_what_is_needed_arrives_once(prefix: str, hub: LoopbackHub, get: Get, tmp_path: Path) -> None:
    found = get(f"{prefix}org/tiny")
    assert found.second == hub.repositories["org/tiny"].commit
    assert found.files == {**SMALL, "model.safetensors": b"w" * 1000}
    assert found.said[0].startswith("downloading 1.0 kB of org/tiny into ")
    assert not [path for path in everything_under(tmp_path) if "evil" in path.name]
    hub.asked.clear()
    again = get(f"{prefix}org/tiny")
    assert (again.first, again.second) == (found.first, found.second)
    assert not hub.downloads("model.safetensors")


@pytest.mark.slow
def test_shards_are_those_of_the_index(hub: LoopbackHub, get: Get) -> None:
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()
    shards = {"m-1.safetensors": b"1" * 50, "m-2.safetensors": b"2" * 50}
    hub.add(
        "org/sharded", {**SMALL, **shards, "model.safetensors.index.json": index, "m-3.safetensors": b"no"}
    )
    assert get("org/sharded").files == {**SMALL, **shards, "model.safetensors.index.json": index}


def test_pickles_come_where_there_is_nothing_else(hub: LoopbackHub, get: Get) -> None:
    hub.add("org/old", {**SMALL, "pytorch_model.bin": b"a pickle"})
    assert get("org/old").files == {**SMALL, "pytorch_model.bin": b"a pickle"}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", HUBS)
def test_a_download_goes_on_where_the_connection_broke(prefix: str, hub: LoopbackHub, get: Get) -> None:
    hub.add("org/large", {**SMALL, "model.safetensors": WEIGHTS})
    hub.cut["model.safetensors"] = [CHUNK + 5000]
    found = get(f"{prefix}org/large")
    assert found.files["model.safetensors"] == WEIGHTS
    first, second = hub.downloads("model.safetensors")
    assert first.range is None
    resumed = re.fullmatch(r"bytes=(\d+)-", second.range or "")
    assert resumed, second
    assert CHUNK <= int(resumed[1]) <= CHUNK + 5000


@pytest.mark.slow
def test_a_download_that_failed_keeps_files_that_are_whole(hub: LoopbackHub, get: Get) -> None:
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()
    shards = {"m-1.safetensors": b"1", "m-2.safetensors": b"2"}
    hub.add("org/two", {**SMALL, **shards, "model.safetensors.index.json": index})
    hub.refuse["m-2.safetensors"] = (403, {})
    assert get("org/two").first == "ModelLoadError"
    assert get("org/two", HF_HUB_OFFLINE="1").first == "ModelLoadError"  # half a model is not a model
    hub.refuse.clear()
    hub.asked.clear()
    assert get("org/two").files["m-2.safetensors"] == b"2"
    assert not hub.downloads("m-1.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("prefix", HUBS)
def test_a_cached_model_starts_without_its_hub(prefix: str, hub: LoopbackHub, get: Get) -> None:
    found = get(f"{prefix}org/tiny")
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    without = get(f"{prefix}org/tiny", **away)
    assert without.first == found.first
    assert "does not answer" in without.said[-1]
    assert "continuing with the cached copy" in without.said[-1]
    if not prefix:
        assert get("org/tiny", HF_HUB_OFFLINE="1").first == found.first
        assert get(f"org/tiny@{found.second}", HF_HUB_OFFLINE="1")[:2] == found[:2]


@pytest.mark.slow
def test_a_revision_is_resolved_to_its_commit(hub: LoopbackHub, get: Get) -> None:
    repository = hub.repositories["org/tiny"]
    repository.tags["v1"] = repository.commit
    assert get("org/tiny@v1").second == repository.commit
    assert get(f"org/tiny@{repository.commit}").second == repository.commit


def refuses(hub: LoopbackHub, part: str, status: int, **headers: str) -> None:
    hub.refuse[part] = (status, {name.replace("_", "-"): value for name, value in headers.items()})


def gated(hub: LoopbackHub) -> None:
    refuses(hub, "/resolve/", 403, X_Error_Code="GatedRepo")


def unauthorized(hub: LoopbackHub) -> None:
    hub.token = "right"


def broken(hub: LoopbackHub) -> None:
    refuses(hub, "/api", 503)


def nothing(hub: LoopbackHub) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fault", "environment", "kind", "line"),
    [
        ("org/tiny", gated, {}, "ModelLoadError", "is gated: ask for access at .*/org/tiny, then set HF_TOKEN"),
        ("org/tiny", unauthorized, {"HF_TOKEN": "wrong"}, "ModelLoadError", "rejects the access token: .*set HF_TOKEN"),
        ("org/tiny", unauthorized, {}, "ModelLoadError", "no model org/tiny that you can read.*set HF_TOKEN"),
        ("org/none", nothing, {}, "ModelLoadError", "no model org/none .*, and the folder does not exist"),
        ("org/tiny@v9", nothing, {}, "ModelLoadError", "org/tiny has no revision 'v9'; its branches"),
        ("org/tiny", nothing, {"HF_HUB_OFFLINE": "1"}, "ModelLoadError", "OFFLINE is set, .*pagemill pull org/tiny"),
        ("org/tiny", broken, {}, "EngineError", r"does not answer \(HTTP status 503\); is the network up"),
        ("org/tiny", nothing, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "EngineError", "does not answer .*is the network"),
        ("org/tiny", nothing, {"HF_HOME": "/proc/nowhere"}, "ModelLoadError", "can't keep org/tiny .*give HF_HOME"),
        ("modelscope:org/none", nothing, {}, "ModelLoadError", "no model org/none that you can read"),
        ("modelscope:org/tiny@v9", nothing, {}, "ModelLoadError", "org/tiny has no revision 'v9'"),
        ("modelscope:org/tiny", unauthorized, {"MODELSCOPE_API_TOKEN": "wrong"}, "ModelLoadError",
         "rejects the access token: .*set MODELSCOPE_API_TOKEN"),
        ("modelscope:org/tiny", nothing, {"MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}, "EngineError",
         "does not answer .*is the network"),
    ],
)  # fmt: skip
def test_each_failure_is_one_line_with_a_next_step(
    model: str,
    fault: Callable[[LoopbackHub], None],
    environment: dict[str, str],
    kind: str,
    line: str,
    hub: LoopbackHub,
    get: Get,
) -> None:
    fault(hub)
    failed = get(model, **environment)
    assert failed.first == kind, failed
    assert failed.second is not None
    assert "\n" not in failed.second
    assert re.search(line, failed.second), failed.second


@pytest.mark.slow
def test_a_disk_that_fills_up(hub: LoopbackHub, get: Get, tmp_path: Path) -> None:
    hub.add("org/large", {**SMALL, "model.safetensors": WEIGHTS})
    failed = get("org/large", limit=2**20)
    assert failed.first == "EngineError"
    assert re.fullmatch(
        r"can't keep org/large in \S+: File too large; free some room .*HF_HOME .*", str(failed.second)
    )
    assert max(file.stat().st_size for file in everything_under(tmp_path)) < 2**20


def test_a_disk_without_room_is_noticed_before(hub: LoopbackHub, get: Get) -> None:
    hub.add("org/huge", {**SMALL, "model.safetensors": b"w"})
    hub.claimed_bytes["model.safetensors"] = 2**60
    failed = get("org/huge")
    assert failed.first == "EngineError"
    assert re.match(
        r"no room for org/huge: 1152921\.5 TB are still to be downloaded, and ", str(failed.second)
    )
    assert not hub.downloads("model.safetensors")


@pytest.mark.slow
def test_modelscope_verifies_what_it_has(hub: LoopbackHub, get: Get) -> None:
    file = Path(get("modelscope:org/tiny").first, "model.safetensors")
    file.write_bytes(b"x" * 1000)
    get("modelscope:org/tiny")
    assert file.read_bytes() == b"w" * 1000


@pytest.mark.slow
def test_half_an_update_of_a_branch_is_no_model(hub: LoopbackHub, get: Get) -> None:
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()
    both = {"m-1.safetensors": b"1" * 50, "m-2.safetensors": b"2" * 50}
    repository = hub.add("org/moves", {**SMALL, **both, "model.safetensors.index.json": index})
    away = {"MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    old = get("modelscope:org/moves")
    repository.files |= {
        name: content.replace(b"1", b"3").replace(b"2", b"4") for name, content in both.items()
    }
    hub.refuse["m-2.safetensors"] = (403, {})
    assert get("modelscope:org/moves").first == "ModelLoadError"
    assert Path(old.first, "m-1.safetensors").read_bytes() == b"3" * 50
    assert get("modelscope:org/moves", **away).first == "EngineError"
    hub.refuse.clear()
    new = get("modelscope:org/moves")
    assert new.first == old.first
    assert new.second != old.second
    assert Path(old.first, "m-2.safetensors").read_bytes() == b"4" * 50
    assert get("modelscope:org/moves", **away).first == old.first


@pytest.mark.parametrize(
    ("model", "package", "extra"),
    [("org/name", "huggingface_hub", "worker"), ("modelscope:org/name", "modelscope_hub", "modelscope")],
)
def test_without_its_package_a_hub_says_what_to_install(
    model: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill.engine.errors import ModelLoadError
    from pagemill.engine.models.directory import obtain_model

    absent: Any = None
    monkeypatch.setitem(sys.modules, package, absent)
    with pytest.raises(ModelLoadError, match=rf"pip install 'pagemill\[{extra}\]'"):
        obtain_model(model)


def test_what_killed_downloads_left_is_removed_after_a_day(get: Get, tmp_path: Path) -> None:
    blobs = tmp_path / "hf/hub/models--org--tiny/blobs"
    blobs.mkdir(parents=True)
    old, recent = blobs / "a.0.incomplete", blobs / "b.1.incomplete"
    for part, at in ((old, 0.0), (recent, time.time())):
        part.write_bytes(b"half")
        os.utime(part, (at, at))
    get("org/tiny")
    assert not old.exists()
    assert recent.exists()
