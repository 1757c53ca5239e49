"""The cache of converted models: atomic, one conversion, within its limit, and never deleted while in use."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemill.engine.errors import ConfigError, EngineError, ModelLoadError
from pagemill.engine.models.formats.cache import cached_conversion, identity

# A converter with a simulated slow part: it writes a file, reports it, and waits for permission to continue.
CONVERTER = """
import sys, time
from pathlib import Path
from pagemill.engine.models.formats.cache import cached_conversion

def write(directory):
    (directory / "config.json").write_text("{}")
    with open(sys.argv[1], "a") as log:
        log.write("started\\n")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    (directory / "model.safetensors").write_text("weights")

print(cached_conversion("model-v1", "a model", write))
"""


class Converters:
    """Converting processes that share one cache."""

    def __init__(self, directory: Path) -> None:
        self.cache, self._log, self._leave = (directory / name for name in ("cache", "log", "leave"))
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CONVERTER, str(self._log), str(self._leave)],
            env=os.environ | {"PAGEMILL_CACHE_DIR": str(self.cache)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def num_conversions(self) -> int:
        return self._log.read_text().count("started") if self._log.exists() else 0

    def wait_for_conversion(self, number: int = 1) -> None:
        give_up = time.monotonic() + 120
        while self.num_conversions() < number:
            assert time.monotonic() < give_up, "no converter has started"
            time.sleep(0.01)

    def let_finish(self) -> None:
        self._leave.touch()

    def finished(self) -> list[Path]:
        """Entries that look like a finished model."""
        return [path for path in self.cache.iterdir() if path.is_dir() and not path.name.startswith(".")]

    def kill_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=120)


@pytest.fixture
def converters(tmp_path: Path) -> Iterator[Converters]:
    started = Converters(tmp_path)
    yield started
    started.kill_all()


def test_killed_half_way_leaves_nothing_that_looks_finished(converters: Converters) -> None:
    victim = converters.start()
    converters.wait_for_conversion()
    assert any(path.is_dir() for path in converters.cache.iterdir()), "it was half-way"
    victim.send_signal(signal.SIGKILL)
    victim.wait(timeout=120)
    assert converters.finished() == []
    converters.let_finish()
    successor = converters.start()
    output, _ = successor.communicate(timeout=120)
    (directory,) = converters.finished()
    assert output.strip() == str(directory)
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    leftovers = [path for path in converters.cache.iterdir() if path.is_dir() and path != directory]
    assert leftovers == [], "the successor clears up after the victim"


@pytest.mark.slow
def test_two_at_once_convert_once(converters: Converters) -> None:
    first = converters.start()
    converters.wait_for_conversion()
    second = converters.start()
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=1)
    converters.let_finish()
    outputs = {process.communicate(timeout=120)[0].strip() for process in (first, second)}
    assert outputs == {str(path) for path in converters.finished()}
    assert len(outputs) == 1
    assert converters.num_conversions() == 1


def fail(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    raise ModelLoadError("no")


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelLoadError):
        cached_conversion("model-v1", "a model", fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_cannot_be_kept_says_where_it_could_be(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A configured directory is a wrong setting; any other and a full disk are the machine's failure."""

    def write(directory: Path) -> None:
        raise OSError(code, os.strerror(code))

    is_full = code in (errno.ENOSPC, errno.EDQUOT)
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    with pytest.raises(EngineError, match="give PAGEMILL_CACHE_DIR a directory") as refused:
        cached_conversion("model-v1", "a model", write)
    assert isinstance(refused.value, ModelLoadError) == (not is_full)
    monkeypatch.delenv("PAGEMILL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EngineError, match=os.strerror(code)) as failed:
        cached_conversion("model-v1", "a model", write)
    assert not isinstance(failed.value, ModelLoadError)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_where_nothing_can_be_locked_nothing_is_converted(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelLoadError, match=os.strerror(code)):
        cached_conversion("model-v1", "a model", fail)
    (tmp_path / "model-v1").mkdir()
    assert cached_conversion("model-v1", "a model", fail) == tmp_path / "model-v1", (
        "what is there can be read"
    )


# A user of one model of the cache, until its input ends.
USER = """
import sys
from pagemill.engine.models.formats.cache import cached_conversion
cached_conversion(sys.argv[1], "a model", lambda work: (work / "weights").write_bytes(bytes(int(sys.argv[2]))))
print("ready", flush=True)
sys.stdin.read()
"""


class TestLimit:
    """A limit of 2,500 bytes, with models of 1,000."""

    @pytest.fixture(autouse=True)
    def users(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("PAGEMILL_CACHE_GIB", str(2500 / 2**30))
        self.cache = tmp_path
        self.processes: list[subprocess.Popen[str]] = []
        yield
        for process in self.processes:
            process.kill()
            process.communicate()

    def use(self, name: str, size: int = 1000) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", USER, name, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def use_once(self, name: str, used_at: int) -> None:
        self.use(name).communicate(timeout=120)
        os.utime(self.cache / f"{name}.used", (used_at, used_at))

    def kept(self) -> set[str]:
        return {path.name for path in self.cache.iterdir() if path.is_dir()}

    def test_the_one_unused_for_longest_goes(self) -> None:
        for used_at, name in enumerate(("a", "b", "a"), start=1):
            self.use_once(name, used_at)
        self.use_once("c", 4)
        assert self.kept() == {"a", "c"}

    def test_one_in_use_stays_whatever_the_limit(self) -> None:
        self.use("oldest")
        os.utime(self.cache / "oldest.used", (1, 1))
        self.use_once("unused", 2)
        self.use("newest")
        assert self.kept() == {"oldest", "newest"}
        self.use("huge", size=10_000)
        assert self.kept() == {"oldest", "newest", "huge"}

    def test_what_the_dead_left_half_done_goes_too(self) -> None:
        self.use_once("a", 1)
        (self.cache / ".a.left-behind").mkdir()
        self.use_once("b", 2)
        assert self.kept() == {"a", "b"}

    def test_nothing_else_in_the_directory_is_touched(self) -> None:
        (self.cache / "numba").mkdir()
        (self.cache / "numba" / "machine-code").write_bytes(bytes(10_000))
        self.use_once("a", 1)
        assert self.kept() == {"a", "numba"}

    @pytest.mark.parametrize("limit", ["much", "-1", "nan"])
    def test_a_limit_that_is_none(self, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PAGEMILL_CACHE_GIB", limit)
        with pytest.raises(ConfigError, match="PAGEMILL_CACHE_GIB"):
            cached_conversion("a", "a model", fail)


class TestIdentity:
    def test_names_sizes_times_and_samples_count(self, tmp_path: Path) -> None:
        file = tmp_path / "weights"
        file.write_bytes(bytes(5 * 2**20))
        os.utime(file, (1, 1))
        known = identity([file])
        assert identity([file]) == known
        os.utime(file, (2, 2))
        assert identity([file]) != known
        content = bytearray(5 * 2**20)
        content[-1] = 1
        file.write_bytes(content)
        os.utime(file, (1, 1))
        assert identity([file]) != known
