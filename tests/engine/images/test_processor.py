"""Malicious pictures: a typed error within limits, and the next picture is processed."""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pagemill.engine.child_process import environment
from pagemill.engine.errors import InvalidImage, UnsupportedFeature
from pagemill.engine.images import processor as module
from pagemill.engine.images.child import decoded
from pagemill.engine.images.processor import ImageProcessor
from pagemill.engine.text.pictures import Picture
from tests.conftest import run_python
from tests.engine.images.model_folders import encoded, noise, write_folder

GOOD = encoded(noise(40, 40))
MANY = 1 << 26


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def images(directory: Path) -> Iterator[ImageProcessor]:
    images = ImageProcessor(directory)
    yield images
    images.close()


def read(images: ImageProcessor, data: bytes) -> Picture:
    (picture,) = images.read([data])
    return picture


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """Return a PNG with any header, of the minimum number of bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checked)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


HOSTILE = {
    "bomb": (png(20_000, 20_000), r"20000 x 20000 pixels, the limit is 67,108,864"),
    "line": (png(2**31 - 1, 1), r"2147483647 x 1 pixels"),
    "truncated": (encoded(noise(400, 400))[:-500], "truncated|broken"),
    "no picture": (b"<html></html>", "not a picture in one of the formats PNG, JPEG, WEBP, GIF, BMP"),
    "empty": (b"", "not a picture"),
    "tiff": (encoded(noise(9, 9), "TIFF"), "not a picture in one of"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture in one of"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_is_refused(images: ImageProcessor, name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(InvalidImage, match=f"^image 1: .*({reason})") as refused:
        read(images, data)
    assert refused.value.code == "invalid_image"
    assert read(images, GOOD).num_placeholders == 4


@pytest.mark.parametrize("seed", range(20))
def test_damaged_pictures_fail_alone(images: ImageProcessor, seed: int) -> None:
    randomly = random.Random(seed)
    data = bytearray(encoded(noise(60, 60, seed), ("PNG", "JPEG", "WEBP", "GIF", "BMP")[seed % 5]))
    for _ in range(5):
        data[randomly.randrange(len(data))] = randomly.randrange(256)
    try:
        assert read(images, bytes(data)).num_placeholders == 4
    except InvalidImage as error:
        assert str(error).startswith("image 1: ")  # noqa: PT017  # either is fine
    assert read(images, GOOD).num_placeholders == 4


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (3000, 3), (3, 50)])
def test_odd_sizes_are_served(images: ImageProcessor, size: tuple[int, int]) -> None:
    assert read(images, encoded(noise(*size))).num_placeholders == 4


@pytest.mark.slow
def test_a_shape_that_the_model_refuses_fails_alone(tmp_path: Path) -> None:
    images = ImageProcessor(write_folder("qwen2_5_vl", tmp_path))
    with pytest.raises(InvalidImage, match="aspect ratio must be smaller than 200"):
        read(images, encoded(noise(2000, 2)))
    assert read(images, GOOD).num_placeholders == 1
    images.close()


@pytest.mark.slow
def test_cpu_time_and_memory_are_bounded(directory: Path) -> None:
    large = encoded(Image.new("RGB", (7000, 7000)))
    assert len(large) < 1 << 20
    for images, reason in (
        (ImageProcessor(directory, call_s=0.2), r"more than 0\.2 s of CPU time or 3072 MiB"),
        (ImageProcessor(directory, memory_mib=200), r"more than 20 s of CPU time or 200 MiB"),
    ):
        with pytest.raises(InvalidImage, match=reason):
            read(images, large)
        assert read(images, GOOD).num_placeholders == 4
        images.close()


@pytest.mark.slow
def test_the_largest_picture_fits_the_limits(images: ImageProcessor) -> None:
    image = Image.effect_noise((8192, 8192), 40).convert("RGB")
    assert image.width * image.height == MANY
    assert read(images, encoded(image, "JPEG")).num_placeholders == 4


@pytest.mark.slow
def test_a_process_that_was_killed_is_replaced(images: ImageProcessor) -> None:
    read(images, GOOD)
    process = images._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert read(images, encoded(noise(41, 40))).num_placeholders == 4


@pytest.mark.slow
def test_equal_pictures_are_decoded_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = ImageProcessor(directory, cache_bytes=60_000)
    first = read(images, GOOD)
    assert read(images, GOOD) is first
    many = [read(images, encoded(noise(50 + number, 40))) for number in range(8)]
    assert images._cache.num_bytes <= 60_000 < sum(picture.num_bytes for picture in many)
    again = read(images, GOOD)
    assert again is not first
    assert again.digest == first.digest
    monkeypatch.setattr(module, "MAX_PROMPT_BYTES", first.num_bytes)
    with pytest.raises(InvalidImage, match="image 2: the prompt's images have more than"):
        list(images.read([GOOD, GOOD]))
    images.close()


def test_a_digest_names_picture_and_processor(
    directory: Path, tmp_path: Path, images: ImageProcessor
) -> None:
    other = write_folder("llava", tmp_path)
    file = other / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"size"', '"do_normalize": false, "size"'))
    others = ImageProcessor(other)
    assert pickle.loads(pickle.dumps(images))._fingerprint == images._fingerprint != others._fingerprint
    assert len(read(images, GOOD).digest) == 32
    assert read(images, GOOD).digest != read(images, encoded(noise(40, 40, seed=9))).digest


def test_pictures_are_decoded_as_a_person_sees_them() -> None:
    image = noise(60, 40)
    upright = np.asarray(image, dtype=int)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees
    turned = encoded(image.transpose(Image.Transpose.ROTATE_90), exif=exif)
    assert np.array_equal(np.asarray(decoded(turned, MANY)), upright)
    cmyk = np.asarray(decoded(encoded(image.convert("CMYK"), "JPEG", quality=95), MANY), dtype=int)
    assert abs(cmyk - upright).mean() < 4
    animated = encoded(image, "GIF", save_all=True, append_images=[noise(60, 40, seed=1)], loop=0)
    assert abs(np.asarray(decoded(animated, MANY), dtype=int) - upright).mean() < 20
    palette = encoded(image.convert("P"), transparency=0)
    assert decoded(palette, MANY).mode == "RGB"
    grey = np.asarray(image.convert("L"), dtype=int)
    deep = encoded(Image.fromarray((grey * 257).astype(np.uint16)))
    assert Image.open(io.BytesIO(deep)).mode.startswith("I;16")
    assert abs(np.asarray(decoded(deep, MANY), dtype=int)[..., 0] - grey).max() <= 1
    assert decoded(encoded(image.convert("RGBA")), MANY).mode == "RGB"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
def test_transparent_pictures_are_on_white(mode: str, image_format: str) -> None:
    image = Image.new(mode, (8, 8))
    if mode == "P":
        image.info["transparency"] = 0
    elif image_format == "PNG":
        assert (np.asarray(decoded(encoded(image.crop((0, 0, 4, 4))), MANY)) == 255).all()
    image.paste({"RGBA": (0, 0, 0, 255), "LA": (0, 255), "P": 1}[mode], (0, 0, 4, 8))
    pixels = np.asarray(decoded(encoded(image, image_format, lossless=True), MANY))
    assert (pixels[:, 4:] == 255).all()
    assert (pixels[:, :4] == 0).all()


def test_without_pillow_the_error_names_the_extra(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UnsupportedFeature, match=r"pip install 'pagemill\[images\]'"):
        read(ImageProcessor(directory), GOOD)


@pytest.mark.slow
def test_a_model_without_a_processor_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    images = ImageProcessor(tmp_path)
    for _ in range(2):
        with pytest.raises(UnsupportedFeature, match="no processor for pictures of model type 'llama'"):
            read(images, GOOD)
    assert images._process._process is None


def test_a_text_only_worker_imports_no_decoder() -> None:
    code = "import sys, pagemill.worker.jobs.intake, pagemill.engine.engine as _; print('PIL' in sys.modules)"
    run = run_python("-c", code, env=environment())
    assert run.stdout.strip() == "False", run.stderr


def test_the_process_cannot_open_files_or_sockets(images: ImageProcessor) -> None:
    read(images, GOOD)
    process = images._process._process
    assert process is not None
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert line.split()[3:5] == ["0", "0"]
