"""Inputs and outputs behind URIs: S3 on a local server, HTTP, the state after a crash, and hidden secrets."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError, DiskError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.places import RemotePlace, local_path, redacted, uri_of
from tests.producer.dataset.killing import killed_until_done
from tests.producer.dataset.s3_server import SECRET, Bucket, running_s3
from tests.producer.dataset.test_run import counting_worker
from tests.producer.scripted_worker import scripted_worker

TEXTS = ["a", 'ü,"x"', "line\nbreak"]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
RUN = """
import os, signal, sys
from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
url, queue, source, out, deadly = sys.argv[1:]
if deadly:
    import s3fs
    put_file = s3fs.S3FileSystem.put_file
    def put(fs, here, there, **options):
        if there.endswith(deadly):
            os.kill(os.getpid(), signal.SIGKILL)
        return put_file(fs, here, there, **options)
    s3fs.S3FileSystem.put_file = put
with Producer(url, queue=queue) as producer:
    Pipeline("{{ text }}", model="m", chat=False).run(source, out=out, producer=producer, window=200)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_s3() as url:
        yield url


@pytest.fixture
def bucket(server: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(server, queue_name)
    for name, value in (bucket.settings | {"PAGEMILL_STATE_DIR": str(tmp_path / "state")}).items():
        monkeypatch.setenv(name, value)
    return bucket


def left(tmp_path: Path) -> set[str]:
    """The files that runs have left on this machine."""
    return {path.name for path in (tmp_path / "state").rglob("*") if path.is_file()}


def simple(template: str = "{{ text }}") -> Pipeline:
    return Pipeline(template, model="m", chat=False)


def packed(name: str, tmp_path: Path) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(JSONL)
    if name.endswith(".zst"):
        return bytes(pyarrow.Codec("zstd").compress(JSONL, asbytes=True))
    if name.endswith(".csv"):
        return 'text\na\n"ü,""x"""\n"line\nbreak"\n'.encode()
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "in.parquet")
        return (tmp_path / "in.parquet").read_bytes()
    return JSONL


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("in.jsonl", "out.jsonl"), ("a b/in.jsonl.gz", "deep/down/out.jsonl.gz"),
        ("in.jsonl.zst", "out.csv.zst"), ("in.csv", "out.parquet"), ("in.parquet", "out.csv"),
    ],
)  # fmt: skip
def test_from_an_object_to_an_object_and_again(
    name: str, out: str, bucket: Bucket, producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    source = bucket.put(name, packed(name, tmp_path))
    with counting_worker(valkey_url, queue_name) as ran:
        first = simple().run(source, out=bucket(out), producer=producer)
        written = bucket.get(out)
        again = simple().run(source, out=bucket(out), producer=producer)
    assert (first.succeeded, again.adopted) == (3, 3)
    assert set(ran.values()) == {1}
    assert bucket.get(out) == written
    assert bucket.names() == {name, out, f"{out}.run.json"}
    assert left(tmp_path) == set()
    assert not list((tmp_path / "state" / "runs").iterdir())
    with pytest.raises(DatasetError, match=rf"{bucket(out)} is of a run with other settings .*template"):
        simple("{{ text }}!").run(source, out=bucket(out), producer=producer)
    assert left(tmp_path) == set()


def test_errors_are_an_object_that_goes_when_they_do(
    bucket: Bucket, producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    bucket.put("in.jsonl", b'{"text": "a"}\n{"text": "die young"}\n')
    with scripted_worker(valkey_url, queue_name):
        simple().run(bucket("in.jsonl"), out=bucket("out.jsonl"), producer=producer)
        assert json.loads(bucket.get("out.jsonl.errors.jsonl"))["row"] == 2
        bucket.put("in.jsonl", b'{"text": "a"}\n')
        simple().run(bucket("in.jsonl"), out=bucket("out.jsonl"), producer=producer)
    assert bucket.names() == {"in.jsonl", "out.jsonl", "out.jsonl.run.json"}


@pytest.mark.slow
def test_killed_in_the_copies_at_the_end(
    bucket: Bucket, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    source = bucket.put("in.jsonl", JSONL)
    command = [sys.executable, "-c", RUN, valkey_url, queue_name, source, bucket("out.jsonl")]
    with counting_worker(valkey_url, queue_name) as ran:
        for deadly, is_there in (("out.jsonl", False), ("out.jsonl.run.json", True)):
            done = subprocess.run([*command, deadly], stderr=subprocess.PIPE, check=False)
            assert done.returncode == -signal.SIGKILL, done.stderr.decode()
            assert bucket.names() == {"in.jsonl", "out.jsonl.partial", *(["out.jsonl"] if is_there else [])}
            assert "out.jsonl.partial" in left(tmp_path)
        assert subprocess.run([*command, ""], check=False).returncode == 0
    assert set(ran.values()) == {1}, "something was paid for twice"
    assert [json.loads(line)["output"] for line in bucket.get("out.jsonl").splitlines()] == TEXTS
    assert bucket.names() == {"in.jsonl", "out.jsonl", "out.jsonl.run.json"}
    assert left(tmp_path) == set()


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_object(
    bucket: Bucket, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    """Until the end, the object is unchanged, and a second object names the location of the journal."""
    texts = [f"row {i % 350}" for i in range(400)]
    source = bucket.put("in.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    bucket.put("out.jsonl", b"")  # an output without rows cannot lose any
    command = [sys.executable, "-c", RUN, valkey_url, queue_name, source, bucket("out.jsonl"), ""]

    def check_beside(returncode: int) -> None:
        if returncode and "out.jsonl.partial" in bucket.names():
            assert bucket.get("out.jsonl") == b""
            assert json.loads(bucket.get("out.jsonl.partial"))["host"] == socket.gethostname()
            assert "out.jsonl.partial" in left(tmp_path)

    with counting_worker(valkey_url, queue_name, 0.001) as ran:
        kills = killed_until_done(
            command, lambda: "out.jsonl.run.json" in bucket.names(), lambda: sum(ran.values()),
            chance=random.Random(7), steps=range(1, 150), max_kills=6, last=349, after=check_beside,
        )  # fmt: skip
    assert kills >= 3
    assert set(ran.values()) == {1}, "something was paid for twice"
    assert [json.loads(line)["output"] for line in bucket.get("out.jsonl").splitlines()] == texts
    assert left(tmp_path) == set()


def test_a_copy_that_fails_loses_nothing(
    bucket: Bucket, producer: Producer, valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    async def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(13, f"Access Denied for key {SECRET} at https://host/?X-Amz-Signature={SECRET}")

    source = bucket.put("in.jsonl", JSONL)
    with counting_worker(valkey_url, queue_name) as ran:
        with monkeypatch.context() as patch:
            patch.setattr(s3fs.S3FileSystem, "_put_file", refuse)
            s3fs.S3FileSystem.clear_instance_cache()  # instances keep the method
            with pytest.raises(
                DiskError, match=r"could not be written .* nothing that was done is lost"
            ) as failed:
                simple().run(source, out=bucket("out.jsonl"), producer=producer)
        s3fs.S3FileSystem.clear_instance_cache()
        assert SECRET not in str(failed.value)
        assert bucket.names() == {"in.jsonl", "out.jsonl.partial"}
        assert simple().run(source, out=bucket("out.jsonl"), producer=producer).succeeded == 3
    assert set(ran.values()) == {1}


def test_another_machine_is_told_where_the_run_is(
    bucket: Bucket,
    producer: Producer,
    valkey_url: str,
    queue_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = bucket.put("in.jsonl", b'{"text": "a"}\n{"text": "fail"}\n')
    with scripted_worker(valkey_url, queue_name):
        simple().run(source, out=bucket("out.jsonl"), producer=producer)
        finished = bucket.get("out.jsonl")
        with pytest.raises(Exception, match="more than --max-errors"):
            simple().run(source, out=bucket("out.jsonl"), producer=producer, max_errors=0)
        assert "out.jsonl.partial" in bucket.names()
        monkeypatch.setenv("PAGEMILL_STATE_DIR", str(tmp_path / "elsewhere"))
        with pytest.raises(
            DatasetError, match=rf"on {socket.gethostname()}, whose journal is {tmp_path}/state/.*"
        ):
            simple().run(source, out=bucket("out.jsonl"), producer=producer)
        assert not [path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file()]
        assert bucket.get("out.jsonl") == finished
        bucket.client.delete_object(Bucket=bucket.name, Key="out.jsonl.partial")
        shutil.rmtree(tmp_path / "state")
        assert simple().run(source, out=bucket("out.jsonl"), producer=producer).adopted == 1


MISSING = [
    ("fsspec", "s3://b/in.jsonl", "s3:// needs fsspec: pip install 'pagemill[s3]'"),
    ("fsspec", "gs://b/in.jsonl", "gs:// needs fsspec: pip install fsspec"),
    ("s3fs", "s3://b/in.jsonl", "s3:// needs a library that is not installed: pip install 'pagemill[s3]'"),
    ("gcsfs", "gs://b/in.jsonl", "gs:// needs a library that is not installed: Please install gcsfs"),
    ("none", "nonsense://b/in.jsonl", "nonsense://b/in.jsonl: nonsense is not a protocol that fsspec knows"),
]
WITHOUT = """
import json, sys
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline
for blocked, uri, _ in json.loads(sys.argv[1]):
    sys.modules[blocked] = None
    for source, out in ((uri, "out.jsonl"), ("in.jsonl", uri)):
        try:
            Pipeline("x", model="m").run(source, out=out, producer=object())
        except DatasetError as error:
            print(error)
    del sys.modules[blocked]
"""


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(JSONL)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(MISSING)], capture_output=True, text=True, cwd=tmp_path, check=False,
        env=os.environ | {"PAGEMILL_STATE_DIR": str(tmp_path / "state")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = iter(done.stdout.splitlines())
    assert [(next(said)[: len(says)], next(said)[: len(says)]) for _, _, says in MISSING] == [
        (says, says) for _, _, says in MISSING
    ]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("s3://{bucket}/nothing.jsonl", "no such file"),
        ("s3://no-such-bucket/in.jsonl", "no such file"),
        (f"ftp://me:{SECRET}@127.0.0.1:1/in.jsonl", r"ftp://\*\*\*@127.0.0.1:1/in.jsonl cannot be reached"),
        (f"http://127.0.0.1:1/in.jsonl?sig={SECRET}", r"http://127.0.0.1:1/in.jsonl\?\*\*\*: no such file"),
    ],
)
def test_an_input_that_is_not_there(
    source: str, says: str, bucket: Bucket, producer: Producer, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=says) as refused:
        simple().run(source.format(bucket=bucket.name), out=tmp_path / "out.jsonl", producer=producer)
    assert SECRET not in str(refused.value)


def test_an_output_that_cannot_be_written_is_told_before_anything_runs(
    bucket: Bucket, producer: Producer, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(JSONL)
    for out, says in [
        ("s3://no-such-bucket/out.jsonl", "cannot be written .*not there"),
        (bucket("out.xyz"), f"{bucket('out.xyz')}: the output's name must end with"),
        (bucket("out.jsonl?x=1"), "has no query"),
    ]:
        with pytest.raises(DatasetError, match=says):
            simple().run(tmp_path / "in.jsonl", out=out, producer=producer)
    assert left(tmp_path) == set()
    assert bucket.names() == set()


def test_without_room_for_a_journal_it_says_so(
    bucket: Bucket, producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEMILL_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(DatasetError, match=r"cannot be made .* PAGEMILL_STATE_DIR"):
        simple().run(bucket.put("in.jsonl", JSONL), out=bucket("out.jsonl"), producer=producer)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Send no response."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_another_protocol_and_its_secrets(
    producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(JSONL))
    with serving(tmp_path) as address, scripted_worker(valkey_url, queue_name):
        summary = simple().run(
            f"{address}/in.jsonl.gz?sig={SECRET}", out=tmp_path / "out.jsonl", producer=producer
        )
    assert summary.succeeded == 3
    assert SECRET not in (tmp_path / "out.jsonl.run.json").read_text()


def test_uris_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert uri_of("s3://b/k.jsonl") == uri_of(Path("s3://b/k.jsonl")) == "s3://b/k.jsonl"
    for path in ("in.jsonl", "/a/b", "a:b", "C:/rows.jsonl", "-", "dir/s3://x", Path("x:y/z")):
        assert uri_of(path) is None
    assert uri_of("file:///a/b") is None
    for given in ("file:///a/b%20c", Path("file:///a/b%20c"), "file:/a/b c"):
        assert local_path(given) == Path("/a/b c")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    (tmp_path / "s3:" / "k.jsonl").touch()
    assert uri_of(Path("s3:/k.jsonl")) is None
    assert redacted("s3://b/k?versionId=x") == "s3://b/k?***"
    assert redacted(f"sftp://me:{SECRET}@host:22/k") == "sftp://***@host:22/k"
    first, second = (RemotePlace(f"ftp://me:{word}@host/out.jsonl").path for word in ("old", "new"))
    assert first == second, "a new password finds the old journal"
