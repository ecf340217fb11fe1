"""Bounds of the proxy that are not settings: each with its reason."""

from typing import Final

ATTEMPTS_MAX: Final = 8  # more only delays the error that the client should see
ENGINES_MAX: Final = 1024
WORKERS_MAX: Final = 64  # each has its own connections to every engine
ANSWER_BYTES_MAX: Final = 1 << 30  # the largest inline P/D answer seen has 48 MB
UNKNOWN_ANSWER_BYTES: Final = 16 << 20  # counted for an answer that does not tell its size
ERROR_BYTES_MAX: Final = 64 << 10  # an engine's error body is read up to here
EVENT_BYTES_MAX: Final = ANSWER_BYTES_MAX  # the last event of a stream carries all routing rows
EVENTS_PER_TURN_MAX: Final = 64  # of one part of a stream, then others on the loop get their turn
OFFLOAD_BYTES_MIN: Final = 256 << 10  # JSON and base64 above this leave the event loop
VALUE_BYTES: Final = 32  # of JSON that take as long as a value of a turn that is encoded
EVENT_BESIDE_BYTES_MAX: Final = 8 << 20  # of an event beside long strings; kept sets come by token
LOGPROB_BYTES: Final = 128  # about what one token's log probability takes in JSON
BRANCHES_MAX: Final = 32  # token prefixes kept per session; older ones only cost asked rows
SESSION_FILES_MAX: Final = 4096  # files remembered per session, for its discard
SHOWN_MAX: Final = 1000  # rows of one admin listing
CLIENT_ID_CHARACTERS_MAX: Final = 96  # of a client's request id inside the upstream id
POLICY_VERSION_MAX: Final = 999_999_999  # v<k> has at most nine digits
PENDING_DELETES_MAX: Final = 100_000  # beyond it a second pass is left to the orphan sweep
COMPLETION_TOKENS_MAX: Final = 1 << 20  # of a choice; what looks at each takes 50 ms for so many
VALUES_MAX: Final = 1 << 20  # of a request's JSON, about; parsing so many takes 60 ms in one call
TOKEN_ID_MAX: Final = (1 << 31) - 1

assert OFFLOAD_BYTES_MIN < ANSWER_BYTES_MAX
# <client id>-<8 hex>.a<n>.<leg> must be a legal id of at most 128 characters
assert CLIENT_ID_CHARACTERS_MAX + len("-01234567.a8.p") <= 128
