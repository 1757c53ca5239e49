"""Images in messages: forms, limits, digests, and no pixels in errors."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from pagemill.producer.wire.schema import images
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.images import InvalidImage, decode_data_url, describe_image, hide_images
from pagemill.producer.wire.schema.job import Job

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(30))


def data_url(content: bytes = PNG, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any, **fields: Any) -> Job:
    return Job.parse({"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields})


def test_the_envelope_holds_the_parts() -> None:
    job = chat({"type": "text", "text": "What?"}, image(data_url()) | {"type": "image_url"})
    assert Job.from_payload(job.to_payload()) == job
    assert job.images == (data_url(),)
    assert decode_data_url(job.images[0]) == PNG


def test_parts_that_are_texts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(*parts) == Job.parse({"model": "m", "messages": [{"role": "user", "content": "ab"}]})


def test_detail_is_ignored() -> None:
    part = image(data_url())
    part["image_url"]["detail"] = "high"
    assert chat(part).to_payload() == chat(image(data_url())).to_payload()


def test_digests_are_of_the_bytes() -> None:
    text = {"type": "text", "text": "What?"}
    job = chat(text, image(data_url()))
    assert chat(text, image(data_url(kind="jpeg"))).digest() == job.digest()
    others = [
        chat(text, image(data_url(PNG + b"."))),
        chat(image(data_url()), text),
        chat(text, image(data_url()), image(data_url())),
        chat(text),
        chat({"type": "text", "text": job.messages[0].work().decode() if job.messages else ""}),
        chat(text, {"type": "text", "text": ""}, image(data_url())),
    ]
    assert len({job.digest(), *(other.digest() for other in others)}) == 1 + len(others)


def test_questions_about_one_image_run_together() -> None:
    first, second = (chat(image(data_url()), {"type": "text", "text": text}) for text in ("a", "b"))
    assert first.affinity() == second.affinity() is not None
    assert chat(image(data_url(b"x"))).affinity() != first.affinity()


@pytest.mark.parametrize(
    ("parts", "place", "match"),
    [
        ([image("photo.png")], ".0.image_url.url", "must start with data:image"),
        ([image("data:text/plain;base64,AAAA")], ".0.image_url.url", "must start with data:image"),
        ([image("data:image/png;base64,A*AA")], ".0.image_url.url", "not valid base64"),
        ([image("data:image/png;base64,é")], ".0.image_url.url", "not valid base64"),
        ([image("data:image/png;base64,")], ".0.image_url.url", "is empty"),
        ([image("https:///x.png")], ".0.image_url.url", "not a valid URL"),
        ([image("https://h/" + "x" * 8192)], ".0.image_url.url", "8202 characters, the limit is 8192"),
        ([image(data_url()), {"type": "poem"}], ".1", "must be text or image_url"),
        ([{"type": "image_url"}], ".0.image_url", "Field required"),
        ([], "", "at least 1 item"),
    ],
)
def test_an_error_names_the_part(parts: list[Any], place: str, match: str) -> None:
    with pytest.raises(InvalidJob, match=match) as refused:
        chat(*parts)
    assert refused.value.param == f"messages.0.content{place}"
    assert str(refused.value).count("; ") == 0


def test_too_large_and_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(PNG) - 1)
    for content in (PNG, PNG * 9):
        with pytest.raises(InvalidImage, match=r"bytes, the limit is 37") as refused:
            decode_data_url(data_url(content))
        assert refused.value.code == "invalid_image"
    monkeypatch.undo()
    with pytest.raises(InvalidJob, match="65 images, the limit is 64"):
        chat(*[image(data_url())] * 65)


def test_only_users_send_images() -> None:
    with pytest.raises(InvalidJob, match="images belong to a user's message") as refused:
        Job.parse({"model": "m", "messages": [{"role": "system", "content": [image(data_url())]}]})
    assert refused.value.code == "unsupported_feature"


def test_descriptions_hide_pixels() -> None:
    assert describe_image(data_url()) == "[image/png, 38 bytes]"
    assert describe_image("https://host/a.png?key=secret") == "[image https://host/a.png]"
    shown = hide_images(f'{{"url":"{data_url(bytes(12_345), "jpeg")}"}} and {data_url()}')
    assert shown == '{"url":"[image/jpeg, 12,345 bytes]"} and [image/png, 38 bytes]'
