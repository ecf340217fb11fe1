"""The checks of an answer's segments: short where all is well, and the same as the long ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.answers import Expected, MalformedAnswer, check_segments
from sideband.errors import PayloadError
from sideband.ids import RequestId, RunId
from sideband.payload.paths import parse_path
from sideband.segments import PayloadSegment

PROMPT, COMPLETION = 6, 5
RUN, REQUEST = RunId("run-1"), RequestId("r1-01234567.a1")
GOOD = f"v3/{RUN}/7f/{REQUEST}-0123456789abcdef.sbp"
EXPECTED = Expected(prompt_tokens=PROMPT, policy_version=3, run_id=RUN, request_id=REQUEST)


def segment(field: str, pos: int, rows: int, file: str = GOOD) -> PayloadSegment:
    shape: tuple[int, ...] = (2, 2) if field == "routed_experts" else (100,)
    return PayloadSegment(
        field=field,  # type: ignore[arg-type]
        file=file,
        offset=64,
        row=0,
        pos=pos,
        rows=rows,
        dtype="uint8" if field == "routed_experts" else "int32",
        shape=shape,
    )


def is_refused(*segments: PayloadSegment) -> bool:
    try:
        check_segments(segments, COMPLETION, EXPECTED)
    except MalformedAnswer:
        return True
    return False


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("routed_experts", "sampling_mask")),
            st.integers(0, 9),
            st.integers(1, 4),
        ),
        max_size=5,
    )
)
def test_a_row_may_come_once_and_where_its_tokens_are(rows: list[tuple[str, int, int]]) -> None:
    positions = [(field, pos + n) for field, pos, count in rows for n in range(count)]
    allowed = {("routed_experts", pos) for pos in range(PROMPT + COMPLETION - 1)}
    allowed |= {("sampling_mask", pos) for pos in range(PROMPT, PROMPT + COMPLETION)}
    is_right = set(positions) <= allowed and len(set(positions)) == len(positions)
    assert is_refused(*(segment(*row) for row in rows)) == (not is_right)


@given(
    st.tuples(
        st.sampled_from(("v3", "v03", "v4", "v", "..", "v3/..")),
        st.sampled_from((RUN, "run-2", "..", "run-1/x")),
        st.sampled_from(("7f", "7F", "7", "7ff", "..")),
        st.sampled_from(
            (
                f"{REQUEST}-0123456789abcdef.sbp",
                f"{REQUEST}-0123456789abcdeF.sbp",
                f"{REQUEST}-0123456789abcde.sbp",
                f"{REQUEST}-0123456789abcdef.sbp\n",
                f"{REQUEST}-x-0123456789abcdef.sbp",
                f".{REQUEST}-0123456789abcdef.sbp.staging",
                "r1-01234567.a2-0123456789abcdef.sbp",
                f"{REQUEST}.sbp",
                "",
            )
        ),
    )
)
def test_a_file_is_that_of_its_request_or_refused(parts: tuple[str, str, str, str]) -> None:
    file = "/".join(parts)
    try:
        path = parse_path(file, run_id=RUN)
        is_right = path.policy_version == 3 and path.request_id == REQUEST
    except PayloadError:
        is_right = False
    assert is_right == (file == GOOD)
    assert is_refused(segment("routed_experts", 0, 1, file)) == (not is_right)


@pytest.mark.parametrize("file", [GOOD, "v3/run-1"])
def test_no_file_may_be_named_where_none_was_asked_for(file: str) -> None:
    expected = Expected(prompt_tokens=PROMPT, policy_version=3, run_id=None, request_id=REQUEST)
    with pytest.raises(MalformedAnswer, match="without a payload_dir"):
        check_segments((segment("routed_experts", 0, 1, file),), COMPLETION, expected)
    check_segments((), COMPLETION, expected)
