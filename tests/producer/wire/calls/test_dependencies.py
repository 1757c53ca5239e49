"""Jobs that wait for others: when they run, when they end instead, and their inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from pagemill.producer.dataset.steps.walk import is_met
from pagemill.producer.wire.calls import batches, dead_letters, reads, registry, submissions, transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.dependencies import Condition
from pagemill.producer.wire.schema.errors import JobCancelled, RedisRefused
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.schema.signing import split_payload
from pagemill.producer.wire.schema.templates import ParentOutput
from pagemill.producer.wire.server import scripts
from tests.producer.driving import Queue, result_json

READS = "Of {parent.text}"


def given(job: PulledJob) -> list[dict[str, Any]]:
    """The inputs of a pulled job, only the members that are set."""
    return [json.loads(line) for line in split_payload(job.payload).outputs]


def commit_label(queue: Queue, job: PulledJob, probs: Mapping[str, float]) -> None:
    label = max(probs, key=lambda name: probs[name])
    output = Output(index=0, text=label, label=label, label_probs=dict(probs), finish_reason="stop")
    body = Result(id=job.job_id, outputs=(output,), model="m").model_dump_json()
    assert queue.run(transitions.commit(queue.name, job.job_id, job.token, "succeeded", body)) == "committed"


def submit_refused(queue: Queue, job_id: str, **fields: Any) -> tuple[str, str]:
    job = Job.parse({"prompt": "a", "model": "m"} | fields)
    (reply,) = queue.run(submissions.submit(queue.name, [submissions.prepare(job, job_id)]))
    return reply.status, reply.job_id


def left_of_links(queue: Queue) -> set[str]:
    return {name for name in queue.names() if name.split(":")[0] in ("children", "awaited", "output")}


def test_a_commit_releases_what_waited_and_gives_it_the_output(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", prompt=READS, after=["p"])
    status = queue.status("c")
    assert (status.state, status.waits_for) == ("delayed", ("p",))
    assert status.error == "it waits for the end of job p"
    (parent,) = queue.pull()
    queue.commit(parent, 'a "text" \u2028 \U0001f600')
    status = queue.status("c")
    assert (status.state, status.waits_for, status.error) == (
        "queued",
        (),
        "no live worker serves it (model m)",
    )
    (child,) = queue.pull()
    (line,) = split_payload(child.payload).outputs
    assert ParentOutput.model_validate_json(line) == ParentOutput(
        id="p", state="succeeded", text='a "text" \u2028 \U0001f600'
    )
    assert Job.from_payload(child.payload).after == {"parent": "p"}
    queue.commit(child)
    assert left_of_links(queue) == set()


def test_it_is_one_write_with_the_commit(queue: Queue) -> None:
    """So no crash of a worker can occur between the two: one EVAL, as any worker sends it, includes the release."""
    queue.submit("p")
    queue.submit("c", after=["p"])
    (parent,) = queue.pull()
    call = transitions.commit(queue.name, "p", parent.token, "succeeded", result_json("p"))
    assert queue.client.eval(scripts.source(call.script), 1, *call.keys, *call.args) == [b"committed"]
    assert queue.state("c") == "queued"
    assert queue.commit(parent) == "already_done"
    assert [job.job_id for job in queue.pull()] == ["c"]


def test_nothing_is_released_by_a_commit_that_is_fenced(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    (parent,) = queue.pull()
    queue.lapse("p")
    (again,) = queue.pull(worker="w2")
    assert queue.commit(parent) == "fenced"
    assert queue.state("c") == "delayed"
    assert queue.commit(again) == "committed"
    assert queue.state("c") == "queued"


def test_it_waits_for_all_of_them(queue: Queue) -> None:
    queue.submit("p1", "p2", "p3")
    queue.submit("c", prompt="{b.text} {a.text}", after={"a": "p1", "b": "p2", "order": "p3"})
    jobs = {job.job_id: job for job in queue.pull()}
    queue.commit(jobs["p2"], "two")
    queue.commit(jobs["p3"], "three")
    assert queue.status("c").waits_for == ("p1",)
    assert queue.status("c").state == "delayed"
    queue.commit(jobs["p1"], "one")
    (child,) = queue.pull()
    assert {line["id"]: line["text"] for line in given(child)} == {"p1": "one", "p2": "two", "p3": "three"}


def test_what_only_waits_is_given_nothing(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    queue.commit(queue.pull_one(), "x" * 2_000_000)
    child = queue.pull_one()
    assert given(child) == []


def test_it_costs_the_tokens_that_it_is_given(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", prompt=READS, after=["p"], max_tokens=10)
    before = int(queue.client.hget(f"{queue.prefix}job:c", "cost"))
    queue.commit(queue.pull_one(), "x" * 300)
    assert int(queue.client.hget(f"{queue.prefix}job:c", "cost")) == before + 100


@pytest.mark.parametrize("state", ["failed", "dead", "cancelled", "expired"])
def test_a_parent_without_a_result_ends_what_waits(queue: Queue, state: str) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    queue.submit("lenient", prompt=READS, after=["p"], on_parent_failure="run")
    queue.submit("grandchild", after=["c"])
    queue.submit("other", after=["c"], on_parent_failure="run")
    queue.fail(queue.pull_one(), state)
    assert queue.state("c") == "cancelled"
    error = queue.error("c")
    assert (error.code, error.cause) == ("parent_failed", "invalid_job")
    assert error.message == f"it waited for job p, which is {state}"
    assert queue.error("grandchild").message == "it waited for job c, which is cancelled"
    with pytest.raises(JobCancelled):
        queue.run(reads.outcome(queue.name, "grandchild")).value()
    jobs = {job.job_id: job for job in queue.pull()}
    assert set(jobs) == {"lenient", "other"}
    assert given(jobs["lenient"]) == [{"id": "p", "state": state}]
    assert left_of_links(queue) == set()


def test_a_cancel_goes_down_the_graph(queue: Queue) -> None:
    queue.submit("a")
    queue.submit("b", after=["a"])
    queue.submit("c", after=["b"])
    assert queue.cancel("a") == "cancelled"
    assert [queue.state(job) for job in "abc"] == ["cancelled"] * 3
    assert queue.error("b").cause == "cancelled"
    assert left_of_links(queue) == set()


def test_a_cancel_of_a_running_parent_does_when_it_has_ended(queue: Queue) -> None:
    queue.submit("a")
    queue.submit("b", after=["a"])
    (job,) = queue.pull()
    assert queue.cancel("a") == "requested"
    assert queue.state("b") == "delayed"
    assert queue.commit(job) == "cancelled"
    assert queue.state("b") == "cancelled"


def test_the_cancel_of_one_child_leaves_its_siblings(queue: Queue) -> None:
    queue.submit("a", "a2")
    queue.submit("b", after=["a", "a2"])
    queue.submit("c", after=["a"])
    assert queue.cancel("b") == "cancelled"
    assert queue.error("b").code == "cancelled"
    for job in queue.pull():
        queue.commit(job)
    assert queue.state("c") == "queued"
    assert left_of_links(queue) == set()


def test_a_deadline_goes_down_the_graph(queue: Queue) -> None:
    queue.submit("a", ttl=60)
    queue.submit("b", after=["a"])
    queue.client.hset(f"{queue.prefix}job:a", "deadline", 1)
    assert queue.status("a").state == "expired"  # any call finds the change, and also changes the others
    assert queue.state("b") == "cancelled"
    assert queue.error("b").cause == "deadline_exceeded"


def test_a_waiting_job_has_a_deadline_of_its_own(queue: Queue) -> None:
    queue.submit("a")
    queue.submit("b", after=["a"], ttl=60)
    queue.client.hset(f"{queue.prefix}job:b", "deadline", 1)
    assert queue.state("b") == "expired"
    assert left_of_links(queue) == set()
    queue.commit(queue.pull_one())
    assert queue.pull() == []


def test_a_job_that_is_due_later_waits_for_that_too(queue: Queue) -> None:
    queue.submit("a")
    queue.submit("b", after=["a"], delay=3600)
    queue.commit(queue.pull_one())
    assert (queue.status("b").state, queue.status("b").waits_for) == ("delayed", ())
    assert queue.pull() == []
    queue.make_due("b")
    assert queue.pull_one().job_id == "b"


CONDITIONS = [
    ({"label": "positive"}, True),
    ({"label": ["neutral", "positive"]}, True),
    ({"label": ["negative"]}, False),
    ({"text": " positive"}, True),
    ({"text": "Positive"}, False),
    ({"text": "positive"}, True),
    ({"prob_at_least": 0.75}, True),
    ({"prob_at_least": 0.76}, False),
    ({"prob_below": 0.75}, False),
    ({"label": "positive", "prob_below": 0.8}, True),
    ({"label": "negative", "prob_below": 0.8}, False),
]


@pytest.mark.parametrize(("condition", "is_met"), CONDITIONS)
def test_a_condition_is_asked_when_the_parent_ends(
    valkey_queue: Queue, condition: dict[str, Any], is_met: bool
) -> None:
    queue = valkey_queue
    queue.submit("p", "q")
    queue.submit("c", after={"label": "p", "q": "q"}, when={"label": condition})
    jobs = {job.job_id: job for job in queue.pull()}
    commit_label(queue, jobs["p"], {"positive": 0.75, "negative": 0.25})
    assert queue.state("c") == ("delayed" if is_met else "cancelled")
    if not is_met:
        assert queue.error("c").code == "condition_false"
    queue.commit(jobs["q"])
    assert [job.job_id for job in queue.pull()] == (["c"] if is_met else [])
    assert left_of_links(queue) == set()


def test_a_probability_is_given_to_the_last_bit(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", prompt="{parent.label_prob}", after=["p"])
    commit_label(queue, queue.pull_one(), {"yes": 0.7000000000000012, "no": 0.2999999999999988})
    (line,) = split_payload(queue.pull_one().payload).outputs
    assert ParentOutput.model_validate_json(line).prob == 0.7000000000000012


def test_a_plain_text_stands_for_its_label(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"], when={"parent": {"label": "yes"}})
    queue.submit("d", after=["p"], when={"parent": {"prob_at_least": 0.0}})
    queue.commit(queue.pull_one(), " yes\n")
    assert queue.state("c") == "queued"
    assert queue.state("d") == "cancelled", "it has no probability"


@pytest.mark.parametrize("text", ["\u3000yes\u00a0", "\u2028\u3000", "\x1f yes"])
@pytest.mark.parametrize("name", ["label", "text"])
def test_a_condition_equals_the_same_text_in_any_script(valkey_queue: Queue, name: str, text: str) -> None:
    """Scripts know only ASCII's space; a recipe must decide like the queue."""
    queue = valkey_queue
    queue.submit("p")
    queue.submit("c", after=["p"], when={"parent": {name: text}})
    queue.commit(queue.pull_one(), f" {text}\n")
    assert queue.state("c") == "queued"
    output = ParentOutput(id="p", state="succeeded", text=f" {text}\n")
    assert is_met(Condition.model_validate({name: text}), output)


