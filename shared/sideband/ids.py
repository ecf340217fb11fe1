"""Ids on the wire: opaque strings, 1 to 128 bytes of ``[A-Za-z0-9._:-]`` (SPEC section 10)."""

import re
from typing import Final, NewType

from sideband.errors import InvalidId

RunId = NewType("RunId", str)
RequestId = NewType("RequestId", str)
SessionId = NewType("SessionId", str)
RolloutId = NewType("RolloutId", str)
GroupId = NewType("GroupId", str)
LeaseId = NewType("LeaseId", str)
SampleId = NewType("SampleId", str)

ID_BYTES_MAX: Final = 128
# All but "." and "..", which mean something in a path and a URL; schemas know no look-ahead.
ID_PATTERN: Final = (
    r"^([A-Za-z0-9_:-][A-Za-z0-9._:-]{0,127}"
    r"|\.[A-Za-z0-9_:-][A-Za-z0-9._:-]{0,126}"
    r"|\.\.[A-Za-z0-9._:-]{1,126})$"
)
_ID = re.compile(ID_PATTERN)


def check_id(field: str, value: object) -> str:
    """``value`` itself when it is a legal id that is not a path component with a meaning.

    Raises InvalidId otherwise; ``field`` names the culprit in the message.
    """
    # fullmatch: with match, "$" would accept a trailing newline.
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise InvalidId(field, value)
    return value
