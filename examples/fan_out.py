"""Ten thousand jobs from asyncio, with bounded memory: `python -m examples.fan_out [JOBS]`.

`submit_many` reads its input as it goes and waits when the queue is full; `results` yields each end as it happens.
What has been dealt with is acknowledged, so that neither side keeps it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

from pagemill import AsyncProducer

MODEL = os.environ.get("PAGEMILL_MODEL", "smollm2")
ACK_EVERY = 500


def jobs(count: int) -> Iterator[dict[str, Any]]:
    """A generator: no list of all jobs is ever made."""
    for number in range(count):
        yield {"prompt": f"{number} is", "model": MODEL, "max_tokens": 8, "key": str(number)}


async def main(count: int) -> int:
    async with AsyncProducer() as queue:
        batch = await queue.submit_many(jobs(count))
        done = 0
        async for item in batch.results():
            if item.error is not None:
                print(f"{item.key}: {item.error.code}", file=sys.stderr)
            done += 1
            if done % ACK_EVERY == 0:
                await batch.ack(item.cursor)
        print(f"{done} jobs ended")
        return done


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
