"""The progress of a run on standard error: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

import threading
import time
import urllib.request
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from pagemill.producer.dataset.record import Mean
from pagemill.producer.dataset.work import Tally

LOG_INTERVAL_S = 10.0
SCRAPE_INTERVAL_S = 1.0
KV_METRIC = "pagemill_kv_cache_utilization_ratio"
WASTE_METRIC = "pagemill_kv_cache_waste_ratio"


class RunBar:
    """Rows, rows/s, tokens/s, time left, KV blocks in use, errors. `total` None: unknown so far."""

    def __init__(self, total: int | None, metrics_url: str | None = None, *, is_quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._is_quiet = is_quiet
        self._total = total
        self._started = time.monotonic()
        self._logged = self._started
        self._kv = KvGauge(metrics_url)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=is_quiet or not self._console.is_terminal,
        )
        self._task = self._progress.add_task("rows", total=total, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        self._kv.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._kv.stop()

    def kv_figures(self) -> tuple[Mean, Mean]:
        """Return the KV utilization and the waste (slots without a token in blocks in use) so far."""
        return self._kv.mean(KV_METRIC), self._kv.mean(WASTE_METRIC)

    def update(self, tally: Tally) -> None:
        """Show the tally."""
        now = time.monotonic()
        text = self._figures(tally, max(1e-3, now - self._started))
        done = tally.settled + tally.succeeded + tally.failed + tally.skipped
        self._progress.update(self._task, completed=done, figures=text)
        if self._progress.disable and not self._is_quiet and now >= self._logged + LOG_INTERVAL_S:
            self._logged = now
            of = f" of {self._total:,}" if self._total is not None else ""
            self._console.print(f"{done:,}{of} rows  {text}", highlight=False, soft_wrap=True)

    def _figures(self, tally: Tally, seconds: float) -> str:
        ended = tally.succeeded + tally.failed
        parts = [
            f"{ended / seconds:,.1f} rows/s",
            f"{sum(each.completion_tokens for each in (tally, *tally.stages.values())) / seconds:,.0f} tokens/s",
            f"{tally.in_flight:,} in flight",
        ]
        if tally.files is not None:
            parts.insert(0, "file {:,} of {:,}".format(*tally.files))
        if self._kv.ratio is not None:
            parts.append(f"KV {self._kv.ratio:.0%}")
        parts += [
            f"{name}: {stage.succeeded + stage.failed + stage.skipped:,} of {stage.submitted:,}"
            for name, stage in tally.stages.items()
        ]
        if failed := tally.all_failed:
            parts.append("1 error" if failed == 1 else f"{failed:,} errors")
        return "  ".join(parts)


class KvGauge:
    """The KV utilization and waste of one worker, scraped once per second on a thread; None if unknown."""

    def __init__(self, url: str | None) -> None:
        self.ratio: float | None = None
        self._url = url if url is not None and url.startswith("http://") else None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._means = {KV_METRIC: Mean(), WASTE_METRIC: Mean()}

    def start(self) -> None:
        if self._url is not None:
            self._thread = threading.Thread(target=self._watch, name="kv-gauge", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * SCRAPE_INTERVAL_S)

    def mean(self, metric: str) -> Mean:
        """Return the mean over the scrapes that found blocks in use."""
        return self._means[metric]

    def _watch(self) -> None:
        while not self._stopped.wait(SCRAPE_INTERVAL_S):
            values = self._scrape()
            self.ratio = values.get(KV_METRIC)
            if self.ratio:
                for metric, value in values.items():
                    self._means[metric] = self._means[metric].plus(Mean(1, value))

    def _scrape(self) -> dict[str, float]:
        assert self._url is not None
        try:
            with urllib.request.urlopen(self._url, timeout=SCRAPE_INTERVAL_S) as reply:
                text = reply.read().decode()
        except (OSError, ValueError):
            return {}
        found = {}
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in self._means:
                found[name] = float(line.rpartition(" ")[2])
        return found
