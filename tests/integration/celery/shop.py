"""A Celery shop's own app, which knows only the name of a task and of a queue from Pagemill."""

from __future__ import annotations

import os
import time

from celery import Celery

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_BROKER"])
app.conf.task_default_queue = os.environ.get("SHOP_QUEUE", "pagemill")
app.conf.result_extended = True


@app.task(name="shop.make_prompt")  # type: ignore[untyped-decorator]
def make_prompt(word: str) -> str:
    return f"say {word}"


@app.task(name="shop.shout")  # type: ignore[untyped-decorator]
def shout(result: dict[str, str]) -> str:
    return result["text"].upper()


@app.task(name="shop.nap")  # type: ignore[untyped-decorator]
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@app.task(name="shop.collect")  # type: ignore[untyped-decorator]
def collect(results: list[dict[str, str]]) -> list[str]:
    return [result["text"] for result in results]
