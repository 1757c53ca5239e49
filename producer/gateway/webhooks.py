"""Events of background responses and batches for webhooks, in OpenAI's and the Standard Webhooks format.

Webhooks are in the key file, or were created by their tenants. The end of a background response is an entry in the
outbox of a relay, written with the end itself; any gateway that claims it notifies the tenant's webhooks. A batch is
notified by the gateway that runs it, under the batch's lease.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from functools import cached_property

from pagemill.producer.gateway.api_keys import Webhook
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.openai.responses import response_id
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.calls.gateway import hooks
from pagemill.producer.wire.calls.outbox import Notice
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.schema.webhook_url import WebhookUrl
from pagemill.producer.wire.webhooks.delivery import TIMEOUT_S, DeliveryFailed, deliver, secret_bytes
from pagemill.producer.wire.webhooks.policy import Refused, Unresolved, WebhookPolicy

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

RELAY = "gateway"
"""The relay of jobs with webhooks of a key file, for gateways that have one."""
OWN_RELAY = "hooks"
"""The relay of jobs with none but those that their tenant has created: any gateway delivers these."""
AT_ONCE = 8
LOOK_S = 1.0
CLAIM_MS = round(4000 * TIMEOUT_S)
MAX_TRIES = 12
LAST_RETRY_S = 600.0
_ENDS = {"succeeded": "completed", "cancelled": "cancelled"}
"""Events by the job's state; of the others: failed."""


class OwnWebhook(Webhook):
    """A webhook that its tenant has created."""

    created_at: int


async def webhooks_of(gateway: Gateway, tenant: str, event: str | None = None) -> list[Webhook]:
    """Return the tenant's webhooks: all, or those that want the event. Raises the queue's errors."""
    found = await gateway.run(hooks.read(gateway.config.queue, tenant))
    own = (OwnWebhook.model_validate(value) for value in found.values.values())
    return [*gateway.keys.webhooks(tenant, event), *(one for one in own if event in (None, *one.events))]


async def relay_of(gateway: Gateway, tenant: str) -> str | None:
    """Return the relay of the tenant's background responses; None if nothing is to be notified of them."""
    if gateway.keys.webhooks(tenant):
        return RELAY
    return OWN_RELAY if await webhooks_of(gateway, tenant) else None


def policy_of(webhook: Webhook, config: GatewayConfig) -> WebhookPolicy:
    """Return the policy for the webhook's own host. Tenants don't choose private addresses; the key file may."""
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

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Made for the first event: reading the certificates takes about 50 ms, which startup is spared."""
        return ssl.create_default_context()

    async def run(self) -> None:
        """Deliver the events of responses until cancelled."""
        queue = self._gateway.config.queue
        while True:
            notices: list[Notice] = []
            for relay in (RELAY, OWN_RELAY) if self._gateway.keys.has_webhooks else (OWN_RELAY,):
                try:
                    claim = outbox.claim(queue, AT_ONCE, CLAIM_MS, relay=relay)
                    notices += (claimed := await self._gateway.run(claim))
                    await asyncio.gather(*map(self._notify, claimed))
                except PagemillError as error:
                    logger.warning("webhooks wait for the queue: %s", error, extra=IN_LOOP)
                except Exception:
                    logger.exception("delivering webhooks failed; continuing")
            if len(notices) < AT_ONCE:
                await asyncio.sleep(LOOK_S)

    async def _notify(self, notice: Notice) -> None:
        outcome = notice.outcome
        kind = _ENDS.get(outcome.state or "", "failed")
        if outcome.result is not None and outcome.result.outputs[0].finish_reason == "length":
            kind = "incomplete"
        again_s = await self.deliver(
            notice.tenant, f"response.{kind}", response_id(outcome.job_id), notice.finished_at, notice.tries
        )
        again_ms = None if again_s is None else round(1000 * again_s)
        call = outbox.finish_delivery(
            self._gateway.config.queue, outcome.job_id, notice.tries, again_ms, relay=notice.url
        )
        await self._gateway.run(call)

    async def deliver(self, tenant: str, kind: str, subject: str, created: float, tries: int) -> float | None:
        """Send an event to every webhook of the tenant that wants it.

        Args:
            subject: Id of the response or batch.
            created: Unix seconds of the event.
            tries: Attempts, this one included.

        Returns:
            Seconds until all are to be tried again; None if there is no next attempt.
        """
        event_id = f"evt_{subject}"
        event = {"id": event_id, "object": "event", "created_at": int(created), "type": kind}
        body = json.dumps(event | {"data": {"id": subject}}).encode()
        wanted = await webhooks_of(self._gateway, tenant, kind)
        sent = await asyncio.gather(*(asyncio.to_thread(self._post, one, event_id, body) for one in wanted))
        if all(sent):
            return None
        if tries >= MAX_TRIES:
            logger.error("%s of %s: given up after %d attempts", kind, subject, tries)
            return None
        return min(LAST_RETRY_S, self._gateway.config.webhook_retry_s * 2.0 ** (tries - 1)) * random.uniform(
            0.75, 1.0
        )

    def _post(self, webhook: Webhook, event_id: str, body: bytes) -> bool:
        """Send an event once. Returns False if it is to be tried again. Blocks."""
        try:
            policy = policy_of(webhook, self._gateway.config)
            deliver(policy.resolve(webhook.url), event_id, body, [secret_bytes(webhook.secret)], self._tls)
        except Refused as refusal:
            logger.warning("webhook %s is not called: %s", webhook.name, refusal)
        except (DeliveryFailed, Unresolved) as failure:
            logger.warning("webhook %s: %s failed (%s)", webhook.name, event_id, failure)
            return False
        return True
