"""Which files belong to a store, and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill import InvalidAddress, Producer, StoreError
from pagemill.producer.wire.store.store import MAX_STORED_BYTES, Store, reference_to
from pagemill.producer.wire.store.stub import (
    Reference,
    payload_stub,
    read_payload_stub,
    read_result_stub,
    result_stub,
)


@pytest.mark.parametrize(
    "url",
    [
        "", "/mnt/jobs", "bucket", "s3://", "file://", "s3://key:hidden@bucket/jobs", "s3://hidden@bucket",
        "s3://bucket/a?token=hidden", "s3://bucket/#hidden", "simplecache::s3://hidden", "file:///mnt/../hidden",
        "http://[hidden/",
    ],
)  # fmt: skip
def test_what_is_no_store_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(InvalidAddress) as refused:
        Store(url)
    assert "hidden" not in str(refused.value)
    if url:
        with pytest.raises(InvalidAddress):
            Producer("redis://127.0.0.1:1", store=url)


@pytest.mark.parametrize(
    "name",
    [
        "../secret", "a/../../secret", "./a", "a/./b", "", "/etc/passwd", "a//b", ".hidden", "a/.hidden", "a\\b",
        "a%2e%2e/b", "a b", "a\n", "a/", "x" * 5 + "/" + "é", "/".join("a" * 9), "a?b", "a#b", "a::b",
    ],
)  # fmt: skip
def test_what_lies_elsewhere_is_not_opened(tmp_path: Path, name: str) -> None:
    store = Store(f"file://{tmp_path}")
    (tmp_path.parent / "secret").write_bytes(b"x")
    uri = f"{store.url}/{name}"
    assert not store.owns(uri)
    for operation in (
        lambda: store.read(reference_to(uri, b"x")), lambda: store.write(uri, b"y"), lambda: store.delete(uri),
    ):  # fmt: skip
        with pytest.raises(StoreError, match="outside"):
            operation()
    assert (tmp_path.parent / "secret").read_bytes() == b"x"


def test_a_link_out_of_the_store_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "store" / "real").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "store" / "out").symlink_to(tmp_path)
    (tmp_path / "store" / "file").symlink_to(tmp_path / "secret")
    store = Store(f"file://{tmp_path}/store")
    for name in ("out/secret", "file"):
        uri = f"{store.url}/{name}"
        for operation in (
            lambda uri=uri: store.read(reference_to(uri, b"x")),
            lambda uri=uri: store.write(uri, b"y"),
            lambda uri=uri: store.delete(uri),
        ):
            with pytest.raises(StoreError, match="symbolic link") as refused:
                operation()
            assert not refused.value.retryable
    with pytest.raises(StoreError, match="symbolic link"):
        store.write(f"{store.url}/out/new/file", b"y")
    assert (tmp_path / "secret").read_bytes() == b"x"
    assert not (tmp_path / "new").exists()


def test_links_within_the_store_and_to_it_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "disk" / "alias").symlink_to(tmp_path / "disk" / "real")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    store = Store(f"file://{tmp_path}/link")
    uri = f"{store.url}/alias/a"
    store.write(uri, b"x")
    assert store.read(reference_to(uri, b"x")) == b"x"
    assert (tmp_path / "disk" / "real" / "a").read_bytes() == b"x"


def test_another_place_with_the_same_beginning_is_another(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/jobs/")
    assert store.url.endswith("/jobs")
    assert not store.owns(f"file://{tmp_path}/jobs-of-others/a")
    assert not store.owns("s3://bucket/a")
    assert store.owns(store.new_uri(".", "in", "..."))
    assert store.owns(store.new_uri("q" * 64, "out", "x" * 64))


def test_names_are_used_once(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    assert len({store.new_uri("q", "in", "a") for _ in range(100)}) == 100


def test_too_much_is_never_read(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    reference = Reference(uri=store.new_uri("q", "in", "a"), sha256="0" * 64, size=MAX_STORED_BYTES + 1)
    with pytest.raises(StoreError, match="the limit is"):
        store.read(reference)


def test_a_missing_folder_is_a_missing_file(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/nowhere")
    with pytest.raises(StoreError, match="missing") as failed:
        store.read(reference_to(store.new_uri("q", "in", "a"), b"x"))
    assert not failed.value.retryable
    store.delete(store.new_uri("q", "in", "a"))


def test_a_store_that_can_not_be_written_is_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = Store(f"file://{tmp_path}/file")
    with pytest.raises(StoreError) as failed:
        store.write(store.new_uri("q", "in", "a"), b"x")
    assert failed.value.retryable
    assert str(tmp_path) not in str(failed.value)


def test_the_environment_names_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Store.from_environment() is None
    monkeypatch.setenv("PAGEMILL_STORE_URL", "s3://bucket/jobs")
    monkeypatch.setenv("PAGEMILL_STORE_OVER_BYTES", "10")
    store = Store.from_environment()
    assert store is not None
    assert (store.url, store.takes(10), store.takes(11)) == ("s3://bucket/jobs", False, True)
    monkeypatch.setenv("PAGEMILL_STORE_OVER_BYTES", "many")
    with pytest.raises(InvalidAddress, match="number of bytes"):
        Store.from_environment()


def test_stubs_are_told_from_what_they_stand_for() -> None:
    reference = reference_to("s3://bucket/a", b"x", "tenant")
    assert read_payload_stub(payload_stub(reference)) == reference
    assert read_result_stub(result_stub(reference)) == reference
    for other in (
        b"",
        b"{}",
        b'{"outputs":[]}',
        payload_stub(reference)[:-9],
        result_stub(reference) + b" " * 5000,
    ):
        assert read_result_stub(other) is None
        assert read_payload_stub(other) is None
