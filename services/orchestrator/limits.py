"""Bounds of the orchestrator that no setting changes. Counts, bytes and seconds."""

from typing import Final

from services.kit.turns import TURNS_MAX

SEGMENTS_PER_TURN_MAX: Final = 8192  # a gap splits a segment; this many gaps is a broken engine
TOKENS_PER_TURN_MAX: Final = 1 << 24
GROUP_SIZE_MAX: Final = 4096
REWARD_MAX: Final = 1e30  # differences of rewards must stay finite in float32
DETAIL_CHARACTERS_MAX: Final = 500  # of a reason that is kept
READ_INLINE_BYTES_MAX: Final = 64 << 10  # larger bodies are read in a thread, large ones elsewhere
LIST_ITEMS_MAX: Final = 1000  # of one admin answer

CHANGES_PER_COMMIT_MAX: Final = 256  # about 2,000 rows: some 20 ms of work on the event loop
CHANGES_WAITING_MAX: Final = 8192  # more is a 503: the ledger is behind
ROWS_PER_CALL_MAX: Final = 500  # to the database, then others on the loop get their turn

FILES_PER_STAT: Final = 64  # looked at by one thread, one round trip each

FILE_THREADS: Final = 16
RELEASES_MAX: Final = 10_000  # turns that the proxy is to be told about; beyond, they expire there
DISCARD_ATTEMPTS_MAX: Final = 3
RETRY_WAIT_S_MAX: Final = 5.0

assert SEGMENTS_PER_TURN_MAX * TURNS_MAX < 1 << 31, "counts travel as int32"
