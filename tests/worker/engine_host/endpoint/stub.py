"""A small OpenAI-compatible server that fails as configured.

It writes a fixed text word by word, and continues if the prompt, or the last message, already contains words
of it. Without configured faults it also runs as a process: `python -m ...stub PORT`, to be killed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [f"word{number} " for number in range(200)]
TEXT = "".join(WORDS)
KEY = "sk-a-secret-key"


class Stub:
    """The server's responses. Tests change the fields while it runs."""

    def __init__(self) -> None:
        self.model = "stub-model"
        self.owned_by = "vllm"
        self.more_models: list[str] = []
        self.answers_as: str | None = None
        """The model that events name, if it differs."""
        self.version = "1.0"
        self.delay_s = 0.0
        """Delay between two events."""
        self.fault = ""
        """The name of a fault of generating requests; see `Handler._stream`."""
        self.fault_after = 3
        """Events before the fault."""
        self.num_faults = 10**9
        """Number of requests with the fault."""
        self.status = 200
        """Status of all generating requests, if it is not 200."""
        self.metrics = ""
        """In it, RUNNING represents the requests that run here, plus three requests of other clients."""
        self.slots: Any = None
        self.key = ""
        """If set, requests without this key get a 401."""
        self.honors_schemas = True
        self.has_completions = True
        self.rejects = ""
        """A field that streaming requests must not have."""
        self.num_running = 0
        self.most_running = 0
        self.bodies: list[dict[str, Any]] = []
        """Streaming requests, without those of the startup, which have max_tokens 1."""
        self.end = threading.Event()
        """Ends hanging responses."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        stub, path = self.stub, self.path
        if not self._is_allowed():
            self._send(401, b"{}")
        elif path == "/v1/models":
            entry = {
                "id": stub.model, "owned_by": stub.owned_by, "created": time.time(), "max_model_len": 4096,
            }  # fmt: skip
            self._send_json({"data": [entry, *({"id": name} for name in stub.more_models)]})
        elif path == "/version":
            self._send_json({"version": stub.version})
        elif path == "/metrics":
            metrics = stub.metrics.replace("RUNNING", str(stub.num_running + 3))
            self._send(200 if metrics else 404, metrics.encode())
        elif path == "/slots" and stub.slots is not None:
            self._send(200, json.dumps(stub.slots).encode())
        else:
            self._send(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stub = self.stub
        if not self._is_allowed():
            self._send(401, b"{}")
        elif self.path == "/v1/completions" and not stub.has_completions:
            self._send(404, b"{}")
        elif not body.get("stream"):
            self._send_json({"model": stub.model, "choices": [self._choice(self._probed(body), "stop")]})
        elif stub.rejects and stub.rejects in body:
            self._send(400, b'{"error": {"code": "unknown_field"}}')
        elif body.get("max_tokens") == 1:
            self._stream(body, is_probe=True)
        elif stub.status != 200 and self._takes_fault():
            headers = {"retry-after": "0.2"} if stub.status == 429 else {}
            error = {"error": {"message": f"quoted: {body} {self.headers}", "code": "some_code"}}
            self._send(stub.status, json.dumps(error).encode(), headers)
        else:
            self._stream(body)

    def _is_allowed(self) -> bool:
        return not self.stub.key or self.headers.get("authorization") == f"Bearer {self.stub.key}"

    def _takes_fault(self) -> bool:
        self.stub.num_faults -= 1
        return self.stub.num_faults >= 0

    def _probed(self, body: dict[str, Any]) -> str:
        if self.stub.honors_schemas and "response_format" in body:
            return '{"pagemill": 1}'
        if self.stub.honors_schemas and "structured_outputs" in body:
            return str(body["structured_outputs"]["choice"][0])
        return WORDS[0]

    def _choice(self, text: str, reason: str | None, index: int = 0) -> dict[str, Any]:
        made = {"index": index, "finish_reason": reason}
        if self.path == "/v1/completions":
            return made | {"text": text}
        return made | {"message": {"content": text}, "delta": {"content": text}}

    def _stream(self, body: dict[str, Any], *, is_probe: bool = False) -> None:
        stub = self.stub
        if not is_probe:
            stub.bodies.append(body)
        stub.num_running += 1
        stub.most_running = max(stub.most_running, stub.num_running)
        fault = stub.fault if stub.fault and not is_probe and self._takes_fault() else ""
        try:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for number, event in enumerate(self._events(body, fault)):
                if stub.end.is_set():
                    self._fail("reset")
                    return
                if fault and number == stub.fault_after and self._fail(fault):
                    return
                self._event(json.dumps(event))
                time.sleep(stub.delay_s)
            self._event("[DONE]")
            self._chunk(b"")
        except OSError:
            self.close_connection = True
        finally:
            stub.num_running -= 1

    def _events(self, body: dict[str, Any], fault: str) -> Iterator[dict[str, Any]]:
        given = body.get("prompt") or body["messages"][-1]["content"]
        given = given if isinstance(given, str) else ""
        first = sum(1 for word in WORDS if word in given)
        most, samples = body.get("max_tokens", len(WORDS)), body.get("n", 1)
        for step in range(10**9 if fault == "endless" else min(most, len(WORDS) - first)):
            word = WORDS[(first + step) % len(WORDS)]
            for index in range(samples):
                name = self.stub.answers_as or self.stub.model
                yield {"model": name, "choices": [self._choice(word, None, index)]}
        reason = "length" if "max_tokens" in body and most <= len(WORDS) - first else "stop"
        for index in range(samples):
            yield {"model": self.stub.model, "choices": [self._choice("", reason, index)]}
        total = samples * min(most, len(WORDS) - first)
        yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": total}}

    def _fail(self, fault: str) -> bool:
        """Fail; True if the response ends here."""
        match fault:
            case "truncated":
                self._chunk(b"")
            case "reset":
                self.close_connection = True
                self.connection.close()
            case "hanging":
                self.stub.end.wait(60)
            case "trickle":
                while not self.stub.end.wait(0.05):
                    self._chunk(b":")
            case "invalid":
                self._event('{"choices": [')
            case "wrong_types":
                self._event('{"choices": [{"index": "0", "text": 7}]}')
            case "error_event":
                self._event('{"error": {"message": "it failed"}}')
            case "huge_line":
                while not self.stub.end.is_set():
                    self._chunk(b"x" * 65536)
            case _:
                return False
        return True

    def _event(self, data: str) -> None:
        self._chunk(f"data: {data}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def serving(stub: Stub, port: int = 0, handler: type[Handler] = Handler) -> Iterator[str]:
    """Serve on a thread; yields the URL that ends in /v1."""
    server = Server(("127.0.0.1", port), type("StubHandler", (handler,), {"stub": stub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        stub.end.set()
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    slow = Stub()
    slow.delay_s = 0.05
    with serving(slow, int(sys.argv[1])):
        threading.Event().wait()
