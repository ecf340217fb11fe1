"""A flood of one event is counted instead of written."""

import pytest
import structlog

from services.kit.logs import NAMES_MAX, Sampler, hide_secrets


class Clock:
    """Time that passes when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def passed(sampler: Sampler, name: str) -> dict[str, object] | None:
    try:
        return dict(sampler(None, "warning", {"event": name, "code": "x"}))
    except structlog.DropEvent:
        return None


def test_what_is_left_out_is_said_by_the_next_event_of_its_name() -> None:
    clock = Clock()
    sampler = Sampler(per_second_max=2, clock_s=clock)
    plain = {"event": "refused", "code": "x"}
    assert [passed(sampler, "refused") for _ in range(5)] == [plain, plain, None, None, None]
    assert passed(sampler, "other") is not None, "another event has its own share"
    clock.now_s = 0.9
    assert passed(sampler, "refused") is None
    clock.now_s = 1.0
    assert passed(sampler, "refused") == {**plain, "left_out": 4}
    assert passed(sampler, "refused") == plain


@pytest.mark.parametrize("is_over", [False, True])
def test_names_without_end_are_bounded(is_over: bool) -> None:
    sampler = Sampler(per_second_max=1, clock_s=Clock())
    for number in range(NAMES_MAX - (not is_over)):
        assert passed(sampler, f"event-{number}") is not None
    assert (passed(sampler, "one more") is None) == is_over


def test_secrets_are_hidden_by_the_end_of_their_key_however_deep() -> None:
    event = {
        "event": "said",
        "Authorization": "Bearer s3cret",
        "settings": {"feed_token": "s3cret", "admin_tokens": ["s3cret"], "port": 1},
        "headers": [{"set-cookie": b"s3cret"}],
        "tokens": 77,
        "token_ids": [1, 2],
    }
    shown = hide_secrets(None, "info", event)
    assert "s3cret" not in str(shown)
    assert (shown["tokens"], shown["token_ids"]) == (77, [1, 2])
    assert (shown["settings"]["port"], shown["event"]) == (1, "said")
