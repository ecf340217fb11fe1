"""The 32-bit starts of a CSR block, which count from its own first value.

Legend: R rows of the block.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sideband.errors import InvalidInput
from sideband.masks.rows import VALUES_AT_ONCE

START_BYTES: Final = 4


def starts_of(
    stored: memoryview,
    rows: int,
    vocab_size: int,
    *,
    malformed: Callable[[str, object, str], InvalidInput],
) -> NDArray[np.uint32]:
    """The starts as they lie there, [R + 1], all of them checked.

    Raises ``malformed(part, value, rule)`` when they do not begin with 0, run backwards, or give a
    row more values than the vocabulary has ids. Whether the block ends with the last value is for
    the caller to check.
    """
    starts_bytes = START_BYTES * (rows + 1)
    if len(stored) < starts_bytes:
        raise malformed("bytes", len(stored), f"must hold {rows} rows")
    starts_R = np.frombuffer(stored[:starts_bytes], "<u4")
    if starts_R[0] != 0:
        raise malformed("starts", int(starts_R[0]), "must begin with 0")
    for first in range(0, rows, VALUES_AT_ONCE):
        counts = np.diff(starts_R[first : first + VALUES_AT_ONCE + 1].astype(np.int64))
        if counts.min() < 0:
            raise malformed("starts", first + int(counts.argmin()), "must not run backwards")
        if counts.max() > vocab_size:
            raise malformed("row", int(counts.max()), f"keeps over {vocab_size} ids")
    return starts_R
