"""Bounds of the feed: bodies, frames, counts. ``sideband.feed`` obeys them."""

from typing import Final

STEP_BODY_BYTES_MAX: Final = 1 << 30  # inline rows of one step on a single node
HEADER_BYTES_MAX: Final = 1 << 16  # the longest is MICRO_BATCH with 1024 layer ids: about 4 KiB
MICRO_BATCH_FRAME_BYTES_MAX: Final = 8 + HEADER_BYTES_MAX + STEP_BODY_BYTES_MAX
REASON_CHARS_MAX: Final = 2048  # a failure must name a file and a range, not carry a trace
ROW_TOKENS_MAX: Final = 1 << 24  # 16 M tokens in one packed row
MICRO_BATCHES_MAX: Final = 4096  # per data rank and step
DP_SIZE_MAX: Final = 4096
CP_SIZE_MAX: Final = 1024
RANKS_MAX: Final = 1 << 16  # data × context × tensor × pipeline siblings
STEP_MAX: Final = (1 << 31) - 1
NAME_BYTES_MAX: Final = 256  # environment names are people's words, not ids
MESSAGE_FRAMES_MAX: Final = 2  # of what a rank sends; a message of more is refused unread
CREDIT_MAX: Final = 256  # micro batches on the way to one rank
PEER_QUEUE_MAX: Final = 4096  # messages that wait for one peer; credit keeps a rank far below
STEPS_HELD_MAX: Final = 64  # a setting may lower it, never raise it
WAITING_FOR_MAX: Final = 16  # ranks named in a PONG

assert PEER_QUEUE_MAX >= 4 * CREDIT_MAX, "credit and its releases and answers fit"
assert HEADER_BYTES_MAX > 1024 * 3 + 2 * REASON_CHARS_MAX, "any legal header fits"
