"""Puts the outputs of the jobs that a job waited for into its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job
from pagemill.producer.wire.schema.templates import ParentOutput, render


def rendered(job: Job, stored: Sequence[bytes]) -> Job:
    """Return a job as the engine takes it: with a prompt of its own.

    Args:
        stored: what the queue put behind its envelope. The output of a parent that is missing there is empty.

    Raises:
        InvalidJob: an output can't be read or lacks a field, or the prompt becomes empty or too large.
    """
    found: dict[str, ParentOutput] = {}
    try:
        for line in stored:
            output = ParentOutput.model_validate_json(line)
            found[output.id] = output
    except ValidationError:
        raise InvalidJob("the output of a job that it waited for can't be read", param="after") from None
    named = {
        name: found.get(parent, ParentOutput(id=parent, state="gone"))
        for name, parent in (job.after or {}).items()
    }
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
