"""Events of background responses and batches for webhooks, in OpenAI's and the Standard Webhooks format.

Webhooks are in the key file, or were created by their tenants. The end of a background response is an entry in the
outbox of a relay, written with the end itself; any gateway that claims it notifies the tenant's webhooks. For a batch,
the gateway that runs it notifies the webhooks, under the batch's lease.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from weakref import WeakValueDictionary

from pagemill.common.backoff import pause_after
from pagemill.producer.client import flows
from pagemill.producer.gateway.api_keys import Webhook
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.openai.responses import response_id
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.calls.gateway import hooks
from pagemill.producer.wire.calls.outbox import Notice
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import PagemillError, StoreError
from pagemill.producer.wire.schema.sealing import SealedError
from pagemill.producer.wire.schema.webhook_url import WebhookUrl
from pagemill.producer.wire.webhooks.delivery import TIMEOUT_S, DeliveryFailed, deliver, secret_bytes
from pagemill.producer.wire.webhooks.policy import Refused, Unresolved, WebhookPolicy
from pagemill.producer.wire.webhooks.receivers import Receiver, Receivers

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

RELAY = "gateway"
"""The relay of jobs with webhooks of a key file, for gateways that have one."""
OWN_RELAY = "hooks"
"""The relay of jobs with only webhooks that their tenant has created, which any gateway delivers."""
LOOK_S = 1.0
PAUSE_S = 0.05
"""Seconds between two reads, regardless of the number of deliveries that end."""
LISTED = 200
"""Maximum number of due events per read."""
POSTS_AT_ONCE = 128
TENANT_POSTS = 8
"""Maximum of those for one tenant."""
CLAIM_MS = round(4000 * TIMEOUT_S)
MAX_TRIES = 12
LAST_RETRY_S = 600.0
JITTER = 0.25
_ENDS = {"succeeded": "completed", "cancelled": "cancelled"}
"""Events by the job's state; for other states: failed."""


class OwnWebhook(Webhook):
    """A webhook that its tenant has created."""

    created_at: int


async def webhooks_of(gateway: Gateway, tenant: str, event: str | None = None) -> list[Webhook]:
    """Return the tenant's webhooks: all, or those subscribed to the event. Raises the queue's errors."""
    found = await gateway.run(hooks.read(gateway.config.queue, tenant))
    own = (OwnWebhook.model_validate(value) for value in found.values.values())
    return [*gateway.keys.webhooks(tenant, event), *(one for one in own if event in (None, *one.events))]


async def relay_of(gateway: Gateway, tenant: str) -> str | None:
    """Return the relay of the tenant's background responses; None if there are no webhooks for them."""
    if gateway.keys.webhooks(tenant):
        return RELAY
    return OWN_RELAY if await webhooks_of(gateway, tenant) else None


def policy_of(webhook: Webhook, config: GatewayConfig) -> WebhookPolicy:
    """Return the policy for the webhook's own host. Only the key file, not tenants, may allow private addresses."""
    url = WebhookUrl.parse(webhook.url)
    host = f"[{url.host}]" if ":" in url.host else url.host
    is_own = isinstance(webhook, OwnWebhook)
    return WebhookPolicy(
        (f"{host}:{url.port}",), config.webhook_allow_private if is_own else webhook.allow_private
    )


