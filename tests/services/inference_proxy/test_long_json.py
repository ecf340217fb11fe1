"""JSON with long strings: read and written in parts, and the same as if it were whole."""

import base64
from itertools import pairwise
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy import long_json, raw
from services.inference_proxy.long_json import (
    CUT_BYTES_MIN,
    TooMuchBeside,
    cut,
    dump_long,
    read_long,
    write_long,
)
from services.inference_proxy.raw import parsed_answer
from services.inference_proxy.upstream import parsed
from sideband.engines.long_text import LongText

BASE64 = base64.b64encode(bytes(range(256)) * 300).decode()  # 102,400 characters
WRITERS = (write_long, dump_long)
_ESCAPES = ["\\/", "\\u003d", "\\u0041", "\\n", '\\"', "\\\\", "\\ud83d\\ude00", "\\ud83d"]


def plain(value: Any) -> Any:
    """With strings in place of long texts."""
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, LongText):
        return b"".join(value.parts).decode("ascii")
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def cut_at(content: bytes, cuts: list[int]) -> tuple[bytes, ...]:
    edges = [0, *sorted(cuts), len(content)]
    return tuple(content[a:b] for a, b in pairwise(edges))


def strings() -> st.SearchStrategy[str]:
    long = st.integers(CUT_BYTES_MIN - 9, len(BASE64)).map(lambda size: BASE64[:size])
    return st.one_of(
        long,
        st.text(max_size=5),
        st.tuples(st.text(max_size=3), long, st.text(max_size=3)).map("".join),
        st.just("\\u00" + BASE64),
    )


def values() -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(st.none(), st.integers(-5, 5), st.floats(allow_nan=False), strings()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    )


