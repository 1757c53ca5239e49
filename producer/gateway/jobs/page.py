"""The files of the jobs page and of the playground. They contain no secrets: requests carry the API key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

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
"""Files of the live page that these pages also use."""
_OF_JOBS = ("jobs.css", "asking.js", "tables.js")
"""Files of the jobs page that the playground also uses."""
_POLICY = "Content-Security-Policy"
_HEADERS = HEADERS | {
    _POLICY: f"{HEADERS[_POLICY]}; require-trusted-types-for 'script'; trusted-types 'none'"
}


def page_routes() -> list[Route]:
    """Return the routes of the jobs page and of the playground, and of their files."""
    shared = {name: assets()[name] for name in _SHARED}
    jobs, play = assets("jobs_page"), assets("play_page")
    return [
        *_routes("/jobs", jobs | shared),
        *_routes("/play", play | shared | {name: jobs[name] for name in _OF_JOBS}),
    ]


def _routes(path: str, found: Mapping[str, Asset]) -> list[Route]:
    async def index(request: Request) -> Response:
        return _answer(found["index.html"])

    async def file(request: Request) -> Response:
        name = str(request.path_params["name"])
        if name not in found:
            raise not_found("file", name)
        return _answer(found[name])

    return [
        Route(path, index, methods=["GET"]),
        Route(f"{path}/files/{{name}}", file, methods=["GET"]),
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
