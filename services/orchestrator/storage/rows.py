"""Records as rows and back. One function each way; a list becomes JSON."""

from collections.abc import Iterable
from typing import Any

import msgspec

from services.orchestrator.history import PolicyRecord, ReturnRecord, StartRecord
from services.orchestrator.records import (
    DropReason,
    GroupRecord,
    Lease,
    LeaseState,
    MemberRecord,
    Rollout,
    RolloutState,
    RunRecord,
    StepRecord,
    StepState,
    Tally,
)
from sideband.batch.types import Sample
from sideband.ids import GroupId, LeaseId, RolloutId, SessionId

Row = dict[str, Any]  # by column, without the run


def _list(items: Iterable[str]) -> str:
    return msgspec.json.encode(list(items)).decode()


def _names(files: frozenset[str]) -> str:
    return _list(sorted(files)) if files else "[]"


def _read_names(text: str) -> frozenset[str]:
    return frozenset(msgspec.json.decode(text, type=list[str])) if text != "[]" else frozenset()


def _tally(tally: Tally) -> str:
    return msgspec.json.encode(tally).decode()


def _read_tally(text: str) -> Tally:
    return msgspec.json.decode(text, type=Tally)


def _text(text: str) -> str:
    """As a JSON string: PostgreSQL holds no NUL, and clients choose some of these texts."""
    return msgspec.json.encode(text.encode("utf-8", "replace").decode()).decode()


def _read_text(text: str) -> str:
    return msgspec.json.decode(text, type=str)


def run_row(run: RunRecord) -> Row:
    """The row of ``runs``."""
    row = {name: getattr(run, name) for name in RunRecord.__slots__}
    return {**row, "reason": _text(run.reason)}


def read_run(row: Row) -> RunRecord:
    """The record of a row."""
    facts = {name: row[name] for name in RunRecord.__slots__}
    return RunRecord(**{**facts, "reason": _read_text(row["reason"])})


def lease_row(lease: Lease, serial: int) -> Row:
    """The row of ``leases``."""
    return {
        "lease_id": lease.lease_id,
        "rollout_id": lease.rollout_id,
        "group_id": lease.group_id,
        "group_size": lease.group_size,
        "env_name": _text(lease.env_name),
        "session_id": lease.session_id,
        "policy_version": lease.policy_version,
        "dispatch_index": lease.index,
        "taken_s": lease.taken_s,
        "deadline_s": lease.deadline_s,
        "files": _names(lease.files),
        "state": lease.state.value,
        "reason": _text(lease.reason),
        "serial": serial,
    }


def read_lease(row: Row) -> Lease:
    """The record of a row."""
    session_id = row["session_id"]
    return Lease(
        lease_id=LeaseId(row["lease_id"]),
        rollout_id=RolloutId(row["rollout_id"]),
        group_id=GroupId(row["group_id"]),
        group_size=row["group_size"],
        env_name=_read_text(row["env_name"]),
        session_id=None if session_id is None else SessionId(session_id),
        policy_version=row["policy_version"],
        index=row["dispatch_index"],
        taken_s=row["taken_s"],
        deadline_s=row["deadline_s"],
        files=_read_names(row["files"]),
        state=LeaseState(row["state"]),
        reason=_read_text(row["reason"]),
    )


def rollout_row(rollout: Rollout, serial: int) -> Row:
    """The row of ``rollouts``; its samples go to ``bodies``."""
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "policy_version": rollout.policy_version,
        "dispatch_index": rollout.index,
        "digest": rollout.digest,
        "state": rollout.state.value,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "files": _names(rollout.files),
        "files_shared": _names(rollout.files_shared),
        "tally": _tally(rollout.tally),
        "reason": None if rollout.reason is None else rollout.reason.value,
        "detail": _text(rollout.detail),
        "refusal": rollout.refusal,
        "step": rollout.step,
        "ready_index": rollout.ready_index,
        "serial": serial,
    }


