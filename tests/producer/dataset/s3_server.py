"""A local S3: moto's server, which keeps objects in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

SECRET = "wJalrXUtnFEMI"
"""The secret key of every bucket here."""


class Bucket:
    """A bucket of a local S3."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.settings = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
        """Environment variables of its clients."""
        self.client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="AKIAIOSFODNN7",
            aws_secret_access_key=SECRET,
        )
        self.client.create_bucket(Bucket=name)

    def __call__(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def put(self, key: str, data: bytes) -> str:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)
        return self(key)

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def names(self) -> set[str]:
        return {item["Key"] for item in self.client.list_objects_v2(Bucket=self.name).get("Contents", ())}


@contextmanager
def running_s3() -> Iterator[str]:
    """The address of a server for the duration of the block."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    S3FileSystem.clear_instance_cache()  # these have another server's address
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()
