"""The declarations of fields: complete, and the only place where fields differ."""

import re
from pathlib import Path
from typing import get_args

import pytest

from sideband.fields import FIELDS, INPUT_FIELDS, SAMPLED_FIELDS, Field
from sideband.testing.batches import NARROW_MODEL, WIDE_MODEL

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", get_args(Field))
def test_a_field_is_declared_in_full(name: Field) -> None:
    field = FIELDS[name]
    assert field.name == name
    assert (name in INPUT_FIELDS) != (name in SAMPLED_FIELDS)
    for model in (NARROW_MODEL, WIDE_MODEL):
        dtype, shape = field.kind(model)
        assert dtype in field.dtypes
        assert len(shape) == len(field.widths)
        assert all(1 <= n <= limit for n, (_, limit) in zip(shape, field.widths, strict=True))


def test_positions_of_a_request_are_those_of_its_inputs_or_of_what_it_sampled() -> None:
    routing, masks = FIELDS["routed_experts"], FIELDS["sampling_mask"]
    assert routing.positions(prompt_tokens=3, tokens=8) == (0, 7)
    assert routing.positions(prompt_tokens=3, tokens=3) == (0, 3)
    assert masks.positions(prompt_tokens=3, tokens=8) == (3, 8)
    assert masks.positions(prompt_tokens=3, tokens=3) == (3, 3)


def test_what_differs_between_fields_is_asked_of_the_declaration() -> None:
    """A name that is compared somewhere is a path that a new field would not take."""
    compared = re.compile(r"""[!=]= ?["'](?:""" + "|".join(get_args(Field)) + r""")["']""")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("shared/sideband", "services")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "testing" not in path.parts
        for line in path.read_text().splitlines()
        if compared.search(line)
    ]
    assert found == []