def read_rollout(row: Row, samples: tuple[Sample, ...]) -> Rollout:
    """The record of a row."""
    return Rollout(
        rollout_id=RolloutId(row["rollout_id"]),
        group_id=GroupId(row["group_id"]),
        policy_version=row["policy_version"],
        index=row["dispatch_index"],
        digest=row["digest"],
        state=RolloutState(row["state"]),
        reward=row["reward"],
        advantage=row["advantage"],
        samples=samples,
        files=_read_names(row["files"]),
        files_shared=_read_names(row["files_shared"]),
        tally=_read_tally(row["tally"]),
        reason=None if row["reason"] is None else DropReason(row["reason"]),
        detail=_read_text(row["detail"]),
        refusal=row["refusal"],
        step=row["step"],
        ready_index=row["ready_index"],
    )


def group_row(group: GroupRecord, serial: int) -> Row:
    """The row of ``groups``."""
    return {
        "group_id": group.group_id,
        "size": group.size,
        "touched_s": group.touched_s,
        "is_closed": group.is_closed,
        "files": _names(group.files),
        "serial": serial,
    }


def read_group(row: Row) -> GroupRecord:
    """The record of a row."""
    return GroupRecord(
        group_id=GroupId(row["group_id"]),
        size=row["size"],
        touched_s=row["touched_s"],
        is_closed=bool(row["is_closed"]),
        files=_read_names(row["files"]),
    )


def member_row(member: MemberRecord) -> Row:
    """The row of ``members``."""
    return {
        "group_id": member.group_id,
        "rollout_id": member.rollout_id,
        "dispatch_index": member.index,
        "is_open": member.is_open,
        "is_delivered": member.is_delivered,
        "reward": member.reward,
    }


def read_member(row: Row) -> MemberRecord:
    """The record of a row."""
    return MemberRecord(
        group_id=GroupId(row["group_id"]),
        rollout_id=RolloutId(row["rollout_id"]),
        index=row["dispatch_index"],
        is_open=bool(row["is_open"]),
        is_delivered=bool(row["is_delivered"]),
        reward=row["reward"],
    )


def step_row(record: StepRecord, serial: int) -> Row:
    """The row of ``steps``; its body is built again from its rollouts."""
    return {
        "step": record.step,
        "state": record.state.value,
        "rollout_ids": _list(record.rollout_ids),
        "files": _names(record.files),
        "digest": record.digest,
        "size_bytes": record.size_bytes,
        "micro_batches": record.micro_batches,
        "tally": _tally(record.tally),
        "built_s": record.built_s,
        "acknowledged_s": record.acknowledged_s,
        "serial": serial,
    }


def read_step(row: Row) -> StepRecord:
    """The record of a row."""
    rollout_ids = msgspec.json.decode(row["rollout_ids"], type=list[str])
    return StepRecord(
        step=row["step"],
        state=StepState(row["state"]),
        rollout_ids=tuple(RolloutId(name) for name in rollout_ids),
        files=_read_names(row["files"]),
        digest=row["digest"],
        body=b"",
        size_bytes=row["size_bytes"],
        micro_batches=row["micro_batches"],
        tally=_read_tally(row["tally"]),
        built_s=row["built_s"],
        acknowledged_s=row["acknowledged_s"],
    )


def return_row(record: ReturnRecord) -> Row:
    """The row of ``returns``."""
    return {"lineage": record.lineage, "report": msgspec.json.encode(record).decode()}


def read_return(row: Row) -> ReturnRecord:
    """The record of a row."""
    return msgspec.json.decode(row["report"], type=ReturnRecord)


def policy_row(record: PolicyRecord) -> Row:
    """The row of ``policies``."""
    return {name: getattr(record, name) for name in PolicyRecord.__slots__}


def read_policy(row: Row) -> PolicyRecord:
    """The record of a row."""
    return PolicyRecord(**{name: row[name] for name in PolicyRecord.__slots__})


def start_row(record: StartRecord) -> Row:
    """The row of ``starts``."""
    return {"start_id": record.start_id, "begun_s": record.begun_s}


def read_start(row: Row) -> StartRecord:
    """The record of a row."""
    return StartRecord(start_id=row["start_id"], begun_s=row["begun_s"])
