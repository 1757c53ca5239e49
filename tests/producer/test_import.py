"""`import producer` is light, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

from pagemill import producer

HEAVY = ("torch", "transformers", "triton", "numba", "numpy", "typer", "rich", "jinja2", "celery", "yaml")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_it_loads_neither_redis_nor_pydantic() -> None:
    loaded = run(
        "import sys; from pagemill import producer; print([n for n in ('redis', 'pydantic') if n in sys.modules])"
    )
    assert loaded == "[]"


def test_using_it_loads_redis_and_pydantic_and_nothing_heavy() -> None:
    code = f"""
import sys
from pagemill import producer
producer.Producer("redis://127.0.0.1:1"), producer.AsyncProducer("redis://127.0.0.1:1"), producer.Job
ours = {{f"pagemill.{{part}}" for part in ("engine", "kernels", "worker", "monitoring")}}
print(sorted(name for name in sys.modules if name in {HEAVY} or name in ours))
"""
    assert run(code) == "[]"


def test_every_public_name_is_there() -> None:
    for name in producer.__all__:
        assert getattr(producer, name).__name__ == name
    assert set(producer.__all__) <= set(dir(producer))
