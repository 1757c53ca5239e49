"""Pickled weights: the same tensors as in the file, and code in a file is never run."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.checkpoint import read_tensors, weight_files
from pagemill.engine.models.formats import process


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    return {
        "half": torch.randn(3, 5).half(),
        "bfloat": torch.randn(7).bfloat16(),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5),
        "embedding": whole,
        "tied": whole,
        "rows": whole[2:4],
        "transposed": whole.t(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach()), name


@pytest.mark.slow
@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_tensors_are_those_of_the_file(is_zip: bool, model: Path) -> None:
    tensors = some_tensors()
    torch.save(tensors, model / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    check_same(read_tensors(weight_files(model)), tensors)


@pytest.mark.slow
def test_shards_and_files_beside_them(model: Path) -> None:
    tensors = some_tensors()
    names = list(tensors)
    halves = {"pytorch_model-00001-of-00002.bin": names[:7], "pytorch_model-00002-of-00002.bin": names[7:]}
    for file, part in halves.items():
        torch.save(OrderedDict((name, tensors[name]) for name in part), model / file)
    torch.save({"lr": 1.0}, model / "optimizer.bin")
    torch.save({"lr": 1.0}, model / "training_args.bin")
    check_same(read_tensors(weight_files(model)), tensors)  # by their names
    weight_map = {name: file for file, part in halves.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    check_same(read_tensors(weight_files(model)), tensors)


@pytest.mark.slow
def test_is_converted_once_and_again_when_the_file_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[list[Path]] = []
    convert = process.convert

    def counted(kind: Any, sources: Any, directory: Path) -> None:
        conversions.append(list(sources))
        convert(kind, sources, directory)

    monkeypatch.setattr("pagemill.engine.models.formats.pickled.convert", counted)
    file = model / "pytorch_model.bin"
    torch.save({"a": torch.zeros(3)}, file)
    first = weight_files(model)
    assert weight_files(model) == first
    status = file.stat()
    torch.save({"a": torch.ones(3)}, file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    second = weight_files(model)
    assert second != first
    assert torch.equal(load_file(second[0])["a"], torch.ones(3))
    assert len(conversions) == 2


def test_large_weights_are_written_in_several_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a gigabyte per file is too much for a test."""
    from pagemill.engine.models.formats import shards
    from pagemill.engine.models.formats.pickle_conversion import convert_pickles

    monkeypatch.setattr(shards, "SHARD_BYTES", 100)
    tensors = {f"t{number}": torch.randn(10) for number in range(6)}
    torch.save(tensors, model / "pytorch_model.bin")
    (model / "out").mkdir()
    convert_pickles([model / "pytorch_model.bin"], model / "out")
    files = weight_files(model / "out")
    assert len(files) == 2
    check_same(read_tensors(files), tensors)


class Calls:
    """A pickle that calls a function when it is read."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def mark(directory: Path) -> str:
    return f"touch {directory / 'ran'}"


def zipped(content: bytes, file: Path, *, compression: int = zipfile.ZIP_STORED) -> None:
    """A file as torch writes it, around any pickle."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")


def system(model: Path, file: Path) -> None:
    torch.save({"a": Calls(os.system, mark(model))}, file)


def evaluated(model: Path, file: Path) -> None:
    zipped(pickle.dumps({"a": Calls(eval, f"__import__('os').system({mark(model)!r})")}, protocol=2), file)


def plain_pickle(model: Path, file: Path) -> None:
    file.write_bytes(pickle.dumps(Calls(os.system, mark(model)), protocol=2))


def by_name(model: Path, file: Path) -> None:
    """`getattr` of an allowed module's import of os, without naming os."""
    zipped(b"\x80\x02c__builtin__\ngetattr\nctorch.serialization\nos\nX\x06\x00\x00\x00system\x86R.", file)


def persistent(model: Path, file: Path) -> None:
    """A storage whose path in the archive points outside it."""
    zipped(pickle_of_storage("../../../../etc/passwd", 1000), file)


