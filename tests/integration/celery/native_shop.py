"""An app whose generation task goes straight to the native queue."""

from __future__ import annotations

import os

from celery import Celery

from pagemill.producer.celery import generation_task

app = Celery("native-shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_BROKER"])
app.conf.task_default_queue = "native-shop"
generate = generation_task(app, model="echo", url=os.environ["SHOP_BROKER"], queue="native")


@app.task(name="native.shout")  # type: ignore[untyped-decorator]
def shout(result: dict[str, str]) -> str:
    return result["text"].upper()


@app.task(name="native.collect")  # type: ignore[untyped-decorator]
def collect(results: list[dict[str, str]]) -> list[str]:
    return [result["text"] for result in results]


app.conf.task_routes = {"native.*": {"queue": "native-shop"}}
