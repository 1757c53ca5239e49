"""Discovery of the server: by an explicit address, PAGEMILL_REDIS_URL, or the embedded server's server.json.

This module only finds it; a worker starts the embedded server and writes the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import quote

from pagemill.producer.wire.schema.errors import RedisUnavailable

URL_VARIABLE = "PAGEMILL_REDIS_URL"
USERNAME_VARIABLE = "PAGEMILL_REDIS_USERNAME"
PASSWORD_VARIABLE = "PAGEMILL_REDIS_PASSWORD"
STATE_DIR_VARIABLE = "PAGEMILL_STATE_DIR"
SERVER_FILE = "server.json"


def state_dir() -> Path:
    """Return the directory of the embedded server's files: PAGEMILL_STATE_DIR, or below XDG_STATE_HOME."""
    if given := os.environ.get(STATE_DIR_VARIABLE):
        return Path(given)
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    # According to the XDG specification, a relative path is ignored.
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "pagemill"


def find_redis(url: str | None = None, directory: Path | None = None) -> str:
    """Return the URL to connect to. Raises RedisUnavailable, with a hint what to type, if there is none."""
    if given := url or os.environ.get(URL_VARIABLE):
        return with_credentials(given)
    found = _embedded_url(directory or state_dir())
    if found is None:
        raise RedisUnavailable(
            f"no Redis server: give a URL, set {URL_VARIABLE}, or start a worker with an embedded server: "
            "pagemill worker --model smollm2"
        )
    return found


def with_credentials(url: str) -> str:
    """Return the URL with user and password from the environment, unless it has its own.

    Every user of the machine can see a URL on a command line, but not the environment.
    """
    username, password = os.environ.get(USERNAME_VARIABLE, ""), os.environ.get(PASSWORD_VARIABLE)
    scheme, separator, rest = url.partition("://")
    if password is None or not separator or "@" in rest.partition("?")[0]:
        return url
    return f"{scheme}://{quote(username, safe='')}:{quote(password, safe='')}@{rest}"


def _embedded_url(directory: Path) -> str | None:
    """Return the running embedded server's address: its unix socket, if it has one.

    Raises RedisUnavailable if another user's directory hides it.
    """
    try:
        record = json.loads((directory / SERVER_FILE).read_text(encoding="utf-8"))
        pid, url = int(record["pid"]), str(record["url"])
        unix_socket = record.get("unix_socket") or record.get("socket")
    except PermissionError:
        raise RedisUnavailable(
            f"state directory {directory}: permission denied; run as its owner, or set {URL_VARIABLE}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not _lives(pid):
        return None
    if unix_socket and Path(unix_socket).exists():
        return f"unix://{quote(str(unix_socket))}"
    return url


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
