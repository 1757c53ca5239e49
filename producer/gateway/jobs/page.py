"""The files of the page of jobs. They hold nothing secret: what the page shows, it asks for with an API key."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagemill.monitoring.live.assets import HEADERS, Asset, assets
from pagemill.producer.gateway.errors import not_found

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