@given(values(), st.data())
def test_what_is_read_in_parts_is_what_is_read_whole(value: Any, data: st.DataObject) -> None:
    content = orjson.dumps(value)
    if data.draw(st.booleans()):  # or it is broken, anywhere
        at = data.draw(st.integers(0, len(content)))
        content = (
            content[:at] + data.draw(st.sampled_from([b"", b'"', b"\\", b"A"])) + content[at + 1 :]
        )
    parts = cut_at(content, data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    found = read_long(parts, parsed)
    assert plain(found) == parsed(content)
    for write in WRITERS:
        assert parsed(b"".join(write(found))) == parsed(content)


def written_strings() -> st.SearchStrategy[str]:
    """Strings as they stand in JSON, with escapes anywhere."""
    base64_runs = st.integers(0, 40).map(lambda size: BASE64[300 : 300 + size])
    others = st.sampled_from([*_ESCAPES, "é", " ", "m", ".0;", "{", "[1,"])
    return st.lists(st.one_of(base64_runs, others), max_size=5).map(
        lambda runs: f'"{"".join(runs)}"'
    )


def written_values() -> st.SearchStrategy[str]:
    """JSON in any spelling: of numbers, of spaces, and with members that come twice."""
    numbers = ["0", "-0", "1e5", "12345678901234567890", "0.1", "1E-3", "null", "true", "01", "NaN"]
    space = st.sampled_from(["", " ", "\r\n", "\t"])

    def listed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        items = st.lists(st.tuples(space, inner, space).map("".join), max_size=3)
        return items.map(lambda texts: f"[{','.join(texts)}]")

    def named(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        names = st.one_of(
            st.sampled_from(['"logprobs"', '"routed_experts"', '"choices"']), written_strings()
        )
        members = st.lists(
            st.tuples(names, space, inner).map(lambda m: ":".join((m[0], m[1] + m[2])))
        )
        return members.map(lambda texts: f"{{{','.join(texts)}}}")

    return st.recursive(
        st.one_of(st.sampled_from(numbers), written_strings(), written_strings()),
        lambda inner: st.one_of(listed(inner), named(inner)),
        max_leaves=8,
    )


@given(
    written_values(),
    st.sampled_from(
        ["{}", '{{"choices":[{{"index":0,"logprobs":{},"x":{}}}],"y":{}}}', "\ufeff{}"]
    ),
    st.integers(7, 40),
    st.sampled_from([parsed, parsed_answer]),
    st.data(),
)
def test_any_json_in_any_parts_is_read_as_the_whole(
    value: str, form: str, cut_bytes_min: int, parse: Any, data: st.DataObject
) -> None:
    content = form.format(value, value, value).encode()
    size = data.draw(st.integers(1, 2 * cut_bytes_min))
    edges = data.draw(st.lists(st.integers(0, len(content)), max_size=9))
    parts = data.draw(st.sampled_from([in_parts(content, size), cut_at(content, edges)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_json, "CUT_BYTES_MIN", cut_bytes_min)
        patch.setattr(raw, "RAW_BYTES_MIN", 0)
        whole = parse(content)
        found = read_long(parts, parse)
        assert plain(found) == plain(whole)
        assert b"".join(write_long(found)) == msgspec.json.encode(whole)


def answer(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": [1, 2], "routed_experts": text}], "id": "x"}


def in_parts(content: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(content[at : at + size] for at in range(0, len(content), size))


@pytest.mark.parametrize("size", [CUT_BYTES_MIN + 9, 70_000, 1 << 20])
def test_no_parser_sees_a_long_string_and_no_writer_joins_it(size: int) -> None:
    text = BASE64 * 40
    seen: list[int] = []

    def parse(content: bytes) -> Any:
        seen.append(len(content))
        return parsed_answer(content)

    content = orjson.dumps(answer(text))
    found = read_long(in_parts(content, size), parse)
    rows = found["choices"][0]["routed_experts"]
    assert isinstance(rows, LongText)
    assert [size_bytes < CUT_BYTES_MIN + 500 for size_bytes in seen] == [True]
    assert len(rows) == len(text)
    for write in WRITERS:
        assert max(map(len, write(found))) <= size
    assert orjson.loads(b"".join(dump_long(found))) == answer(text)


def test_a_long_string_is_kept_as_it_came_and_not_copied() -> None:
    parts = in_parts(orjson.dumps(answer(BASE64 * 40)), 70_000)
    rows = read_long(parts, parsed)["choices"][0]["routed_experts"]
    assert sum(part is given for part in rows.parts for given in parts) == len(parts) - 2


def test_an_escape_is_never_cut_from_what_it_escapes() -> None:
    content = b'{"a":"' + b"x" * 50 + b"\\u00" + b"41" + BASE64.encode() + b'"}'
    at = content.index(b"\\u00") + 4
    found = read_long((content[:at], content[at:]), parsed)
    assert plain(found) == orjson.loads(content)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a":' + BASE64.encode() + b"}",
        b'{"' + BASE64.encode() + b'":1}',
        BASE64.encode(),
        b"[1, 2" + b"3" * 3 * CUT_BYTES_MIN + b"]",
    ],
)
def test_what_lies_in_no_string_value_is_left_to_the_parser(content: bytes) -> None:
    parts = in_parts(content, CUT_BYTES_MIN + 50)
    assert cut(parts)[1], "something was cut out"
    assert read_long(parts, parsed) == parsed(content)


def test_the_last_of_two_members_of_a_name_counts() -> None:
    content = b'{"a":"' + BASE64.encode() + b'","a":1}'
    assert read_long(in_parts(content, 60_000), parsed) == {"a": 1}


@pytest.mark.parametrize("size", [1, 1448, CUT_BYTES_MIN - 1, CUT_BYTES_MIN, 2 * CUT_BYTES_MIN])
def test_what_comes_in_small_parts_is_cut_too(size: int) -> None:
    """As over a network, where a read gives what a few packets held."""
    content = orjson.dumps(answer(BASE64 * 4))
    parts = in_parts(content, size)
    rest, _ = cut(parts)
    assert len(rest) < 2 * CUT_BYTES_MIN + 200
    found = read_long(parts, parsed)
    assert isinstance(found["choices"][0]["routed_experts"], LongText)
    assert plain(found) == answer(BASE64 * 4)


def test_a_long_text_that_needs_an_escape_is_text_beside_which_rows_stay_in_parts() -> None:
    said = {**answer(BASE64 * 4), "text": f'\n{BASE64}"é{BASE64}'}
    seen: list[int] = []

    def parse(content: bytes) -> Any:
        seen.append(len(content))
        return parsed(content)

    found = read_long(in_parts(orjson.dumps(said), 50_000), parse)
    assert found["text"] == said["text"]
    assert isinstance(found["choices"][0]["routed_experts"], LongText)
    assert plain(found) == said
    assert [size_bytes < 4 * CUT_BYTES_MIN for size_bytes in seen] == [True], "parsed once"


def test_what_is_parsed_in_one_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "BESIDE_BYTES_MAX", 1000)
    content = orjson.dumps(answer(BASE64))
    assert plain(read_long(in_parts(content, 70_000), parsed)) == answer(BASE64)
    too_much = orjson.dumps({**answer(BASE64), "beside": list(range(1000))})
    with pytest.raises(TooMuchBeside):
        read_long(in_parts(too_much, 200_000), parsed)
    with pytest.raises(TooMuchBeside):  # what would have to be joined
        read_long((b'{"' + BASE64.encode(), b'":1}'), parsed)
