"""/v1/webhook_endpoints: webhooks that a tenant creates; those in the key file are not shown here."""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.gateway.api_keys import Event
from pagemill.producer.gateway.errors import ApiError, JsonResponse, not_found
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.pagination import after, page_body, read_paging
from pagemill.producer.gateway.request_parsing import read_object
from pagemill.producer.gateway.webhooks import OwnWebhook, policy_of
from pagemill.producer.wire.calls.gateway import hooks
from pagemill.producer.wire.schema.webhook_url import WebhookUrl
from pagemill.producer.wire.webhooks.policy import Refused, Unresolved

HOOK_ID = re.compile(r"we_[0-9a-f]{24}")
RESOLVE_S = 4.0
"""Seconds to resolve the host. If it takes longer, the address is checked at the first delivery, as at others."""


def _check_url(url: str) -> str:
    WebhookUrl.parse(url)
    return url


class WebhookRequest(BaseModel):
    """The request that creates a webhook."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    url: Annotated[str, AfterValidator(_check_url)]
    events: Annotated[list[Event], Field(min_length=1)] | None = None


class WebhookEndpoint(BaseModel):
    """The webhook object that clients receive."""

    id: str
    object: Literal["webhook_endpoint"]
    created_at: int
    url: str
    events: list[str]
    secret: str | None = None
    """Only set when it is created."""


class WebhookEndpoints:
    """Endpoints to create, list, retrieve and delete the webhooks of the caller's tenant."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._queue = gateway.config.queue

    async def create(self, request: Request) -> Response:
        """Create a webhook; only this response contains its secret."""
        caller = await self._gateway.admit(request)
        asked = _read(await read_object(request))
        hook_id = f"we_{secrets.token_hex(12)}"
        hook = OwnWebhook(
            name=hook_id,
            tenant=caller.tenant,
            url=asked.url,
            secret=f"whsec_{base64.b64encode(secrets.token_bytes(24)).decode()}",
            events=tuple(asked.events or get_args(Event)),
            created_at=int(await self._gateway.now()),
        )
        await self._check_address(hook)
        add = hooks.add(
            self._queue, caller.tenant, hook_id, hook.model_dump_json(exclude_defaults=True).encode()
        )
        if not (await self._gateway.run(add)).is_done:
            raise ApiError(429, f"a tenant has at most {hooks.MAX_HOOKS} webhooks", "too_many_webhooks")
        return JsonResponse(_body(hook) | {"secret": hook.secret})

    async def list(self, request: Request) -> Response:
        """Return the webhooks, the latest first, without their secrets."""
        caller = await self._gateway.admit(request)
        paging = read_paging(request)
        found = await self._gateway.run(hooks.read(self._queue, caller.tenant))
        rows = [_body(OwnWebhook.model_validate(value)) for value in found.values.values()]
        rows.sort(key=lambda row: (-row["created_at"], row["id"]))
        return JsonResponse(page_body(after(rows, paging), paging))

    async def retrieve(self, request: Request) -> Response:
        """Return a webhook, without its secret."""
        caller, hook_id = await self._gateway.admit(request), _id_of(request)
        found = await self._gateway.run(hooks.read(self._queue, caller.tenant))
        if hook_id not in found.values:
            raise not_found("webhook", hook_id)
        return JsonResponse(_body(OwnWebhook.model_validate(found.values[hook_id])))

    async def delete(self, request: Request) -> Response:
        """Delete a webhook; pending events are no longer sent to it."""
        caller, hook_id = await self._gateway.admit(request), _id_of(request)
        if not (await self._gateway.run(hooks.remove(self._queue, caller.tenant, hook_id))).is_done:
            raise not_found("webhook", hook_id)
        return JsonResponse({"id": hook_id, "object": "webhook_endpoint", "deleted": True})

    async def _check_address(self, hook: OwnWebhook) -> None:
        """Raise ApiError for a host with a private address; a host without an address may get one later."""
        policy = policy_of(hook, self._gateway.config)
        try:
            async with asyncio.timeout(RESOLVE_S):
                await asyncio.to_thread(policy.resolve, hook.url)
        except Refused as refusal:
            raise ApiError(400, str(refusal), "invalid_webhook", "url") from None
        except (Unresolved, TimeoutError):
            pass


def _read(body: dict[str, Any]) -> WebhookRequest:
    try:
        return WebhookRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        field = str(first["loc"][0])[:64]
        if first["type"] == "extra_forbidden":
            raise ApiError(
                400, f"parameter {field!a} is not supported", "unsupported_feature", field
            ) from None
        raise ApiError(400, f"{field}: {first['msg']}", "invalid_webhook", field) from None


def _body(hook: OwnWebhook) -> dict[str, Any]:
    return {
        "id": hook.name,
        "object": "webhook_endpoint",
        "created_at": hook.created_at,
        "url": hook.url,
        "events": list(hook.events),
    }


def _id_of(request: Request) -> str:
    """Return the id in the path. Raises ApiError if it is malformed."""
    name = str(request.path_params["webhook_id"])
    if not HOOK_ID.fullmatch(name):
        raise not_found("webhook", name)
    return name
