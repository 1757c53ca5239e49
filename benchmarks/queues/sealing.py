"""What encryption at rest costs: processor time per submit and per result, with and without, by turns in one run.

python -m benchmarks.queues.sealing
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable

from pagemill.producer.client.preparer import Preparer
from pagemill.producer.wire.schema.outputs import Output, Result, Usage
from pagemill.producer.wire.schema.sealing import KEYS_VARIABLE, ring
from pagemill.producer.wire.schema.signing import Keys

ROUNDS = 20
CALLS = 500


def microseconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    for _ in range(CALLS):
        work()
    return (time.process_time() - begun) / CALLS * 1e6


def submit(words: int) -> Callable[[], object]:
    preparer = Preparer("q", "t", Keys())
    prompt = "word " * words
    return lambda: preparer.job({"prompt": prompt, "model": "m", "max_tokens": 64}, {}, "a" * 24)


def commit(tokens: int) -> Callable[[], object]:
    output = Output(index=0, text="word " * tokens, token_ids=tuple(range(tokens)), finish_reason="stop")
    result = Result(id="a" * 24, outputs=(output,), model="m", usage=Usage(prompt_tokens=2))
    return lambda: ring().seal(result.model_dump_json().encode(), "result", "a" * 24)


def main() -> None:
    key = f"k1:{base64.b64encode(os.urandom(32)).decode()}"
    cases = {"submit, 20 words": (submit, 20), "submit, 2,000 words": (submit, 2000),
             "result, 64 tokens": (commit, 64), "result, 1,000 tokens": (commit, 1000)}  # fmt: skip
    for name, (make, size) in cases.items():
        clear, sealed = [], []
        for _ in range(ROUNDS):
            os.environ.pop(KEYS_VARIABLE, None)
            clear.append(microseconds(make(size)))
            os.environ[KEYS_VARIABLE] = key
            sealed.append(microseconds(make(size)))
        print(f"{name}: {min(clear):.1f} us in clear, {min(sealed):.1f} us sealed")


if __name__ == "__main__":
    main()
