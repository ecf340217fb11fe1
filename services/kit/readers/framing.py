"""Messages between a service and a reader: a prefix, a head, a body.

``<B Q Q`` (what is wanted, bytes of the head, bytes of the body), both sides on one machine.
"""

import struct
from typing import Final

PREFIX: Final = struct.Struct("<BQQ")
BEGIN: Final = 0  # a question that begins a conversation
GO_ON: Final = 1  # a question that follows in it, or the answer to one
END: Final = 2  # nothing follows in it, and nothing is answered

assert PREFIX.size == 17, "packed without padding"
