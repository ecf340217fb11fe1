"""Everything of a book that decides, as plain data: two books with equal dumps act alike."""

from dataclasses import fields
from typing import Any

import numpy as np

from services.orchestrator.book import Book
from services.orchestrator.records import Rollout, StepRecord
from sideband.batch.columns import Runs
from sideband.batch.types import Sample
from sideband.masks.rows import RaggedRows
from sideband.segments import InlineSegment


def dump(book: Book) -> dict[str, Any]:
    """The state, orders included where they decide. Bodies of steps are built again."""
    groups, retention = book.groups, book.retention
    return {
        "run": book.run,
        "policy": (book.policy_version, book.policy_applied, book.policy_before),
        "returns": book.returns,
        "policies": list(book.policies),
        "next": (book.next_step, book.next_lease_index, book.next_ready_index),
        "leases": list(book.leases.items()),
        "open_leases": list(book.open_leases.items()),
        "lease_of": book.lease_of,
        "leases_of_session": book.leases_of_session,
        "ended_leases": list(book._ended_leases),
        "rollouts": [(name, rollout_facts(r)) for name, r in book.rollouts.items()],
        "held": [(name, rollout_facts(r)) for name, r in book.held.items()],
        "ended_rollouts": list(book._ended_rollouts),
        "steps": {step: step_facts(record) for step, record in book.steps.items()},
        "open_steps": sorted(book.open_steps),
        "closed_steps": list(book._closed_steps),
        "draft": book.draft
        and (
            book.draft.step,
            [
                (r.rollout_id, [sample_facts(sample) for sample in r.samples])
                for r in book.draft.rollouts
            ],
        ),
        "groups": {
            name: (
                group.size,
                group.touched_s,
                group.open_count,
                [
                    (member, m.index, m.is_open, m.reward, m.is_delivered)
                    for member, m in group.members.items()
                ],
            )
            for name, group in groups._groups.items()
        },
        "groups_idle": list(groups._idle),
        "groups_closed": list(groups._closed),
        "holders": {file: retention.why(file) for file in retention.held_files()},
        "retention_steps": {
            step: state.is_acknowledged for step, state in retention._steps.items()
        },
        "applied": retention._applied,
        "given_up": {v: files for v, files in retention._given_up.items() if files},
    }


def rollout_facts(rollout: Rollout) -> dict[str, Any]:
    """A rollout without identity of its arrays."""
    facts = {name: getattr(rollout, name) for name in rollout.__struct_fields__}
    return {**facts, "samples": [sample_facts(sample) for sample in rollout.samples]}


def step_facts(record: StepRecord) -> dict[str, Any]:
    """A step without its body."""
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name != "body"}


def sample_facts(sample: Sample) -> dict[str, Any]:
    """A sample, arrays as bytes."""
    return {f.name: _plain(getattr(sample, f.name)) for f in fields(sample)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, Runs):
        return (_plain(value.values_R), _plain(value.lengths_R))
    if isinstance(value, RaggedRows):
        return (type(value).__name__, _plain(value.starts_N), _plain(value.values_M))
    if isinstance(value, InlineSegment):
        return (value.field, value.pos, _plain(value.data))
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return value
