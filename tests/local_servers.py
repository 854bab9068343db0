"""Servers on this machine that stand in for others, and stop at once when a test is done with them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests by `handler` in threads of their own; gives the server's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # By default it looks twice a second whether it should stop.
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
