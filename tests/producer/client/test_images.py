"""`images=` of the clients: accepted values, their encoding, and the element that an error names."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pagemill import AsyncProducer, InvalidJob, Producer
from pagemill.producer.client.images import parse_job, with_images
from pagemill.producer.client.preparer import Preparer
from pagemill.producer.wire.schema import images
from pagemill.producer.wire.schema.images import decode_data_url
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.signing import Keys
from tests.conftest import ROOT


def picture(size: tuple[int, int] = (3, 2), form: str = "PNG", mode: str = "RGB") -> bytes:
    content = BytesIO()
    Image.new(mode, size).save(content, form)
    return content.getvalue()


def parts_of(given: Any, **fields: Any) -> list[dict[str, Any]]:
    fields = fields or {"prompt": "What?"}
    content = with_images({**fields, "images": given})["messages"][-1]["content"]
    assert isinstance(content, list)
    return content


def test_kinds_of_images(tmp_path: Path) -> None:
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        (tmp_path / "p").write_bytes(picture(form=form))
        *parts, text = parts_of([picture(form=form), tmp_path / "p"])
        assert text == {"type": "text", "text": "What?"}
        assert parts[0] == parts[1]
        url = parts[0]["image_url"]["url"]
        assert url.startswith(f"data:image/{form.lower()};base64,")
        assert decode_data_url(url) == picture(form=form)
        for kept in (url, "https://host/a.png"):
            assert parts_of(kept)[0]["image_url"]["url"] == kept
    for mode in ("RGB", "CMYK", "L", "RGBA", "F"):
        sent = decode_data_url(parts_of(Image.new(mode, (3, 2)))[0]["image_url"]["url"])
        assert Image.open(BytesIO(sent)).size == (3, 2)


def test_a_prompt_becomes_a_chat_and_messages_keep_their_turns() -> None:
    job = parse_job({"model": "m", "prompt": "What?", "images": [picture()], "max_tokens": 5})
    assert job.prompt is None
    assert [turn.text for turn in job.messages or ()] == ["What?"]
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user", "assistant")]
    job = parse_job({"model": "m", "messages": turns, "images": picture()})
    assert [len(turn.images) for turn in job.messages or ()] == [0, 0, 0, 1, 0]
    assert parse_job({"model": "m", "prompt": "a", "images": []}) == Job(model="m", prompt="a")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([picture(), b"text"], r"images\[1\]: the content is not a picture in PNG, JPEG, WebP, GIF or BMP"),
        ([picture(), "photo.png"], r"images\[1\]: a text must be a data: or http\(s\) URL"),
        ([Path("/none/photo.png")], r"images\[0\]: cannot read photo.png: No such file or directory"),
        ([picture(), picture(), 3], r"images\[2\]: an image is bytes, a path, a PIL.Image or a URL, not int"),
        ([picture()] * 65, "images: 65 are given, the limit is 64"),
    ],
)
def test_an_error_names_the_element(given: Any, match: str) -> None:
    with pytest.raises(InvalidJob, match=match) as refused:
        parts_of(given)
    assert (refused.value.code, refused.value.param) == ("invalid_image", "images")


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "huge.png").open("wb") as file:
        file.write(picture())
        file.truncate(1 << 40)
    with pytest.raises(InvalidJob, match=f"more than the limit of {images.MAX_IMAGE_BYTES} bytes"):
        parts_of(tmp_path / "huge.png")
    with pytest.raises(InvalidJob, match="go with a prompt or with messages"):
        parts_of(picture(), prompt_token_ids=[1])
    with pytest.raises(InvalidJob, match="go with a user's message"):
        parts_of(picture(), messages=[{"role": "system", "content": "a"}])


def test_rows_with_images_have_ids_of_their_bytes() -> None:
    preparer = Preparer("q", "default", Keys([]))
    rows = [
        {"prompt": "What?", "model": "m", "images": [content]} for content in (picture(), picture((4, 4)))
    ]
    made = list(preparer.items([*rows, *rows, rows[0]], "b", on_invalid="raise", by_content=True))
    keys = [json.loads(item.header)["key"] for item in made]
    assert keys[0].removesuffix("-1") == keys[2].removesuffix("-2") == keys[4].removesuffix("-3")
    assert len({key.rpartition("-")[0] for key in keys}) == 2
    assert [len(Job.from_payload(item.payload).images) for item in made] == [1] * 5


async def test_the_clients_submit_them(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(picture())
    fields: dict[str, Any] = {"prompt": "What?", "model": "m", "temperature": 0.0, "dedupe": True}
    with Producer(valkey_url, queue=queue_name) as producer:
        producer.submit(images=[picture()], **fields)
        producer.submit(fields, images=tmp_path / "p.png")
        producer.submit(images=picture((4, 4)), **fields)
        batch = producer.submit_many([{**fields, "images": [b"bad"]}])
        (item,) = batch.results()
    assert item.error is not None
    assert (item.error.code, item.error.message[:9]) == ("invalid_image", "images[0]")
    async with AsyncProducer(valkey_url, queue=queue_name) as producer_:
        handle = await producer_.submit(images=[picture()], **fields)
        assert (await handle.status()).state == "queued"
        with pytest.raises(InvalidJob, match=r"images\[0\]"):
            await producer_.submit(images=["photo.png"], **fields)


def test_the_client_does_not_import_pillow() -> None:
    code = (
        "import sys; from pagemill.producer.client.images import parse_job; "
        "parse_job({'model': 'm', 'prompt': 'a', 'images': [bytes.fromhex('89504e470d0a1a0a')]}); "
        "assert 'PIL' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
