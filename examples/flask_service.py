"""The same service for a threaded framework: `flask --app examples.flask_service run`."""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, request

from pagemill import InvalidJob, JobError, JobNotFound, Producer, QueueFull, ResultTimeout

MODEL = os.environ.get("PAGEMILL_MODEL", "smollm2")
app = Flask(__name__)
queue = Producer()  # connects when it is first used; threads and forked workers may share it


@app.post("/questions")
def ask() -> tuple[dict[str, str], int]:
    body = request.get_json()
    # With the client's key, a repeated POST finds the same job.
    key = request.headers.get("Idempotency-Key")
    handle = queue.submit(prompt=body["text"], model=MODEL, max_tokens=64, idempotency_key=key)
    return {"id": handle.id}, 202


@app.get("/questions/<job_id>")
def answer(job_id: str) -> dict[str, Any]:
    try:
        return {"state": "succeeded", "text": queue.job(job_id).result(timeout=5).text}
    except ResultTimeout:
        return {"state": queue.job(job_id).status().state}


@app.delete("/questions/<job_id>")
def cancel(job_id: str) -> dict[str, bool]:
    return {"cancelled": queue.job(job_id).cancel()}


@app.errorhandler(InvalidJob)
@app.errorhandler(QueueFull)
@app.errorhandler(JobNotFound)
@app.errorhandler(JobError)
def refuse(error: Exception) -> tuple[dict[str, str], int]:
    codes = {InvalidJob: 422, QueueFull: 429, JobNotFound: 404}
    return {"error": str(error)}, codes.get(type(error), 502)
