"""The files of the page of jobs. They hold nothing secret: what the page shows, it asks for with an API key."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagemill.monitoring.live.assets import HEADERS, Asset, assets
from pagemill.producer.gateway.errors import not_found
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.wire.calls.job_lists import jobs_page
from pagemill.producer.wire.schema.errors import PagemillError

ANNOUNCE_EVERY_S = 10.0
ANNOUNCED_MS = 30_000
_SHARED = ("page.css", "icon.svg", "rows.js", "theme.js")
"""Files of the live page that this one uses too."""
_POLICY = "Content-Security-Policy"
_HEADERS = HEADERS | {
    _POLICY: f"{HEADERS[_POLICY]}; require-trusted-types-for 'script'; trusted-types 'none'"
}


def page_routes() -> list[Route]:
    """Routes of the page and of its files."""
    page = assets("jobs_page")
    found = page | {name: assets()[name] for name in _SHARED}

    async def index(request: Request) -> Response:
        return _answer(page["index.html"])

    async def file(request: Request) -> Response:
        name = str(request.path_params["name"])
        if name not in found:
            raise not_found("file", name)
        return _answer(found[name])

    return [
        Route("/jobs", index, methods=["GET"]),
        Route("/jobs/files/{name}", file, methods=["GET"]),
    ]


def _answer(asset: Asset) -> Response:
    return Response(asset.body, headers={**_HEADERS, "content-type": asset.content_type})


async def announce_page(gateway: Gateway) -> None:
    """Keep the page's address in Redis, for links from the workers' live pages, until cancelled."""
    address = gateway.config.public_url
    while address:
        with contextlib.suppress(PagemillError):
            await gateway.run(jobs_page(gateway.config.queue, f"{address.rstrip('/')}/jobs", ANNOUNCED_MS))
        await asyncio.sleep(ANNOUNCE_EVERY_S)
