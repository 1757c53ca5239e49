"""Images of jobs on a worker: fetched under the operator's policy, prepared, and passed to the engine."""

from __future__ import annotations

import base64
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagemill.engine.errors import InvalidImage
from pagemill.engine.images.processor import ImageProcessor
from pagemill.engine.text.input_processor import InputLimits, InputProcessor
from pagemill.engine.text.tokenizer import load_tokenizer
from pagemill.producer.wire.schema.errors import JobError
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.webhooks import delivery
from pagemill.producer.wire.webhooks.policy import WebhookPolicy
from pagemill.worker.engine_host.messages import AddRequest
from pagemill.worker.jobs import images as module
from pagemill.worker.jobs.images import ImageInputs
from pagemill.worker.jobs.intake import processed
from pagemill.worker.jobs.job_table import JobTable
from pagemill.worker.jobs.running_job import RunningJob
from tests.engine.images.model_folders import encoded, noise, write_folder
from tests.topologies import Certificates

PICTURE = encoded(noise(60, 40))
OTHER = encoded(noise(50, 40, seed=3))


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def job(*urls: str, **fields: Any) -> Job:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": "What?"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return Job.parse({"model": "m", "messages": messages, "max_tokens": 3} | fields)


class Site:
    """An https server with pictures, redirects and errors."""

    def __init__(self, certificates: Certificates) -> None:
        site = self
        self.requests: list[str] = []
        self.redirects: dict[str, str] = {}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests.append(self.path)
                place = site.redirects.get(self.path)
                status = 302 if place else int(self.path[1:4]) if self.path[1:4].isdigit() else 200
                self.send_response(status)
                if place:
                    self.send_header("location", place)
                if self.path == "/short":
                    self.send_header("content-length", str(len(PICTURE) + 1))
                self.end_headers()
                self.wfile.write(PICTURE)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = certificates.server_context().wrap_socket(self._server.socket, server_side=True)
        self.host = f"localhost:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, path: str) -> str:
        return f"https://{self.host}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def site(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca_file))
    site = Site(certificates)
    yield site
    site.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InputProcessor]:
    directory: Path = write_folder("llava", tmp_path_factory.mktemp("llava"))
    images = ImageProcessor(directory)
    yield InputProcessor(load_tokenizer(directory), InputLimits(60_000, 2000, 100_000, 8), images=images)
    images.close()


def policy(site: Site, *, is_private: bool = True) -> WebhookPolicy:
    return WebhookPolicy((site.host,), is_private, setting="fetch_images", subject="image")


def refusal(images: ImageInputs, url: str, inputs: InputProcessor) -> JobError:
    with pytest.raises(JobError) as refused:
        images.made_ready(job(url), inputs)
    assert "localhost" not in str(refused.value)
    return refused.value


@pytest.mark.slow
def test_a_fetched_image_is_the_same_as_one_in_the_job(site: Site, inputs: InputProcessor) -> None:
    site.redirects = {"/1": "/2", "/2": site.url("/3.png")}
    images = ImageInputs(policy(site))
    ready = images.made_ready(job(site.url("/1"), data_url(OTHER), site.url("/1")), inputs)
    assert site.requests == ["/1", "/2", "/3.png"]
    token_ids, _, _, _, media = processed(ready, "id", inputs)
    same = processed(job(data_url(PICTURE), data_url(OTHER), data_url(PICTURE)), "id", inputs)
    assert token_ids == same[0]
    assert [item.digest for item in media] == [item.digest for item in same[4]]
    assert media[0].digest == media[2].digest != media[1].digest
    assert [(item.offset, item.length) for item in media] == [(item.offset, item.length) for item in same[4]]


