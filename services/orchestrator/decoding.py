"""From the bytes of a delivered rollout, in either form, to what they say. Pure.

The service and its readers (``reading``) both decode here, so a body is refused in the same words
whoever reads it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec
import orjson
from pydantic import ValidationError

from services.kit.problems import Fault, faults_of
from services.kit.turns import TurnWire
from services.orchestrator.limits import DETAIL_CHARACTERS_MAX
from services.orchestrator.rollout_schemas import RolloutBody
from services.orchestrator.wire import ROLLOUT_CONTENT_TYPE, DeliveredWire, decode_rollout

JSON: Final = "application/json"
_TURNS: Final = msgspec.msgpack.Decoder(list[TurnWire])


class Undecodable(Exception):
    """A body that is not what its content type says, or breaks a rule of its form."""

    def __init__(self, detail: str, faults: list[Fault]) -> None:
        self.detail, self.faults = detail, faults
        super().__init__(detail)


def _from_json(body: bytes | bytearray) -> DeliveredWire:
    return RolloutBody.model_validate(orjson.loads(body)).to_wire()


_DECODERS: Final[Mapping[str, Callable[[bytes | bytearray], DeliveredWire]]] = {
    JSON: _from_json,
    ROLLOUT_CONTENT_TYPE: decode_rollout,
}
CONTENT_TYPES: Final = frozenset(_DECODERS)


def decode_delivered(content_type: str, body: bytes | bytearray) -> DeliveredWire:
    """The rollout. Raises Undecodable."""
    try:
        return _DECODERS[content_type](body)
    except ValidationError as exc:
        raise _broken({**error, "loc": ("body", *error["loc"])} for error in exc.errors()) from exc
    except orjson.JSONDecodeError as exc:
        fault = {"loc": ("body",), "msg": f"must be JSON: {exc}"[:DETAIL_CHARACTERS_MAX]}
        raise _broken([fault]) from exc
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Undecodable(f"body: {exc}"[:DETAIL_CHARACTERS_MAX], []) from exc


def decode_turns(content: bytes | bytearray) -> list[TurnWire]:
    """Turns as the proxy gives them. Raises Undecodable."""
    try:
        return _TURNS.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise Undecodable(f"turns: {exc}"[:DETAIL_CHARACTERS_MAX], []) from exc


def _broken(errors: Iterable[Mapping[str, Any]]) -> Undecodable:
    faults = faults_of(errors)
    return Undecodable(f"{faults[0].field}: {faults[0].rule}", faults)