class Webhooks:
    """Delivers events to the webhooks of their tenant."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._receivers = Receivers(gateway.config.webhook_retry_s, receiver_of=Receiver)
        self._posts = ThreadPoolExecutor(POSTS_AT_ONCE, thread_name_prefix="pagemill-webhook")
        """A separate pool: a webhook that hangs must not occupy threads that requests need."""
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant."""

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Created for the first event, since reading the certificates takes about 50 ms."""
        return ssl.create_default_context()

    async def run(self) -> None:
        """Deliver the events of responses until cancelled. A tenant whose webhooks hang delays only its own."""
        changed = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()
        later_ms: dict[str, dict[str, int]] = {}
        try:
            while True:
                changed.clear()
                for relay in (RELAY, OWN_RELAY) if self._gateway.keys.has_webhooks else (OWN_RELAY,):
                    try:
                        postponed = later_ms.pop(relay, {})
                        claimed, later_ms[relay] = await self._claim(relay, postponed)
                        for notice in claimed:
                            tasks.add(task := asyncio.create_task(self._notify(notice, relay)))
                            task.add_done_callback(tasks.discard)
                            task.add_done_callback(lambda _: changed.set())
                    except PagemillError as error:
                        logger.warning("webhooks wait for the queue: %s", error, extra=IN_LOOP)
                    except Exception:
                        logger.exception("delivering webhooks failed; continuing")
                await asyncio.sleep(PAUSE_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), LOOK_S)
        finally:
            for task in tasks:
                task.cancel()

    async def _claim(self, relay: str, postponed: dict[str, int]) -> tuple[list[Notice], dict[str, int]]:
        """Return the deliveries to start, and for the next call those to postpone."""
        queue = self._gateway.config.queue
        pending = await self._gateway.run(outbox.read_due(queue, LISTED, postponed, relay=relay))
        choice = self._receivers.choose(pending.first)
        wanted = [each.job_id for each in choice.start]
        claimed: list[Notice] = []
        try:
            if wanted:
                claim = outbox.claim(queue, len(wanted), CLAIM_MS, relay=relay, job_ids=wanted)
                claimed = await self._gateway.run(claim)
        finally:
            for job_id in {*wanted} - {notice.outcome.job_id for notice in claimed}:
                self._receivers.ended(job_id, None)
        return claimed, choice.later_ms

    async def _notify(self, notice: Notice, relay: str) -> None:
        outcome, is_sent = notice.outcome, None
        kind = _ENDS.get(outcome.state or "", "failed")
        with suppress(StoreError, SealedError):  # then it is not known whether the output was cut off
            outcome = await self._gateway.producer.run_flow(flows.loaded(outcome))
        if outcome.result is not None and outcome.result.outputs[0].finish_reason == "length":
            kind = "incomplete"
        subject = response_id(outcome.job_id)
        try:
            is_sent = await self._send(notice.tenant, f"response.{kind}", subject, notice.finished_at)
            again_s = None if is_sent else self._again_s(f"response.{kind}", subject, notice.tries)
            again_ms = None if again_s is None else round(1000 * again_s)
            call = outbox.finish_delivery(
                self._gateway.config.queue, outcome.job_id, notice.tries, again_ms, relay=relay
            )
            await self._gateway.run(call)
        except PagemillError as error:
            logger.warning("webhooks wait for the queue: %s", error, extra=IN_LOOP)
        except Exception:
            logger.exception("delivering webhooks failed; continuing")
        finally:
            self._receivers.ended(outcome.job_id, is_sent)

    async def deliver(self, tenant: str, kind: str, subject: str, created: float, tries: int) -> float | None:
        """Send an event to every webhook of the tenant that subscribes to it.

        Args:
            subject: Id of the response or batch.
            created: Unix seconds of the event.
            tries: Attempts, including this one.

        Returns:
            Seconds until all are retried; None if there is no next attempt.
        """
        is_sent = await self._send(tenant, kind, subject, created)
        return None if is_sent else self._again_s(kind, subject, tries)

    async def _send(self, tenant: str, kind: str, subject: str, created: float) -> bool:
        """Send an event to every webhook that subscribes to it. Returns False if all must be retried."""
        event_id = f"evt_{subject}"
        event = {"id": event_id, "object": "event", "created_at": int(created), "type": kind}
        body = json.dumps(event | {"data": {"id": subject}}).encode()
        turns = self._turns.setdefault(tenant, asyncio.Semaphore(TENANT_POSTS))

        async def send(webhook: Webhook) -> bool:
            async with turns:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._posts, self._post, webhook, event_id, body)

        return all(await asyncio.gather(*map(send, await webhooks_of(self._gateway, tenant, kind))))

    def _again_s(self, kind: str, subject: str, tries: int) -> float | None:
        """Return the seconds until the next attempt, or None if there is none."""
        if tries >= MAX_TRIES:
            logger.error("%s of %s: given up after %d attempts", kind, subject, tries)
            return None
        return pause_after(tries, self._gateway.config.webhook_retry_s, LAST_RETRY_S, JITTER)

    def _post(self, webhook: Webhook, event_id: str, body: bytes) -> bool:
        """Send an event once. Returns False if it must be retried. Blocks."""
        try:
            policy = policy_of(webhook, self._gateway.config)
            deliver(policy.resolve(webhook.url), event_id, body, [secret_bytes(webhook.secret)], self._tls)
        except Refused as refusal:
            logger.warning("webhook %s is not called: %s", webhook.name, refusal)
        except (DeliveryFailed, Unresolved) as failure:
            logger.warning("webhook %s: %s failed (%s)", webhook.name, event_id, failure)
            return isinstance(failure, DeliveryFailed) and failure.is_final
        return True
