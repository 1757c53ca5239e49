"""Puts the outputs of the jobs that a job waited for into its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job
from pagemill.producer.wire.schema.templates import ParentOutput, places, render


def rendered(job: Job, stored: Sequence[bytes]) -> Job:
    """Return a job as the engine takes it: with a prompt of its own.

    Args:
        stored: what the queue put behind its envelope.

    Raises:
        InvalidJob: an output is missing, can't be read or lacks a field, or the prompt becomes empty or too large.
    """
    found: dict[str, ParentOutput] = {}
    try:
        for line in stored:
            output = ParentOutput.model_validate_json(line)
            found[output.id] = output
    except ValidationError:
        raise InvalidJob("the output of a job that it waited for can't be read", param="after") from None
    after = job.after or {}
    reads = any(True for _, text in job.templates() for _ in places(text))
    if reads and (missing := sorted(set(after.values()) - found.keys())):
        raise InvalidJob(f"the output of job {missing[0]}, which it waited for, is not there", param="after")
    named = {name: found[parent] for name, parent in after.items() if parent in found}
    room = MAX_PAYLOAD_BYTES
    if job.prompt is not None:
        prompt = render(job.prompt, named, room)
        if not prompt:
            raise InvalidJob("with the outputs put in, the prompt is empty", param="prompt")
        return job.model_copy(update={"prompt": prompt})
    if job.messages is None:
        return job
    messages = []
    for message in job.messages:
        if message.content is not None:
            content = render(message.content, named, room)
            room -= len(content.encode())
            message = message.model_copy(update={"content": content})
        messages.append(message)
    return job.model_copy(update={"messages": tuple(messages)})
