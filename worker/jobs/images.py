"""Images of jobs: fetched from their addresses, if the operator allows it, and passed to the engine as bytes."""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from pagemill.engine.pooling.input_processor import PoolingInputProcessor
from pagemill.engine.text.input_processor import InputProcessor
from pagemill.producer.wire.schema.errors import JobError
from pagemill.producer.wire.schema.images import (
    MAX_IMAGE_BYTES,
    ImagePart,
    ImageUrl,
    TextPart,
    decode_data_url,
    is_fetched,
)
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.text.chat import Message
from pagemill.producer.wire.webhooks.delivery import FetchFailed, fetch
from pagemill.producer.wire.webhooks.policy import Refused, Unresolved, WebhookPolicy

MAX_FETCH_S = 60.0
"""Maximum seconds to fetch all images of one job."""


class ImageInputs:
    """Prepares the images of jobs for the engine. For any thread."""

    def __init__(self, policy: WebhookPolicy) -> None:
        """`policy`: the hosts whose images are fetched."""
        self._policy = policy
        self._tls = ssl.create_default_context() if policy.is_on else None

    def made_ready(self, job: Job, processor: InputProcessor | PoolingInputProcessor) -> Job:
        """Return a job with its images fetched; the processor's cache then holds their prepared form.

        Raises:
            JobError: an image is not fetched: `retryable` if its server does not answer.
            pagemill.engine.errors.InvalidRequest: an image can't be used.
        """
        if not isinstance(processor, InputProcessor):
            return job  # which rejects chats
        if any(map(is_fetched, job.images)):
            job = self._fetched(job)
        processor.read_images(engine_messages(job))
        return job

    def _fetched(self, job: Job) -> Job:
        give_up_at = time.monotonic() + MAX_FETCH_S
        known: dict[str, str] = {}

        def data_url(url: str) -> str:
            if url not in known:
                if time.monotonic() > give_up_at:
                    raise _unavailable(f"fetching the job's images takes more than {MAX_FETCH_S:g} s")
                known[url] = self._fetch(url)
            return known[url]

        assert job.messages is not None
        return job.model_copy(
            update={"messages": tuple(_replaced(message, data_url) for message in job.messages)}
        )

    def _fetch(self, url: str) -> str:
        """Return an image as a `data:` URL. Raises JobError, whose message does not contain the address."""
        try:
            if self._tls is None:
                self._policy.check(url)
            assert self._tls is not None, "a policy without hosts refuses every URL"
            body = fetch(self._policy, url, MAX_IMAGE_BYTES, self._tls)
        except Refused as error:
            raise JobError(
                str(error), "unsupported_feature" if not self._policy.is_on else "invalid_image"
            ) from None
        except Unresolved as error:
            raise _unavailable(str(error)) from None
        except FetchFailed as error:
            if error.is_final:
                raise JobError(f"an image can't be fetched: {error}", "invalid_image") from None
            raise _unavailable(f"an image can't be fetched: {error}") from None
        return f"data:image/unknown;base64,{base64.b64encode(body).decode()}"


def engine_messages(job: Job) -> list[dict[str, Any]]:
    """Return a job's messages in the engine's form, with the bytes of images. Raises InvalidParameter."""
    return [
        message.model_dump(mode="json", exclude_none=True, exclude={"content"})
        | ({} if message.content is None else {"content": _engine_content(message.content)})
        for message in job.messages or ()
    ]


def _engine_content(content: str | Sequence[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image", "image": decode_data_url(part.image_url.url)}
        for part in content
    ]


def _replaced(message: Message, data_url: Callable[[str], str]) -> Message:
    if message.content is None or isinstance(message.content, str):
        return message
    content = tuple(
        ImagePart.model_construct(
            type="image_url", image_url=ImageUrl.model_construct(url=data_url(part.image_url.url))
        )
        if isinstance(part, ImagePart) and is_fetched(part.image_url.url)
        else part
        for part in message.content
    )
    return message.model_copy(update={"content": content})


def _unavailable(message: str) -> JobError:
    return JobError(message, "store_unavailable", retryable=True)
