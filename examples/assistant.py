"""An assistant that calls functions until it has an answer: `python -m examples.assistant "What time is it?"`.

Takes a worker whose model can call functions; any can, but few do it well.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pagemill import Producer

MODEL = os.environ.get("PAGEMILL_MODEL", "smollm2")
MAX_TURNS = 4


def current_time() -> str:
    return datetime.now(UTC).isoformat(timespec="minutes")


FUNCTIONS: dict[str, Callable[..., str]] = {"current_time": current_time}
TOOLS = [
    {"type": "function", "function": {"name": "current_time", "description": "The date and time, in UTC."}}
]


def answer(question: str) -> tuple[str, list[str]]:
    """Return the answer's text, and what the functions returned on the way."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    returned: list[str] = []
    with Producer() as queue:
        for _ in range(MAX_TURNS):
            result = queue.submit(
                model=MODEL,
                messages=messages,
                tools=TOOLS,
                temperature=0.0,
                max_tokens=512,  # type: ignore[arg-type]
            ).result(timeout=120)
            if not result.tool_calls:
                break
            calls = [call.message_dict() for call in result.tool_calls]
            messages.append({"role": "assistant", "content": result.text, "tool_calls": calls})
            for call in result.tool_calls:
                function = FUNCTIONS.get(call.function.name)
                try:
                    text = (
                        f"no function {call.function.name}"
                        if function is None
                        else function(**json.loads(call.function.arguments))
                    )
                except (ValueError, TypeError) as error:
                    text = f"error: {error}"  # the model may try again
                returned.append(text)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return result.text, returned


if __name__ == "__main__":
    print(answer(sys.argv[1])[0])
