"""A web service in front of the queue: `uvicorn examples.fastapi_service:app`.

The service holds no model and no state: any of its processes can answer for a job that another one submitted.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from pagemill import (
    AsyncJobHandle,
    AsyncProducer,
    InvalidJob,
    JobError,
    JobNotFound,
    QueueFull,
    ResultTimeout,
)

MODEL = os.environ.get("PAGEMILL_MODEL", "smollm2")
queue: AsyncProducer


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    global queue
    async with AsyncProducer() as queue:  # one per process: it shares a connection among all requests
        yield


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    text: str
    max_tokens: int = 64


@app.post("/questions", status_code=202)
async def ask(question: Question) -> dict[str, str]:
    """Enqueue, and answer at once with the id to ask for."""
    return {"id": await _submit(question)}


@app.get("/questions/{job_id}")
async def answer(job_id: str, wait: float = 0.0) -> dict[str, Any]:
    """The answer, if it is there within `wait` seconds; the job goes on if it is not."""
    try:
        result = await queue.job(job_id).result(timeout=min(wait, 30.0))
    except JobNotFound as error:
        raise HTTPException(404, str(error)) from error
    except ResultTimeout:
        status = await queue.job(job_id).status()
        return {"state": status.state, "generated_tokens": status.progress.generated_tokens}
    except JobError as error:
        raise HTTPException(502, {"code": error.code, "message": error.message}) from error
    return {"state": "succeeded", "text": result.text}


@app.post("/stream")
async def stream(question: Question) -> StreamingResponse:
    """Server-sent events: `token` appends text, `snapshot` replaces it, `end` has the state that the job ended in.

    Only the state `succeeded` means that the answer is complete. For the others, `error` has the code and the message.
    """
    handle = queue.job(await _submit(question, stream=True))

    async def events() -> AsyncIterator[str]:
        async for event in handle.stream():
            message: dict[str, Any] = {"type": event.type, "text": event.text}
            if event.type == "end":
                message["state"] = event.state
                if event.state != "succeeded":
                    message["error"] = await _error_of(handle)
            yield f"data: {json.dumps(message)}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def _error_of(handle: AsyncJobHandle) -> dict[str, str]:
    """Return why a job that has ended did not succeed."""
    try:
        await handle.result()
    except JobError as error:  # failed, dead, expired or cancelled
        return {"code": error.code, "message": error.message}
    raise AssertionError("the job has succeeded")


async def _submit(question: Question, **fields: Any) -> str:
    try:
        handle = await queue.submit(
            prompt=question.text, max_tokens=question.max_tokens, model=MODEL, ttl=60.0, **fields
        )
    except QueueFull as error:
        raise HTTPException(429, str(error)) from error
    except InvalidJob as error:
        raise HTTPException(422, str(error)) from error
    return handle.id
