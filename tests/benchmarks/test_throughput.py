from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import measure, throughput
from benchmarks.engines.contenders import Contender
from benchmarks.engines.process import ROOT, EngineFailedError, EngineProcess
from benchmarks.throughput import Measurements, Pass
from benchmarks.workloads import Workload, chat
from tests.benchmarks.dry_run import dry_run

ENGINE_MODULE = "tests.benchmarks.counting_engine"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SMALL = Workload("chat", [[1, 2, 3], [4, 5]], [2, 1])


def counting(name: str, **environment: str) -> Contender:
    return Contender(name, ENGINE_MODULE, "counts", environment=tuple(environment.items()))


def request() -> measure.Request:
    return measure.Request("none", [SMALL], SMALL.longest, 2**30)


def measured(name: str, round_number: int, rate: float, outputs: list[list[int]]) -> Pass:
    count = sum(len(output) for output in outputs)
    return Pass(name, round_number, 0.0, measure.Timing("chat", count / rate, count, outputs))


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The process state letter of /proc; empty once the process no longer exists."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if state == "Z" else state


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess(counting("a", COUNTING_PIDS=str(tmp_path / "pids")), request(), tmp_path) as process:
        process.wait_until_ready()
        yield process


def test_ratios_are_taken_within_a_round_and_rounds_without_a_partner_are_left_out() -> None:
    same = [[1, 2], [3, 4]]
    rates = {"pagemill": (20.0, 90.0, 40.0), "vllm": (10.0, 30.0)}
    passes = [
        measured(name, number, rate, same)
        for name, values in rates.items()
        for number, rate in enumerate(values, 1)
    ]
    measurements = Measurements(passes)
    assert measurements.ratios("pagemill", "vllm", "chat") == pytest.approx([2.0, 3.0])
    assert measurements.ratios("pagemill", "transformers", "chat") == []


def test_equal_outputs_are_counted_by_request() -> None:
    measurements = Measurements(
        [
            measured("pagemill", 1, 1.0, [[1, 2], [3, 4], [5, 6]]),
            measured("pagemill", 2, 1.0, [[1, 2], [3, 4], [5, 6]]),
            measured("transformers", 2, 1.0, [[1, 2], [3, 9], [5, 6]]),
        ]
    )
    assert measurements.equal_outputs("pagemill", "transformers", "chat") == (2, 3)


def test_every_other_round_runs_the_other_way_and_slow_engines_run_at_both_ends() -> None:
    contenders = [
        counting("a"), counting("b"), Contender("slow", ENGINE_MODULE, "slow", every_round=False),
    ]  # fmt: skip
    order = [(number, who.name) for number, _, who in throughput.schedule(contenders, [SMALL], 3)]
    assert order == [(1, "a"), (1, "b"), (1, "slow"), (2, "b"), (2, "a"), (3, "a"), (3, "b"), (3, "slow")]


def test_an_engine_that_stops_early_gets_no_result() -> None:
    workload = chat(1000, 0, share=0.1)

    def lazy(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        return [[0] * (count - 1) for count in max_tokens]

    with pytest.raises(RuntimeError, match="chat: request 0 is 127 tokens long, not 128"):
        measure.time_pass(lazy, workload)


def test_a_waiting_engine_is_stopped_with_its_children_and_goes_on_when_asked(
    engine: EngineProcess, tmp_path: Path
) -> None:
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2  # the engine and its child process
    for number in (1, 2):
        wait_until(lambda: all(state_of(pid) == "T" for pid in pids))
        timing = engine.measure(SMALL)
        assert timing.outputs == [[number] * 2, [number]]  # the same process counts its passes
    assert engine.peak_memory_bytes() > 2**20
    engine.close()
    wait_until(lambda: all(state_of(pid) == "" for pid in pids))


def test_an_engine_that_dies_loses_only_its_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    measurements = Measurements()
    contenders = [
        counting("dies", COUNTING_DIES_AT="2"),
        counting("stays"),
        counting("late", COUNTING_DIES_AT="0"),
    ]
    passes: list[str] = []
    throughput.measure_all(
        measurements, contenders, request(), [SMALL], vocab_size=500, rounds=3, console=Console(quiet=True),
        after_pass=passes.append,
    )  # fmt: skip
    assert passes == ["dies", "stays", "stays", "dies", "stays"]
    assert [(p.contender, p.round_number) for p in measurements.passes] == [
        ("dies", 1), ("stays", 1), ("stays", 2), ("stays", 3),
    ]  # fmt: skip
    assert set(measurements.failures) == {"dies", "late"}
    assert "told to die" in measurements.failures["dies"]
    assert "dies ended with exit code 1" in capsys.readouterr().err


def test_a_process_that_never_gets_ready_is_an_engine_failure(tmp_path: Path) -> None:
    with (
        EngineProcess(Contender("a", "benchmarks.no_such_module", ""), request(), tmp_path) as process,
        pytest.raises(EngineFailedError, match="No module named"),
    ):
        process.wait_until_ready()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_engine_outlives_a_measurement_that_is_ended(how: signal.Signals, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
from pathlib import Path
from rich.console import Console
from benchmarks import throughput
from tests.benchmarks.test_throughput import SMALL, counting, request
names = [counting(name, COUNTING_PIDS={str(pids)!r}) for name in "ab"]
found = throughput.Measurements()
try:
    throughput.measure_all(
        found, names, request(), [SMALL], vocab_size=500, rounds=10**9, console=Console(quiet=True)
    )
except KeyboardInterrupt:
    print(len(found.passes))
"""
    running = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    try:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 4)
        engines = [int(pid) for pid in pids.read_text().split()]
        running.send_signal(how)
        output, _ = running.communicate(timeout=120)
        wait_until(lambda: all(state_of(pid) == "" for pid in engines))
        assert how == signal.SIGKILL or int(output) >= 0
    finally:
        running.kill()


@pytest.mark.slow
def test_a_dry_run_measures_both_engines_and_they_agree(tiny_llama: Path, tmp_path: Path) -> None:
    words = [
        "--engines",
        "pagemill",
        "transformers",
        "--rounds",
        "2",
        "--share",
        "0.05",
        "--kv-cache-gib",
        "1",
    ]
    report, finished = dry_run("benchmarks", tmp_path / "report.json", "--model", str(tiny_llama), *words)
    assert set(report["workloads"]) == {"chat", "mixed", "label"}
    assert {"date", "machine", "versions", "settings"} <= set(report)
    assert len(report["passes"]) == 2 * 3 * 2
    for name, workload in report["workloads"].items():
        assert name in finished.stdout
        assert all(len(engine["tokens_per_second"]) == 2 for engine in workload["engines"].values())
        assert len(workload["engines"]["transformers"]["pagemill_ratio"]["rounds"]) == 2
        equal, total = workload["engines"]["pagemill"]["outputs_equal_to_transformers"]
        assert equal == total == 2 * workload["requests"]