def test_a_condition_on_a_failed_parent_is_false(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"], when={"parent": {"label": "yes"}}, on_parent_failure="run")
    queue.fail(queue.pull_one())
    assert queue.error("c").code == "condition_false"


def test_what_waits_for_one_that_was_not_wanted_follows_its_own_policy(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"], when={"parent": {"label": "yes"}})
    queue.submit("d", after=["c"])
    queue.submit("e", after=["c"], on_parent_failure="run")
    queue.commit(queue.pull_one(), "no")
    assert queue.error("d").cause == "condition_false"
    assert queue.state("e") == "queued"


def test_a_parent_that_has_ended_is_not_waited_for(queue: Queue) -> None:
    queue.submit("p", "bad", "no")
    for job in queue.pull():
        queue.fail(job) if job.job_id == "bad" else queue.commit(job, job.job_id)
    assert queue.submit("c", prompt=READS, after=["p"]) == ["created"]
    assert queue.submit("d", after=["bad"], batch_id="b", key="d") == ["created"]
    assert queue.submit("e", after=["no"], when={"parent": {"text": "yes"}}) == ["created"]
    assert [queue.state(job) for job in "cde"] == ["queued", "cancelled", "cancelled"]
    assert given(queue.pull_one()) == [{"id": "p", "state": "succeeded", "text": "p"}]
    counts = queue.counts("b")
    assert (counts.total, counts.cancelled) == (1, 1)
    assert left_of_links(queue) == set()


def test_a_parent_whose_result_is_gone_has_none(queue: Queue) -> None:
    queue.submit("p")
    queue.commit(queue.pull_one())
    queue.client.delete(f"{queue.prefix}out:p")
    queue.submit("c", prompt=READS, after=["p"])
    assert queue.error("c").code == "payload_lost"
    queue.submit("d", after=["p"])
    assert queue.state("d") == "queued"


@pytest.mark.parametrize(
    "header",
    [
        {"after": ""},
        {"after": "a a"},
        {"after": "a b:c"},
        {"after": " ".join(f"j{number}" for number in range(17))},
        {"after": 3},
        {"after": "p", "when": "{"},
        {"after": "p", "when": "3"},
        {"after": "p", "when": '{"p": 3}'},
        {"after": "p", "when": '{"p": null}'},
        {"after": "p", "when": '{"p": {"label": "a"}}'},
        {"after": "p", "when": '{"p": {"text": [1]}}'},
        {"after": "p", "when": '{"p": {"text": {"a": "b"}}}'},
        {"after": "p", "when": '{"p": {"prob_below": "0.5"}}'},
        {"after": "p", "when": '{"p": {"prob_at_least": null}}'},
        {"after": "p", "otherwise": "perhaps"},
    ],
)
def test_a_header_that_makes_no_sense_harms_nobody(queue: Queue, header: dict[str, Any]) -> None:
    """The error does not name the other job, whose commit would read it."""
    queue.submit("p")
    text = json.dumps({"id": "c", "lane": "1+after:1:default:m", "cost": 1} | header)
    item = submissions.Submission("c", text.encode(), b"{}", is_linked=True)
    with pytest.raises(RedisRefused, match="bad header at ARGV 3"):
        queue.run(submissions.submit(queue.name, [item]))
    plain = submissions.Submission("c", text.encode(), b"{}")
    with pytest.raises(RedisRefused, match="bad header at ARGV 3"):
        queue.run(submissions.submit(queue.name, [plain]))
    assert queue.commit(queue.pull_one()) == "committed"


@pytest.mark.parametrize(
    "outputs", [None, 3, [], [None], [3], ["x"], [{"text": 3, "label": [], "label_probs": 1}]]
)
def test_a_result_of_another_form_harms_nobody(queue: Queue, outputs: object) -> None:
    queue.submit("p")
    queue.submit("c", prompt=READS, after=["p"], when={"parent": {"text": ""}})
    job = queue.pull_one()
    call = transitions.commit(queue.name, "p", job.token, "succeeded", json.dumps({"outputs": outputs}))
    assert queue.run(call) == "committed"
    assert queue.state("c") == "queued"


def test_unknown_parents_are_refused(queue: Queue) -> None:
    assert submit_refused(queue, "c", after=["nobody"]) == ("unknown", "nobody")
    queue.submit("theirs", tenant="b")
    assert submit_refused(queue, "c", after=["theirs"], tenant="a") == ("unknown", "theirs")
    assert submit_refused(queue, "c", after=["theirs"], tenant="b") == ("created", "c")
    assert registry.stats(queue.run, queue.name).counts["delayed"] == 1


def test_a_repeated_submit_changes_nothing(queue: Queue) -> None:
    queue.submit("p")
    assert queue.submit("c", after=["p"], idempotency_key="k") == ["created"]
    assert queue.submit("c", after=["p"], idempotency_key="k") == ["exists"]
    assert queue.submit("d", after=["p"], idempotency_key="k") == ["same"]
    assert queue.submit("d", idempotency_key="k") == ["conflict"], "to wait for others is other work"
    queue.commit(queue.pull_one())
    assert queue.submit("c", after=["p"], idempotency_key="k") == ["exists"]
    assert len(queue.pull()) == 1


def call_of(queue: Queue, jobs: Mapping[str, list[str]], batch_id: str = "b") -> dict[str, str]:
    """Submit jobs, each with the ids of its parents, in one call."""
    items = []
    for job_id, after in jobs.items():
        fields = {"prompt": "a", "model": "m"} | ({"after": after} if after else {})
        items.append(submissions.prepare(Job.parse(fields), job_id, key=job_id))
    replies = queue.run(submissions.submit(queue.name, items, batch_id=batch_id))
    return {name: f"{reply.status}:{reply.job_id}" for name, reply in zip(jobs, replies, strict=True)}


def test_a_chain_in_one_call(queue: Queue) -> None:
    assert set(call_of(queue, {"a": [], "b": ["a"], "c": ["b", "a"]}).values()) == {
        "created:a",
        "created:b",
        "created:c",
    }
    for name in "abc":
        (job,) = queue.pull()
        assert job.job_id == name
        queue.commit(job)
    counts = queue.counts("b")
    assert counts.succeeded == counts.total == 3


def test_cycles_are_refused(queue: Queue) -> None:
    assert submit_refused(queue, "x", after=["x"]) == ("cycle", "x")
    replies = call_of(queue, {"a": ["c"], "b": ["a"], "c": ["b"], "d": ["c"], "e": ["f"], "f": []})
    assert replies == {
        "a": "cycle:c", "b": "cycle:a", "c": "cycle:b", "d": "again:d", "e": "unknown:f", "f": "created:f",
    }  # fmt: skip
    assert registry.stats(queue.run, queue.name).counts["queued"] == 1
    assert left_of_links(queue) == set()


def test_an_id_that_others_wait_for_is_not_used_again_to_wait_for_them(queue: Queue) -> None:
    """A script of an earlier version may have removed a record before the waiting jobs were notified."""
    queue.submit("a")
    queue.submit("b", after=["a"])
    (job,) = queue.pull()
    queue.commit(job)
    queue.submit("x")
    queue.submit("y", after=["x"])
    queue.client.delete(f"{queue.prefix}job:x")
    assert submit_refused(queue, "x", after=["y"]) == ("cycle", "x")


def test_a_sweep_tells_of_ends_that_an_earlier_release_recorded(queue: Queue) -> None:
    for name in ("p", "gone"):
        queue.submit(name)
        queue.submit(f"of-{name}", prompt=READS, after=[name])
    for job in queue.pull():
        queue.client.hdel(f"{queue.prefix}job:{job.job_id}", "awaited")  # unread by such a script
        queue.commit(job, "text")
    queue.client.delete(f"{queue.prefix}job:gone")
    queue.sweep(20)
    assert queue.state("of-p") == "delayed", "it looks every half a minute"
    for name in ("p", "gone"):
        queue.client.zadd(f"{queue.prefix}awaited", {name: 1}, xx=True)
    queue.sweep(20)
    assert given(queue.pull_one()) == [{"id": "p", "state": "succeeded", "text": "text"}]
    assert queue.error("of-gone").message == "it waited for job gone, which is gone"
    assert left_of_links(queue) == set()


def test_a_clock_that_was_set_back_delays_no_look(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    queue.client.zadd(f"{queue.prefix}awaited", {"p": 9e12}, xx=True)
    queue.sweep(20)
    assert queue.client.zscore(f"{queue.prefix}awaited", "p") < 9e12


def test_a_wide_fan_is_told_slice_by_slice(queue: Queue) -> None:
    """No script notifies more than 64; the output is kept for the others, though its record is removed."""
    call_of(queue, {"p": []})
    for start in range(0, 200, 100):
        ids = [f"c{number}" for number in range(start, start + 100)]
        queue.submit(*ids, prompt=READS, after=["p"])
    queue.commit(queue.pull_one(), "text")
    assert registry.stats(queue.run, queue.name).counts["queued"] == 64
    assert queue.run(batches.ack(queue.name, "b", "e1", 0))[0] == 1
    assert not queue.client.exists(f"{queue.prefix}job:p")
    queue.sweep(20)
    jobs = queue.pull(500)
    assert len(jobs) == 200
    assert all(given(job)[0]["text"] == "text" for job in jobs)
    assert left_of_links(queue) == set()


def test_so_is_a_deep_cascade(queue: Queue) -> None:
    call_of(queue, {"j0": []} | {f"j{n}": [f"j{n - 1}"] for n in range(1, 200)})
    assert queue.cancel("j0") == "cancelled"
    assert 64 <= registry.stats(queue.run, queue.name).counts["cancelled"] < 100
    queue.sweep(20)
    assert registry.stats(queue.run, queue.name).counts == {"cancelled": 200, "delayed": 0, "queued": 0}
    assert left_of_links(queue) == set()


def test_bytes_of_outputs_are_bounded(queue: Queue) -> None:
    queue.submit("p", "q", "huge")
    queue.submit("c", prompt="{p.text}{q.text}", after={"p": "p", "q": "q"})
    queue.submit("d", prompt="{p.text}", after={"p": "p"})
    queue.submit("e", prompt=READS, after=["huge"])
    for job in queue.pull():
        queue.commit(job, "x" * (2_000_000 if job.job_id == "huge" else 200_000))
    assert [queue.state(job) for job in "cde"] == ["failed", "queued", "failed"]
    assert queue.error("c").code == queue.error("e").code == "payload_too_large"


def outputs(queue: Queue) -> dict[str, int]:
    """Outputs that are stored for readers, each with its lifetime in ms, -1 for no limit."""
    names = {name for name in queue.names() if name.split(":")[0] == "end"}
    return {name: queue.client.pttl(queue.prefix + name) for name in names}


def test_readers_share_one_output_and_the_last_of_them_removes_it(queue: Queue) -> None:
    """It outlives the record of its job; jobs that do not read it do not keep it."""
    queue.submit("p")
    queue.submit("early", "lapses", prompt=READS, after=["p"])
    queue.submit("blind", after=["p"])
    queue.commit(queue.pull_one(), "text")
    queue.submit("late", "later", prompt=READS, after=["p"])
    queue.client.delete(f"{queue.prefix}job:p", f"{queue.prefix}out:p")
    assert list(outputs(queue).values()) == [-1]
    jobs = {job.job_id: job for job in queue.pull()}
    queue.commit(jobs["early"])
    queue.commit(jobs["blind"])
    queue.release(jobs["late"])
    queue.retry(jobs["later"])
    queue.make_due("later")
    queue.lapse("lapses")
    for job in queue.pull():
        assert given(job)[0]["text"] == "text"
        assert list(outputs(queue).values()) == [-1]
        queue.commit(job)
    assert outputs(queue) == {}
    assert not {name for name in queue.names() if name.startswith(("sharers", "output"))}


def test_an_output_is_kept_for_replays_of_its_readers(queue: Queue) -> None:
    """As long as their inputs: 14 days for a dead job, and for a batch's member until it is acknowledged."""
    day = 86_400_000
    queue.submit("p")
    queue.submit("dies", "ends", "cancelled", prompt=READS, after=["p"], max_attempts=1)
    queue.submit("member", prompt=READS, after=["p"], batch_id="b")
    queue.commit(queue.pull_one(), "text")
    queue.cancel("cancelled")
    jobs = {job.job_id: job for job in queue.pull()}
    queue.retry(jobs["dies"])
    queue.commit(jobs["ends"])
    queue.fail(jobs["member"])
    assert list(outputs(queue).values()) == [-1]
    assert queue.run(batches.ack(queue.name, "b", "e1", 0))[0] == 1
    (ttl,) = outputs(queue).values()
    assert 13 * day < ttl <= 14 * day
    queue.submit("late", prompt=READS, after=["p"])
    assert list(outputs(queue).values()) == [-1]
    late = queue.pull_one()
    assert given(late)[0]["text"] == "text"
    queue.commit(late)
    (ttl,) = outputs(queue).values()
    assert 13 * day < ttl <= 14 * day
    (letter,) = queue.run(dead_letters.open_letters(queue.name, ["dies"]))
    assert letter is not None
    assert split_payload(letter.payload).outputs


def test_many_results_are_read_by_several_scripts(queue: Queue) -> None:
    parents = [f"p{number}" for number in range(12)]
    queue.submit(*parents)
    for job in queue.pull(20):
        queue.commit(job, "x" * 400_000)
    call_of(queue, {f"c-{parent}": [parent] for parent in parents})
    queued = registry.stats(queue.run, queue.name).counts["queued"]
    assert queued == 3
    queue.sweep(20)
    assert registry.stats(queue.run, queue.name).counts["queued"] == 12


def test_too_many_children_are_refused(queue: Queue) -> None:
    queue.submit("p")
    queue.client.zadd(f"{queue.prefix}children:p", {f"x{n}": n for n in range(16384)})
    assert submit_refused(queue, "c", after=["p"]) == ("crowded", "p")


def test_a_parent_that_is_put_off_is_waited_for(queue: Queue) -> None:
    queue.submit("p", max_attempts=2)
    queue.submit("c", after=["p"])
    queue.retry(queue.pull_one(), 0)
    assert queue.state("c") == "delayed"
    queue.make_due("p")
    assert queue.retry(queue.pull_one(), 0) == "dead"
    assert queue.error("c").cause == "attempts_exhausted"


def test_a_follower_is_a_parent_like_any(queue: Queue) -> None:
    equal = {"dedupe": True, "temperature": 0.0}
    queue.submit("lead", "follow", **equal)
    queue.submit("c", prompt=READS, after=["follow"])
    queue.submit("equal", after=["lead"], **equal)
    queue.commit(queue.pull_one(), "text")
    jobs = {job.job_id: job for job in queue.pull()}
    assert set(jobs) == {"c", "equal"}
    assert given(jobs["c"]) == [{"id": "follow", "state": "succeeded", "text": "text"}]


def test_a_waiting_job_counts_as_one_that_waits(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    queue.client.hset(f"{queue.prefix}meta", "limit", 2)
    assert queue.submit("d") == ["full"]
    assert submit_refused(queue, "d", after=["p"]) == ("full", "d")


def test_a_pause_holds_what_was_released(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    (parent,) = queue.pull()
    queue.run(registry.set_paused(queue.name, True))
    queue.commit(parent)
    assert queue.pull() == []
    queue.run(registry.set_paused(queue.name, False))
    assert queue.pull_one().job_id == "c"


def test_a_dead_child_is_replayed_with_what_it_was_given(queue: Queue) -> None:
    from pagemill.producer.client.preparer import Preparer
    from pagemill.producer.wire.schema.signing import Keys

    queue.submit("p")
    queue.submit("c", prompt=READS, after=["p"], max_attempts=1)
    queue.commit(queue.pull_one(), "text")
    assert queue.retry(queue.pull_one()) == "dead"
    (letter,) = queue.run(dead_letters.open_letters(queue.name, ["c"]))
    assert letter is not None
    queue.run(dead_letters.purge(queue.name, ["p"]))
    queue.client.delete(f"{queue.prefix}job:p", f"{queue.prefix}out:p")
    hmac_keys = Keys([b"0123456789abcdef"])
    item = Preparer(queue.name, "default", hmac_keys).replay(letter.payload, "c")
    (reply,) = queue.run(submissions.submit(queue.name, [item]))
    assert reply.status == "created"
    again = queue.pull_one()
    assert given(again) == [{"id": "p", "state": "succeeded", "text": "text"}]
    parts = split_payload(again.payload)
    submitted_at = again.submitted_at
    hmac_keys.check_payload(
        parts, queue=queue.name, job_id=again.job_id, tenant="default", submitted_at=submitted_at
    )


def test_a_batch_waits_and_is_cancelled_as_a_whole(queue: Queue) -> None:
    call_of(queue, {"a": [], "b": ["a"], "c": ["b"]})
    assert queue.run(batches.cancel(queue.name, "b", 0)) == (3, 3)
    counts = queue.counts("b")
    assert counts.cancelled == counts.total == 3
    assert {queue.error(name).code for name in "abc"} == {"cancelled"}


def test_who_hangs_up_on_the_parent_ends_what_waits(queue: Queue) -> None:
    queue.submit("p", waiter="w")
    queue.submit("c", after=["p"])
    assert queue.hang_up("w", "p") == ["cancelled"]
    assert queue.state("c") == "cancelled"


def test_an_adapters_jobs_wait_too(queue: Queue) -> None:
    queue.submit("p", adapter="one")
    queue.submit("c", adapter="one", after=["p"])
    queue.commit(queue.pull_one(models=("m", "m#one")))
    assert queue.pull(models=("m",)) == []
    assert queue.pull_one(models=("m", "m#one")).job_id == "c"


def test_a_worker_that_does_not_know_the_word_never_gets_one(queue: Queue) -> None:
    queue.submit("p")
    queue.submit("c", after=["p"])
    queue.commit(queue.pull_one())
    call = transitions.pull(queue.name, "w1", ["m"], 10, 1 << 40)
    args = tuple("1" if str(arg).startswith("1+after") else arg for arg in call.args)
    assert args != call.args
    old = transitions.Call(call.script, call.keys, args, call.parse)
    assert queue.run(old).jobs == []
