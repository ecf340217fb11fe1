"""Rollouts that do what the field reports: turns, forks, aborts and cuts, and their plain truth.

``truth`` knows nothing of Sideband: it follows the rules of SPEC with Python lists, so that what
the ranks get can be compared with something that shares no code with what is tested.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sideband.feed.micro_batch import RankMicroBatch
from tests.integration.way import Way
from tests.services.inference_proxy.stub_model import HF_CONFIG, kept_ids, logprob_of, true_rows

__all__ = ["HF_CONFIG"]

HandIn = Literal["turns", "requests", "session"]
SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "logprobs": 0}


@dataclass(slots=True)
class Branch:
    """One expected sample: its tokens, and which of them it trains."""

    tokens: list[int]
    trained: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Driver:
    """Plays one rollout against a running way; remembers what must come of it."""

    way: Way
    name: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    version: str = ""
    hands_in: HandIn = "turns"

    async def lease(self, group: str, size: int) -> None:
        """Take the rollout's lease."""
        reply = await self.way.orchestrator.post(
            "/v1/leases",
            json={
                "rollout_id": self.name,
                "group_id": group,
                "group_size": size,
                "session_id": self.name,
            },
        )
        assert reply.status_code == 200, reply.text
        self.version = str(reply.json()["policy_version"])

    async def turn(self, prompt: list[int], max_tokens: int) -> list[int]:
        """One request through the proxy; its whole sequence."""
        body = {
            "request_id": f"{self.name}.t{len(self.turns)}",
            "token_ids": prompt,
            "sampling_params": {**SAMPLING, "max_tokens": max_tokens},
        }
        reply = await self.way.proxy.generate(body, session=self.name, version=self.version)
        assert reply.status_code == 200, reply.text
        self.turns.append(turn_of(prompt, reply.json()))
        completion: list[int] = self.turns[-1]["completion_token_ids"]
        return prompt + completion

    def abort(self, prompt: list[int]) -> None:
        """A turn that the client gave up before a token came."""
        self.turns.append(
            {
                "request_id": f"{self.name}.t{len(self.turns)}",
                "prompt_token_ids": prompt,
                "completion_token_ids": [],
                "logprobs": [],
            }
        )

    async def deliver(self, **more: Any) -> dict[str, Any]:
        """Hand the rollout in."""
        body = {"rollout_id": self.name, "status": "completed", **self._turns(), **more}
        reply = await self.way.orchestrator.post("/v1/rollouts", json=body)
        assert reply.status_code < 300, reply.text
        receipt: dict[str, Any] = reply.json()
        return receipt

    def _turns(self) -> dict[str, Any]:
        """The turns, or where the proxy has them: of one that was given up it knows nothing."""
        if self.hands_in == "session":
            return {"session_id": self.name}
        if self.hands_in == "requests":
            answered = [turn for turn in self.turns if turn["completion_token_ids"]]
            return {"turn_refs": [{"request_id": turn["request_id"]} for turn in answered]}
        return {"turns": self.turns}


def turn_of(prompt: list[int], answer: dict[str, Any]) -> dict[str, Any]:
    """What a client delivers of one answer: passed on, not understood."""
    choice = answer["choices"][0]
    turn = {
        "request_id": answer["request_id"],
        "prompt_token_ids": prompt,
        "completion_token_ids": choice["token_ids"],
        "logprobs": [logprob_of(token) for token in choice["token_ids"]],
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 20,
        "payload_segments": (answer.get("payload_segments") or {}).get("0"),
        "payload_model": answer.get("payload_model"),
        "routed_experts": choice["routed_experts"],
        "routed_layer_ids": answer.get("routed_layer_ids"),
        "routed_experts_prompt_start": (answer.get("routed_experts_start") or {}).get("0", 0),
        "sampling_mask": choice["sampling_mask"],
    }
    return {key: value for key, value in turn.items() if value is not None}


