"""Sideband: per-token arrays of RL post-training by handle instead of inline.

What users need is here; everything else is one level down. torch lives in ``sideband.torch``.
"""

from sideband.errors import FeedError, InvalidInput, PayloadError, SidebandError
from sideband.feed.committer import StepCommitter
from sideband.feed.keys import RankKeys
from sideband.feed.micro_batch import RankMicroBatch
from sideband.feed.rank import RankFeed, RankStep
from sideband.feed.resume import ResumePoint
from sideband.masks.rows import MaskRows, ScoreRows
from sideband.model import ModelShape
from sideband.payload import (
    ChoicePayload,
    MaskColumn,
    PayloadReader,
    PayloadRoot,
    RoutingRows,
    WriteReport,
    write_payload,
)
from sideband.routing import (
    UnknownArchitecture,
    model_shape,
    routed_layers,
    scatter_layers,
    select_layers,
)
from sideband.segments import (
    InlineSegment,
    PayloadSegment,
    clip,
    concatenate,
    coverage,
    cut,
    fill,
    holes,
    merge_prefill_decode,
    shift,
)

__all__ = [
    "ChoicePayload",
    "FeedError",
    "InlineSegment",
    "InvalidInput",
    "MaskColumn",
    "MaskRows",
    "ModelShape",
    "PayloadError",
    "PayloadReader",
    "PayloadRoot",
    "PayloadSegment",
    "RankFeed",
    "RankKeys",
    "RankMicroBatch",
    "RankStep",
    "ResumePoint",
    "RoutingRows",
    "ScoreRows",
    "SidebandError",
    "StepCommitter",
    "UnknownArchitecture",
    "WriteReport",
    "clip",
    "concatenate",
    "coverage",
    "cut",
    "fill",
    "holes",
    "merge_prefill_decode",
    "model_shape",
    "routed_layers",
    "scatter_layers",
    "select_layers",
    "shift",
    "write_payload",
]
