"""Puts the outputs of the jobs that a job waited for into its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.schema.sealing import ring
from pagemill.producer.wire.schema.templates import ParentOutput, places, render


def _opened(output: ParentOutput) -> ParentOutput:
    """Return an output in clear. Raises SealedError."""
    if output.sealed is None:
        return output
    result = Result.model_validate_json(ring().open(output.sealed.encode(), "result", output.computed_by))
    first = result.outputs[0] if result.outputs else Output(index=0)
    prob = (first.label_probs or {}).get(first.label or "")
    return output.model_copy(update={"text": first.text, "label": first.label, "prob": prob, "sealed": None})


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
            output = _opened(ParentOutput.model_validate_json(line))
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