def pickle_of_storage(key: str, numel: int) -> bytes:
    """A tensor of `numel` floats in the storage `key`."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, Storage):
                return ("storage", torch.FloatStorage, key, "cpu", numel)
            return None

    class Storage:
        pass

    class Tensor:
        def __reduce__(self) -> Any:
            arguments = (Storage(), 0, (numel,), (1,), False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    out = io.BytesIO()
    Pickler(out, protocol=2).dump({"a": Tensor()})
    return out.getvalue()


def huge_storage(model: Path, file: Path) -> None:
    zipped(pickle_of_storage("0", 2**45), file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/data/0", bytes(64))


def zip_bomb(model: Path, file: Path) -> None:
    """A pickle of a megabyte that claims to unpack to almost four gigabytes."""
    zipped(bytes(2**20), file, compression=zipfile.ZIP_DEFLATED)
    content = file.read_bytes()
    file.write_bytes(content.replace(struct.pack("<I", 2**20), struct.pack("<I", 2**32 - 16)))


def huge_string(model: Path, file: Path) -> None:
    file.write_bytes(b"\x80\x04\x8d" + struct.pack("<Q", 2**50) + b"x" * 100)


def nested(model: Path, file: Path) -> None:
    file.write_bytes(b"\x80\x02" + b"(" * 500_000)


def repeated(model: Path, file: Path) -> None:
    """A tensor of one value that claims a trillion."""
    tensor = torch.zeros(1)
    torch.save({"a": tensor.expand(2**40)}, file)


def truncated(model: Path, file: Path) -> None:
    torch.save({"a": torch.randn(100_000)}, file)
    file.write_bytes(file.read_bytes()[:200_000])


def truncated_legacy(model: Path, file: Path) -> None:
    torch.save({"a": torch.randn(100_000)}, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:200_000])


def text(model: Path, file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548118077\n")


def no_tensors(model: Path, file: Path) -> None:
    torch.save([1, 2, 3], file)


def other_values(model: Path, file: Path) -> None:
    torch.save({"a": torch.zeros(1), "epoch": 3}, file)


HOSTILE = (
    (system, r"asks for posix\.system"), (evaluated, "asks for eval"), (plain_pickle, r"asks for posix\.system"),
    (by_name, "asks for getattr"), (persistent, "is damaged"), (huge_storage, "is damaged|far more memory"),
    (zip_bomb, "far more memory|is damaged"), (huge_string, "is damaged|far more memory"),
    (nested, "is damaged|far more memory"), (repeated, "larger than the file"), (truncated, "is damaged"),
    (truncated_legacy, "is damaged"), (text, "is damaged"), (no_tensors, "no tensors by name"),
    (other_values, "'epoch' is not a plain tensor"),
)  # fmt: skip

QUICK = (system, evaluated, zip_bomb, huge_storage, repeated)
"""Each takes the seconds that torch needs for its import."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "message"),
    [
        pytest.param(*case, id=case[0].__name__, marks=[] if case[0] in QUICK else pytest.mark.slow)
        for case in HOSTILE
    ],
)
def test_what_is_no_weights_is_refused_in_a_line_and_nothing_runs(
    write: Callable[[Path, Path], None], message: str, model: Path, cache: Path
) -> None:
    write(model, model / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=message) as refused:
        weight_files(model)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600
    assert str(model) in str(refused.value)
    assert not (model / "ran").exists()
    assert not any(path.is_dir() for path in cache.iterdir()), "nothing is kept"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_not_read(kind: str, model: Path) -> None:
    file = model / "pytorch_model-00001-of-00002.bin"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match="not a regular file"):
        weight_files(model)


@pytest.fixture
def reader(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the program that converts pickles."""
    torch.save({"a": torch.zeros(1)}, model / "pytorch_model.bin")

    def replace(program: str) -> None:
        monkeypatch.setattr(process, "_CHILD", "replaced_reader")
        (model / "replaced_reader").with_suffix(".py").write_text(program)
        monkeypatch.setattr(sys, "path", [*sys.path, str(model)])

    return replace


@pytest.mark.parametrize(
    ("program", "limit", "value", "error"),
    [
        pytest.param(
            "while True: pass", "_START_CPU_S", 0.5,
            r"took more than \d s of CPU time; it may be damaged or hostile", id="CPU time",
        ),
        pytest.param(
            "import sys\nwith open(sys.argv[2] + '/a', 'wb', 0) as file:\n while True: file.write(bytes(1024))",
            "_SPARE_OUTPUT_BYTES", 2**20, r"wrote more than 1 MiB; it may be damaged or hostile", id="output",
        ),
        pytest.param(
            "import time\ntime.sleep(3600)", "_IDLE_S", 1.0,
            r"made no progress for 1 s; check whether its disk responds", id="progress", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_reader_beyond_a_limit_is_killed(
    model: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[str], None],
    program: str, limit: str, value: float, error: str,
) -> None:  # fmt: skip
    reader(program)
    monkeypatch.setattr(process, limit, value)
    with pytest.raises(ModelLoadError, match=error):
        weight_files(model)


@pytest.mark.slow
def test_conversion_on_a_busy_machine_is_not_limited_by_wall_clock_time(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reader is stopped most of the time, as if other processes had the CPU, and reports why it is slow."""
    torch.save({"a": torch.zeros(3)}, model / "pytorch_model.bin")
    spawn, skipped = process._spawn, 0.0

    def slow(words: list[str], said: IO[bytes]) -> subprocess.Popen[bytes]:
        child = spawn(words, said)
        threading.Thread(target=hinder, args=(child,), daemon=True).start()
        return child

    def hinder(child: subprocess.Popen[bytes]) -> None:
        nonlocal skipped
        with suppress(ProcessLookupError):
            while child.returncode is None:
                os.kill(child.pid, signal.SIGSTOP)
                skipped += 20.0  # as if it had waited so long for a CPU
                time.sleep(0.1)
                os.kill(child.pid, signal.SIGCONT)
                time.sleep(0.1)

    monkeypatch.setattr(process, "_spawn", slow)
    monkeypatch.setattr(process, "_IDLE_S", math.inf)
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + skipped)
    monkeypatch.setattr(process, "time", clock)
    with caplog.at_level("INFO", logger=process.logger.name):
        files = weight_files(model)
    assert torch.equal(load_file(files[0])["a"], torch.zeros(3))
    assert skipped > 2 * process._START_CPU_S
    assert "the machine is slow or busy" in caplog.text