async def agent(
    way: Way, index: int, *, group: str, size: int, reward: float, hands_in: HandIn = "turns"
) -> list[Branch]:
    """Five turns: a tool, a prefix tokenised anew, the main line again, an abort."""
    driver = Driver(way, f"{group}-r{index}", hands_in=hands_in)
    await driver.lease(group, size)
    first = await driver.turn([index + 1, 3, 5, 7, 11], 4)
    main = await driver.turn([*first, 20, 21, 22], 4)
    forked = await driver.turn([*first[:7], 63, 1, 2], 3)
    driver.abort([*main, 40])
    end = await driver.turn([*main, 9], 2)
    receipt = await driver.deliver(reward=reward)
    assert receipt["accepted"], receipt
    trained = {*range(5, 9), *range(12, 16), *range(17, 19)}
    return [Branch(end, trained), Branch(forked, {10, 11, 12})]


async def long_one(way: Way, *, seq_len: int, hands_in: HandIn = "turns") -> list[Branch]:
    """A rollout alone in its group, whose second turn is cut in its completion."""
    driver = Driver(way, "long", hands_in=hands_in)
    await driver.lease("long", 1)
    first = await driver.turn([50, 51, 52], 2)
    tool = [(7 * i) % 64 for i in range(seq_len - len(first) - 3)]
    second = await driver.turn([*first, *tool], 6)
    receipt = await driver.deliver(advantage=0.5)
    assert receipt["accepted"], receipt
    return [Branch(second[:seq_len], {3, 4, *range(seq_len - 3, seq_len)})]


def packed(batches: list[list[RankMicroBatch]]) -> list[dict[str, NDArray[Any]]]:
    """Each packed row put together again from its ranks' rows, by their packed positions."""
    rows = []
    for parts in zip(*batches, strict=True):
        total = int(parts[0].cu_seqlens[-1])
        seen = np.concatenate([part.packed_positions for part in parts])
        assert sorted(seen.tolist()) == list(range(total)), "each token at exactly one rank"
        row: dict[str, NDArray[Any]] = {}
        for name in ("input_ids", "labels", "loss_mask", "advantages", "logprobs", "routing_valid"):
            column = np.concatenate([getattr(part, name)[0] for part in parts])
            row[name] = np.empty_like(column)
            row[name][seen] = column
        if parts[0].routed_experts is not None:
            experts = np.concatenate(
                [p.routed_experts[0] for p in parts if p.routed_experts is not None]
            )
            row["routed_experts"] = np.empty_like(experts)
            row["routed_experts"][seen] = experts
        kept = np.empty(total, object)
        for part in parts:
            for i, place in enumerate(part.packed_positions.tolist()):
                a, b = part.mask_starts[i], part.mask_starts[i + 1]
                kept[place] = part.mask_ids[a:b].tolist()
        row["kept"] = kept
        row["cu_seqlens"] = parts[0].cu_seqlens
        row["sample_ids"] = np.array([sample or "" for sample in parts[0].sample_ids])
        rows.append(row)
    return rows


def check_branch(row: dict[str, NDArray[Any]], start: int, stop: int, branch: Branch) -> None:
    """One sequence of a packed row against its truth, under ``align="next"``."""
    tokens, count = branch.tokens, len(branch.tokens)
    at = slice(start, start + count)
    assert row["input_ids"][at].tolist() == tokens
    assert row["labels"][at].tolist() == [*tokens[1:], -100]
    trained = [t + 1 in branch.trained for t in range(count)]
    assert row["loss_mask"][at].tolist() == trained
    expected = [kept_ids(tokens[t + 1]) if trained[t] else [] for t in range(count)]
    assert row["kept"][at].tolist() == expected
    logprobs = [-0.25 * (tokens[t + 1] % 8) if trained[t] else 0.0 for t in range(count)]
    assert row["logprobs"][at].tolist() == logprobs
    pads = slice(start + count, stop)
    assert not row["loss_mask"][pads].any()
    assert not row["routing_valid"][pads].any()


def check_routing(
    row: dict[str, NDArray[Any]], start: int, branch: Branch, *, is_cut: bool
) -> None:
    """Every row that ran is there and true; the last token has one only where it was cut."""
    count = len(branch.tokens)
    rows = count if is_cut else count - 1
    valid = row["routing_valid"][start : start + count]
    assert valid.tolist() == [True] * rows + [False] * (count - rows)
    np.testing.assert_array_equal(
        row["routed_experts"][start : start + rows], true_rows(branch.tokens)[:rows]
    )
