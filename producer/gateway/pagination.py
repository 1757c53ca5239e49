"""Paginated lists in OpenAI's style: `limit`, and `after`, the id of the previous page's last row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from pagemill.producer.gateway.errors import ApiError


@dataclass(frozen=True, slots=True)
class Paging:
    after: str
    limit: int


def read_paging(request: Request, others: Collection[str] = (), *, longest: int = 100) -> Paging:
    """Read the query's paging. Raises ApiError, also for a parameter that is neither known nor in `others`."""
    query = request.query_params
    known = {"limit", "after", *others} | ({"order"} if others else set())
    for name in query:
        if name not in known:
            raise ApiError(400, f"parameter {name[:64]!a} is not supported", "unsupported_feature", name[:64])
    if query.get("order") not in (None, "asc", "desc"):
        raise ApiError(400, "order is asc or desc", "invalid_order", "order")
    text = query.get("limit", str(min(longest, 20 if longest == 100 else longest)))
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and 1 <= int(text) <= longest):
        raise ApiError(400, f"limit is a whole number from 1 to {longest}", "invalid_limit", "limit")
    return Paging(query.get("after", ""), int(text))


def after(rows: list[dict[str, Any]], paging: Paging) -> list[dict[str, Any]]:
    """Return the rows after the previous page's last id. Raises ApiError if that is unknown."""
    if not paging.after:
        return rows
    places = [place for place, row in enumerate(rows) if row["id"] == paging.after]
    if not places:  # an empty page would look like the end of the list
        raise unknown_cursor(paging)
    return rows[places[0] + 1 :]


def unknown_cursor(paging: Paging) -> ApiError:
    message = f"after: the list has no {paging.after[:64]!a}; begin again without after"
    return ApiError(404, message, "cursor_not_found", "after")


def page_body(rows: list[dict[str, Any]], paging: Paging) -> dict[str, Any]:
    """Return the page with the first `limit` rows; a further row means that there are more."""
    shown = rows[: paging.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rows) > len(shown),
    }
