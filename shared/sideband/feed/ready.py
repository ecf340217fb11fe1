"""A frame as libzmq itself holds it: ready to be sent, as often as wanted.

Sending a large ``bytes`` without copying it makes pyzmq keep it alive, and wake a thread that takes
the interpreter's lock when libzmq is done: per message that costs as much as all else. What libzmq
owns, it counts itself.
"""

import zmq

ReadyFrame = zmq.Frame


def ready_frame(data: bytes) -> ReadyFrame:
    """A copy of ``data`` in libzmq's memory; ``data`` itself is not kept."""
    with memoryview(data) as view:  # the frame remembers what it was made of: a closed view
        return zmq.Frame(view, copy=True)
