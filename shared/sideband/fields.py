"""The fields of per-token rows, declared once: everything that differs between them is here.

A field's rows are cut, shifted, merged, written, read and checked by its declaration. A new field
is a name in ``Field``, an entry in ``FIELDS``, and a place for it in the rank's arrays.

Legend: P prompt tokens of N tokens in all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from sideband.masks.rows import MaskRows, ScoreRows
from sideband.model import LAYERS_MAX, TOP_K_MAX, VOCAB_SIZE_MAX, ModelShape, RowDtype

Field = Literal["routed_experts", "sampling_mask", "sampling_mask_logprobs"]
About = Literal["input", "sampled"]
RowKind = tuple[RowDtype, tuple[int, ...]]  # dtype of an element, shape of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowField:
    """What the rows of one field are.

    ``about``: row t of an "input" field is what ran when token t was the input, so it follows from
    the tokens up to t and any request that ran them may bring it. Row t of a "sampled" field is
    what token t was drawn from, so only the request that drew it has one.

    ``dtypes`` are those of an element, ``widths`` names the dimensions of a row with their limits;
    ``kind`` says which of them a model has. ``ragged``: rows differ in length, the shape bounds
    them, and this is their form in memory. ``follows``: this field says one thing of each element
    of another one, so its rows lie where that one's do, and are as long.
    """

    name: Field
    about: About
    elements: str  # for people
    dtypes: tuple[RowDtype, ...]
    widths: tuple[tuple[str, int], ...]
    kind: Callable[[ModelShape], RowKind]
    ragged: type[MaskRows] | type[ScoreRows] | None = None
    follows: Field | None = None
    has_layers: bool = False  # one column per routed layer

    def positions(self, *, prompt_tokens: int, tokens: int) -> tuple[int, int]:
        """[start, stop) of the positions where a request of ``tokens`` tokens can have rows.

        The last sampled token was never an input; without sampling all prompt tokens were.
        """
        if self.about == "sampled":
            return prompt_tokens, tokens
        return 0, tokens - 1 if tokens > prompt_tokens else tokens


def _routing_kind(model: ModelShape) -> RowKind:
    return ("uint8" if model.row_dtype.itemsize == 1 else "uint16"), model.row_shape


def _mask_kind(model: ModelShape) -> RowKind:
    return "int32", (model.vocab_size,)


def _score_kind(model: ModelShape) -> RowKind:
    return "float32", (model.vocab_size,)


_DECLARED: Final = (
    RowField(
        name="routed_experts",
        about="input",
        elements="routing ids",
        dtypes=("uint8", "uint16"),
        widths=(("layers", LAYERS_MAX), ("top_k", TOP_K_MAX)),
        kind=_routing_kind,
        has_layers=True,
    ),
    RowField(
        name="sampling_mask",
        about="sampled",
        elements="kept ids",
        dtypes=("int32",),
        widths=(("vocab_size", VOCAB_SIZE_MAX),),
        kind=_mask_kind,
        ragged=MaskRows,
    ),
    RowField(
        name="sampling_mask_logprobs",
        about="sampled",
        elements="logprobs of kept ids",
        dtypes=("float32",),
        widths=(("vocab_size", VOCAB_SIZE_MAX),),
        kind=_score_kind,
        ragged=ScoreRows,
        follows="sampling_mask",
    ),
)
FIELDS: Final[Mapping[Field, RowField]] = MappingProxyType(
    {field.name: field for field in _DECLARED}
)
INPUT_FIELDS: Final = tuple(field.name for field in _DECLARED if field.about == "input")
SAMPLED_FIELDS: Final = tuple(field.name for field in _DECLARED if field.about == "sampled")
assert tuple(FIELDS) == get_args(Field), "every name is declared, in the order of the names"
