"""Operating a rollout as flows (see effects.py)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from pagemill.common.bounds import REVISION_NAME
from pagemill.producer.client.effects import Flow
from pagemill.producer.client.preparer import Preparer
from pagemill.producer.client.replay.flow import ReplayOptions, verify_each
from pagemill.producer.wire.calls import registry, rollouts
from pagemill.producer.wire.calls.registry import StatsPage, WorkerInfo
from pagemill.producer.wire.calls.rollouts import MAX_LEAST, SIDES, ChangeReply, Rollout, RolloutStatus, Side
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import RolloutRefused
from pagemill.producer.wire.server.scripts import Call


def start(queue: str, model: str, wanted: Rollout, *, force: bool = False) -> Flow[RolloutStatus]:
    """Open a rollout. Raises RolloutRefused: no worker has the revision (unless `force`), or another one is active."""
    if not 0 <= wanted.share <= 1 or not 0 <= wanted.margin <= 1:
        raise RolloutRefused("a share and a margin are fractions, from 0 to 1")
    if not 1 <= wanted.least <= MAX_LEAST:
        raise RolloutRefused(f"the canary is judged after 1 to {MAX_LEAST} executions")
    if not keys.MODEL_PATTERN.fullmatch(model) or not REVISION_NAME.fullmatch(wanted.to):
        raise RolloutRefused("the name of a served model and a revision that workers announce are required")
    live = yield from live_revisions(queue, model)
    if wanted.to not in live and not force:
        served = ", ".join(sorted(live)) or "none"
        raise RolloutRefused(
            f"no live worker of {model} announces revision {wanted.to} (they announce: {served}); start one first"
        )
    yield from _move_back(queue, model)
    yield from _change(model, rollouts.start(queue, model, wanted))
    return (yield from status(queue, model))


def set_share(queue: str, model: str, share: float) -> Flow[RolloutStatus]:
    """Change the canary's share. Raises RolloutRefused."""
    if not 0 <= share <= 1:
        raise RolloutRefused("a share is a fraction, from 0 to 1")
    return (yield from _changed(queue, model, rollouts.set_share(queue, model, share)))


def halt(queue: str, model: str) -> Flow[RolloutStatus]:
    return (yield from _changed(queue, model, rollouts.halt(queue, model)))


def roll_back(queue: str, model: str) -> Flow[RolloutStatus]:
    return (yield from _changed(queue, model, rollouts.roll_back(queue, model)))


def finish(queue: str, model: str) -> Flow[None]:
    """Merge the two sides, and delete the rollout.

    Raises RolloutRefused: there is no rollout, or another operator changed it meanwhile.
    """
    yield from _change(model, rollouts.end(queue, model))
    yield from _move_back(queue, model)
    found: list[RolloutStatus] = yield rollouts.statuses(queue, (model,))
    if found:  # otherwise another operator finished it
        reply: ChangeReply = yield rollouts.forget(queue, found[0])
        if reply == "busy":
            raise RolloutRefused(
                f"the rollout of {model} was changed by another operator meanwhile and is kept; check its status"
            )


def status(queue: str, model: str) -> Flow[RolloutStatus]:
    """Return a rollout with its waiting jobs. Raises RolloutRefused."""
    found: list[RolloutStatus] = yield rollouts.statuses(queue, (model,))
    if not found:
        raise RolloutRefused(f"{model} has no rollout")
    waits = yield from _waiting(queue, model, found[0].to)
    sides = {
        side: replace(getattr(found[0], side), waiting=waits[side][0], oldest_s=waits[side][1])
        for side in SIDES
    }
    return replace(found[0], **sides)


def compare(queue: str, preparer: Preparer, model: str, sample: int, options: ReplayOptions) -> Flow[None]:
    """Emit a Verification for each of up to `sample` jobs of the canary, run again on the stable revision.

    That is `options.revision`, or the one that most live workers announce except the canary's. The counts are stored
    for the status. Raises RolloutRefused: no rollout, or no worker of another revision.
    """
    found = yield from status(queue, model)
    revision = options.revision
    if revision is None:
        live = yield from live_revisions(queue, model)
        live.pop(found.to, None)
        if not live:
            raise RolloutRefused(f"no live worker of {model} announces a revision in addition to {found.to}")
        revision = live.most_common(1)[0][0]
    ids: list[str] = yield rollouts.sample(queue, model)
    chosen = random.sample(ids, min(sample, len(ids)))
    uncounted = replace(options, revision=revision, is_counted=False)
    agreed, compared = yield from verify_each(queue, preparer, chosen, uncounted)
    yield rollouts.note_agreement(queue, model, compared, agreed)


def live_revisions(queue: str, model: str) -> Flow[Counter[str]]:
    """Return the revisions that live workers of the model announce, with their numbers."""
    alive: list[WorkerInfo] = yield registry.workers(queue)
    return Counter(worker.revision for worker in alive if model in worker.models and worker.revision)


def _changed(queue: str, model: str, call: Call[ChangeReply]) -> Flow[RolloutStatus]:
    yield from _change(model, call)
    yield from _move_back(queue, model)
    return (yield from status(queue, model))


def _change(model: str, call: Call[ChangeReply]) -> Flow[None]:
    reply: ChangeReply = yield call
    match reply:
        case "none":
            raise RolloutRefused(f"{model} has no rollout")
        case "busy":
            raise RolloutRefused(f"another rollout of {model} is on: roll it back or finish it first")
        case "over":
            raise RolloutRefused(f"the rollout of {model} is over: start another one")
        case "ok":
            pass


def _move_back(queue: str, model: str) -> Flow[None]:
    left = 1
    while left:
        left = yield rollouts.move_back(queue, model)


def _waiting(queue: str, model: str, canary: str) -> Flow[dict[Side, tuple[int, float]]]:
    found: dict[Side, tuple[int, float]] = dict.fromkeys(SIDES, (0, 0.0))
    cursor = ""
    while cursor != "0":
        page: StatsPage = yield registry.stats_page(queue, cursor or "0")
        cursor = page.cursor
        rollouts.add_waiting(found, page, model, canary)
    return found
