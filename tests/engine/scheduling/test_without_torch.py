"""Scheduling and the plain types it shares with execution are importable, and run, without torch."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

PROGRAM = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton", "numba", "numpy"):
            raise ImportError(f"{name} must not be needed here")

sys.meta_path.insert(0, NoTorch())

from pagemill.engine import config, errors, outputs, plan, sampling_params
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.request import Request, Sequence
from pagemill.engine.scheduling.scheduler import Scheduler

scheduler = Scheduler(
    SchedulerConfig(
        block_size=4, num_kv_blocks=8, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=8
    )
)
request = Request("r", [1, 2, 3], SamplingParams(max_tokens=2), seed=0)
request.sequences = [Sequence(request, 0)]
scheduler.add_request(request)
assert scheduler.schedule().num_tokens == 3
assert "torch" not in sys.modules
"""


def test_scheduling_runs_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
