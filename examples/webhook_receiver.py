"""Receives webhooks on this machine: checks each signature and prints a line. docs/webhooks.md has the whole recipe.

WEBHOOK_SECRET=whsec_... python examples/webhook_receiver.py receiver.pem 8443
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import os
import ssl
import sys
import time

TOLERANCE_S = 300


def is_genuine(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """Check the signature of the Standard Webhooks scheme. `headers` have lower-case names."""
    timestamp = headers.get("webhook-timestamp", "")
    if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > TOLERANCE_S:
        return False
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = b".".join((headers.get("webhook-id", "").encode(), timestamp.encode(), body))
    mine = "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    given = headers.get("webhook-signature", "").split()  # one per key, while keys are rotated
    return any(hmac.compare_digest(mine, signature) for signature in given)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers 204 to what is signed, 401 to the rest."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        is_ours = is_genuine(os.environ["WEBHOOK_SECRET"], headers, body)
        if is_ours:
            event = json.loads(body)
            print(event["type"], event["data"]["id"], flush=True)  # once per id: it may come twice
        self.send_response(204 if is_ours else 401)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing else."""


def main(certificate: str, port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    print(f"https://localhost:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
