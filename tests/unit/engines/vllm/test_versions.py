"""Which vLLM is known, and that nothing is guessed about another."""

from typing import Any

import pytest

from sideband.engines.vllm.versions import HOOKS, Verdict, judge_hooks, judge_version, line_of
from tests.unit.engines.vllm.fakes import FakeServingTokens


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0+cpu", "0.32.1rc1", "0.32"])
def test_a_known_line_is_known_whatever_its_patch(version: str) -> None:
    assert judge_version(version, accepted=None).is_known


@pytest.mark.parametrize("version", ["0.29.0", "0.33.0", "0.320.0", "1.32.0", "dev", "10.32"])
def test_another_version_is_refused_by_name_unless_accepted(version: str) -> None:
    verdict = judge_version(version, accepted=None)
    assert not verdict.is_known
    assert version in (verdict.why_not or "")
    assert judge_version(version, accepted=line_of(version)).is_known == (version != "dev")


def methods(**changes: Any) -> dict[str, Any]:
    return {name: getattr(FakeServingTokens, name) for name in HOOKS} | changes


def test_hooks_of_the_expected_shape_are_taken() -> None:
    verdict = judge_version("0.32.0", accepted=None)
    assert judge_hooks(verdict, methods()) is verdict


def renamed(self: Any, request: Any, results: Any, request_id: str) -> None: ...


@pytest.mark.parametrize("changed", [None, renamed, lambda self: None])
def test_a_hook_of_another_shape_is_refused_also_in_an_accepted_version(changed: Any) -> None:
    verdict = judge_version("0.40.0", accepted="0.40")
    judged = judge_hooks(verdict, methods(serve_tokens_full_generator=changed))
    assert "serve_tokens_full_generator" in (judged.why_not or "")


def test_an_unknown_version_stays_unknown_whatever_its_hooks() -> None:
    verdict = Verdict(version="0.29.0", why_not="not known")
    assert judge_hooks(verdict, methods()) is verdict