def test_images_are_fetched_only_if_the_operator_allows_it(site: Site, inputs: InputProcessor) -> None:
    off = WebhookPolicy(setting="fetch_images", subject="image")
    refused = refusal(ImageInputs(off), site.url("/1"), inputs)
    assert (refused.code, refused.retryable) == ("unsupported_feature", False)
    assert str(refused) == "images are switched off on this worker (fetch_images)"
    refused = refusal(ImageInputs(policy(site)), "https://example.com/1", inputs)
    assert str(refused) == "the image's host, or its port, is not among fetch_images"
    refused = refusal(ImageInputs(policy(site, is_private=False)), site.url("/1"), inputs)
    assert (refused.code, str(refused)) == ("invalid_image", "the image's host has a private address")
    refused = refusal(ImageInputs(policy(site)), site.url("/1").replace("https", "http"), inputs)
    assert "the image's address must be an https URL" in str(refused)
    assert site.requests == []


def test_redirects_are_held_to_the_policy_and_bounded(site: Site, inputs: InputProcessor) -> None:
    images = ImageInputs(policy(site))
    site.redirects = {"/1": "https://169.254.169.254/latest", "/2": "/2", "/3": "http://localhost/"}
    site.redirects["/4"] = "https://["
    assert "not among fetch_images" in str(refusal(images, site.url("/1"), inputs))
    assert "more than 3 redirects" in str(refusal(images, site.url("/2"), inputs))
    assert refusal(images, site.url("/3"), inputs).code == "invalid_image"
    assert str(refusal(images, site.url("/4"), inputs)).endswith("a redirect names no valid URL")
    assert site.requests == ["/1", "/2", "/2", "/2", "/2", "/3", "/4"]


def test_an_image_whose_connection_ends_early_is_fetched_again(site: Site, inputs: InputProcessor) -> None:
    cut_off = refusal(ImageInputs(policy(site)), site.url("/short"), inputs)
    assert (cut_off.code, cut_off.retryable) == ("store_unavailable", True)


@pytest.mark.slow
def test_a_server_without_the_image(
    site: Site, inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ImageInputs(policy(site))
    gone = refusal(images, site.url("/404"), inputs)
    assert (gone.code, gone.retryable) == ("invalid_image", False)
    assert str(gone) == "an image can't be fetched: the server answered 404"
    for path in ("/503", "/429"):
        busy = refusal(images, site.url(path), inputs)
        assert (busy.code, busy.retryable) == ("store_unavailable", True)
    monkeypatch.setattr(module, "MAX_IMAGE_BYTES", len(PICTURE) - 1)
    assert "has more than" in str(refusal(images, site.url("/picture"), inputs))
    monkeypatch.setattr(module, "MAX_FETCH_S", -1.0)
    assert refusal(images, site.url("/1"), inputs).retryable
    monkeypatch.undo()
    monkeypatch.setattr(delivery, "TIMEOUT_S", 0.5)
    silent = socket.create_server(("127.0.0.1", 0))
    host = f"localhost:{silent.getsockname()[1]}"
    hung = WebhookPolicy((host,), allow_private=True, setting="fetch_images", subject="image")
    assert refusal(ImageInputs(hung), f"https://{host}/1", inputs).retryable
    silent.close()


def test_a_broken_image_fails_before_the_engine_sees_the_job(inputs: InputProcessor) -> None:
    images = ImageInputs(WebhookPolicy())
    with pytest.raises(InvalidImage, match=r"image 2: .*not a picture"):
        images.made_ready(job(data_url(PICTURE), data_url(b"<html>")), inputs)


def test_a_job_s_record_does_not_keep_what_the_engine_has(inputs: InputProcessor) -> None:
    token_ids, params, _, _, media = processed(job(data_url(PICTURE)), "id", inputs)
    request = AddRequest(request_id="id#7", prompt_token_ids=token_ids, params=params, media=media)
    record = SimpleNamespace(job_id="id", token=7, request_id="id#7", request=request)
    table, sent = JobTable(), list[AddRequest]()
    table.hold("id", 7)
    assert table.start(cast(RunningJob, record), sent.append)
    assert (sent[0].media, record.request.media) == (media, ())
