"""The order of a rolling restart, and what stops it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from pagemill.supervisor.child import ChildSpec, Kind
from pagemill.supervisor.rollout import MAX_FAILURES, Rollout


@dataclass
class Stand:
    """A member whose processes the test plays."""

    spec: ChildSpec
    is_ready: bool = True
    failures: int = 0
    last_end: str = ""
    restarted_with: list[ChildSpec] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.spec.name

    def restart(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.restarted_with.append(spec)
        self.is_ready, self.failures = False, 0


def stand(name: str, kind: Kind = "worker", **state: Any) -> Stand:
    return Stand(ChildSpec(name=name, kind=kind, arguments=(), url="http://x"), **state)


def rollout(*members: Stand) -> Rollout:
    return Rollout(cast(Any, members), [replace(member.spec, arguments=("new",)) for member in members])


def told(subject: Rollout) -> list[str | None]:
    lines = []
    while not subject.events.empty():
        lines.append(subject.events.get())
    return lines


def test_workers_go_first_and_one_at_a_time() -> None:
    gateway, a, b = stand("gateway", "gateway"), stand("a"), stand("b")
    subject = rollout(gateway, a, b)
    for member in (a, b, gateway):
        for _ in range(3):
            subject.advance()
        away = [one.name for one in (gateway, a, b) if not one.is_ready]
        assert away == [member.name]
        member.is_ready = True
    subject.advance()
    assert (subject.is_over, subject.is_success) == (True, True)
    assert [line for line in told(subject) if line][-1] == "all are restarted"
    assert {one.spec.arguments for one in (gateway, a, b)} == {("new",)}


def test_what_does_not_serve_goes_before_what_does() -> None:
    a, b, c = stand("a"), stand("b"), stand("c", is_ready=False, failures=9)
    subject = rollout(a, b, c)
    subject.advance()
    assert [len(one.restarted_with) for one in (a, b, c)] == [0, 0, 1]
    subject.advance()
    assert not subject.is_over, "its failures before this do not count"


def test_it_waits_while_a_worker_is_away_for_other_reasons() -> None:
    a, b = stand("a"), stand("b")
    subject = rollout(a, b)
    subject.advance()
    a.is_ready = True
    a_again = a
    subject.advance()  # b is begun
    b.is_ready = True
    assert not a_again.restarted_with[1:]
    late = rollout(a, b, stand("c"))
    late.advance()
    a.is_ready, b.is_ready = True, False  # b has crashed meanwhile: it comes next, and costs nothing
    late.advance()
    assert len(b.restarted_with) == 2


def test_a_successor_that_does_not_get_up_stops_it_and_gets_its_old_settings_back() -> None:
    a, b = stand("a"), stand("b")
    subject = rollout(a, b)
    subject.advance()
    a.failures, a.last_end = MAX_FAILURES, "exit code 1"
    subject.advance()
    assert (subject.is_over, subject.is_success) == (True, False)
    assert [spec.arguments for spec in a.restarted_with] == [("new",), ()]
    assert not b.restarted_with
    (*_, last, end) = told(subject)
    assert "halted: the new a ended 3 times (exit code 1)" in str(last)
    assert "Not restarted: b" in str(last)
    assert end is None


def test_it_ends_with_the_supervisor() -> None:
    subject = rollout(stand("a"), stand("b"))
    subject.advance()
    subject.abandon("stopped")
    assert told(subject)[-2:] == ["stopped", None]
