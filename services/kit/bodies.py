"""What a request body may cost before it is refused: bounds on its faults, not only on its bytes.

pydantic collects every fault of a body, with the value at fault: a few megabytes of wrong items or
of unknown members become gigabytes of faults. A list stops at its first wrong item (``Items``); a
body with many unknown members has one fault (``Closed``).
"""

from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# A body that only steers something; what carries tokens, rows or steps has the service's limit.
CONTROL_BYTES_MAX: Final = 2 << 20
CONTROL_S_MAX: Final = 60.0  # until such a body is there
UNKNOWN_SHOWN_MAX: Final = 20
NAME_CHARACTERS_MAX: Final = 100

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]


class Closed(BaseModel):
    """A request: unknown members are refused, numbers are not made of strings.

    Validate Python objects, not JSON text: the check below would build them a second time.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > len(cls.model_fields) + UNKNOWN_SHOWN_MAX:
            first = next(name for name in data if name not in cls.model_fields)
            raise PydanticCustomError(
                "unknown_members",
                "has {count} members, the first unknown is {name}",
                {"count": len(data), "name": ascii(first)[:NAME_CHARACTERS_MAX]},
            )
        return data
