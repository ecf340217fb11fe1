"""Stream parts that an engine joined: no row and no kept set is lost, in any line of vLLM."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sideband.engines.vllm.hooks.outputs import carrying
from tests.unit.engines.vllm.fakes import (
    CompletionOutput,
    RequestOutput,
    SamplingMask,
    masks_of,
    rows_of,
)


def add_of(*, carries_rows: bool, carries_masks: bool) -> Callable[[Any, Any, bool], None]:
    """``RequestOutput.add`` as a line of vLLM has it."""

    def add(self: Any, next_output: Any, aggregate: bool) -> None:
        for part in next_output.outputs:
            for place, whole in enumerate(self.outputs):
                if whole.index != part.index:
                    continue
                if not aggregate:
                    self.outputs[place] = part
                    break
                whole.token_ids = [*whole.token_ids, *part.token_ids]
                whole.finish_reason = part.finish_reason
                if carries_rows and part.routed_experts is not None:
                    whole.routed_experts = part.routed_experts
                if carries_masks and part.sampling_mask is not None:
                    whole.sampling_mask = whole.sampling_mask or SamplingMask([])
                    whole.sampling_mask.token_ids += part.sampling_mask.token_ids
                break
            else:
                self.outputs.append(part)

    return add


def part(index: int, tokens: list[int], **more: Any) -> RequestOutput:
    return RequestOutput([1, 2], [CompletionOutput(index, tokens, **more)])


@pytest.mark.parametrize("carries_rows", [False, True])
@pytest.mark.parametrize("carries_masks", [False, True])
@pytest.mark.parametrize("first_masks", [False, True])
def test_everything_of_joined_parts_is_there_once(
    carries_rows: bool, carries_masks: bool, first_masks: bool
) -> None:
    add = carrying(add_of(carries_rows=carries_rows, carries_masks=carries_masks))
    rows = rows_of(4)
    whole = part(0, [7], sampling_mask=SamplingMask(masks_of([7])) if first_masks else None)
    add(whole, part(0, [8], sampling_mask=SamplingMask(masks_of([8]))), True)
    add(whole, part(1, [5], sampling_mask=SamplingMask(masks_of([5]))), True)
    last = {"routed_experts": rows, "sampling_mask": SamplingMask(masks_of([9]))}
    add(whole, part(0, [9], finish_reason="length", **last), True)
    first, second = whole.outputs
    assert list(first.token_ids) == [7, 8, 9]
    np.testing.assert_array_equal(first.routed_experts, rows)
    assert first.sampling_mask is not None
    assert first.sampling_mask.token_ids == masks_of([7, 8, 9] if first_masks else [8, 9])
    assert second.sampling_mask is not None
    assert second.sampling_mask.token_ids == masks_of([5])


def test_parts_that_replace_each_other_are_left_alone() -> None:
    add = carrying(add_of(carries_rows=False, carries_masks=False))
    whole = part(0, [7], sampling_mask=SamplingMask(masks_of([7])))
    new = part(0, [7, 8])
    add(whole, new, False)
    assert whole.outputs == new.outputs
    assert whole.outputs[0].sampling_mask is None
