"""Sends the prompts on standard input to the gateway, through autobatcher; prints the answers as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from autobatcher import BatchOpenAI


async def main() -> None:
    client = BatchOpenAI(
        base_url=os.environ["GATEWAY_URL"],
        api_key="none",
        max_retries=20,
        batch_window_seconds=0.1,
        poll_interval_seconds=0.5,
        completion_window=os.environ.get("COMPLETION_WINDOW"),
    )

    async def ask(prompt: str) -> str:
        answer = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": prompt}], max_tokens=len(prompt)
        )
        return str(answer.choices[0].message.content)

    answers = await asyncio.gather(*map(ask, json.load(sys.stdin)))
    await client.close()
    sys.stdout.write(json.dumps(answers))


asyncio.run(main())
