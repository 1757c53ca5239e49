"""The required contents of a queue's sets for given job states. Used by state machines over a queue."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.producer.wire.schema.outputs import ACTIVE_STATES
from tests.producer.driving import Queue


def check_sets(queue: Queue, states: Mapping[str, str], affinities: Mapping[str, str | None]) -> None:
    """Each job is in the sets of its state, and in no others. `states` has all active jobs."""
    client, prefix = queue.client, queue.prefix

    def members(name: str) -> list[str]:
        return [member.decode() for member in client.zrange(f"{prefix}{name}", 0, -1)]

    def having(*wanted: str) -> list[str]:
        return sorted(job_id for job_id, state in states.items() if state in wanted)

    active = set(having(*ACTIVE_STATES))
    names = queue.names()
    waiting = [name for name in names if name.startswith("wait:")]
    followed = [name for name in names if name.startswith("followers:")]
    following = [job_id for name in followed for job_id in members(name)]
    entries = [entry.partition(" ") for name in waiting for entry in members(name)]
    for job_id, _, affinity in entries:
        near = client.hget(f"{prefix}job:{job_id}", "near")
        expected = near.decode() if near else affinities.get(job_id) or ""
        assert affinity == expected, "it is lost on the way back to the lane"
    assert sorted([job_id for job_id, _, _ in entries] + following) == having("queued")
    assert int(client.hget(f"{prefix}meta", "followers") or 0) == len(following)
    assert {member.decode() for member in client.smembers(f"{prefix}lanes")} == {name[5:] for name in waiting}
    check_indexes(queue, names)
    for name in waiting:
        needs, letter, tenant, model = name[5:].split(":", 3)
        is_parked = tenant in members("parked") and client.sismember(f"{prefix}parked:{tenant}", name[5:])
        is_found = f"{letter}:{needs}" in members(f"needs:{model}")
        assert is_parked or (is_found and tenant in members(f"turns:{needs}:{letter}:{model}")), (
            "pull would not find it"
        )
    twins = [name for name in names if name.startswith("twin:")]
    leaders = {client.get(f"{prefix}{name}").decode() for name in twins}
    assert leaders <= active - set(following)
    assert {name.split(":")[1] for name in followed} <= active | set(members("settling"))
    assert sorted(members("leases")) == having("running")
    assert sorted(members("delayed")) == having("delayed")
    assert set(members("deadlines")) <= active
    suspects = client.hgetall(f"{prefix}suspects").values()
    assert {job_id.decode() for job_id in suspects} <= set(having("running"))


def check_indexes(queue: Queue, names: set[str]) -> None:
    """The index of a lane has exactly the jobs with an affinity up to its frontier, and is removed with the lane."""
    client, prefix = queue.client, queue.prefix
    for lane in (name.removeprefix("alike:") for name in names if name.startswith("alike:")):
        assert client.pttl(f"{prefix}alike:{lane}") > 0
        entries = client.zrange(f"{prefix}alike:{lane}", 0, -1, withscores=True)
        (mark, frontier), *found = (entry.decode().split(" ") for entry, _ in entries)
        assert mark == "!"
        assert {score for _, score in entries} == {0.0}
        waiting = client.zrange(f"{prefix}wait:{lane}", 0, -1, withscores=True)
        assert waiting, "it outlives its lane"
        wanted = {
            (int(rank), entry.decode().split(" ")[1])
            for entry, rank in waiting
            if b" " in entry and rank <= int(frontier)
        }
        assert {(int(rank), affinity) for affinity, rank in found} == wanted
