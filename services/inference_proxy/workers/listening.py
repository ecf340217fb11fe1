"""The listening sockets of one address: one for each worker, among which the kernel spreads."""

import socket


def listeners(host: str, port: int, workers: int) -> list[socket.socket]:
    """Bound, not listening yet. Raises OSError when anything listens there already.

    Port 0 picks a free one, the same for all.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Without it another proxy would silently share the port, and see half of the requests.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        port = probe.getsockname()[1]
    found = []
    for _ in range(workers):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        found.append(listener)
    return found
