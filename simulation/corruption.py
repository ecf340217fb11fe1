"""Deliberate damage between the two stages: proof that the checker sees it. Pure but for one file.

``file``: one bit of a payload file flips, behind the back of its checksums. ``segment``: a
descriptor names the rows next to its own, each of which is intact. ``row``: one expert id of an
inline answer becomes another valid one. ``mask``: a kept set loses an id that was not sampled (and
its logprob, where there is one). ``score``: the logprob of one kept id changes.
"""

from typing import Literal

from sideband.engines.inline import decode_npy_base64, encode_npy_base64
from simulation.bodies import Json
from simulation.generation import Generated

Corruption = Literal["none", "file", "segment", "row", "mask", "score"]


def corrupt(generated: Generated, corruption: Corruption) -> bool:
    """Damage the way in place if it is of the form that the corruption is about; whether it was."""
    turns = [turn for body in generated.bodies.values() for turn in body["turns"]]
    if generated.way.form == "handle":
        if corruption == "segment":
            return any(_shift_segment(turn) for turn in turns)
        if corruption == "file":
            return any(_flip_bit(generated, turn) for turn in turns)
    elif corruption == "row":
        return any(_change_row(turn) for turn in turns)
    elif corruption == "mask":
        return any(_change_mask(turn) for turn in turns)
    elif corruption == "score":
        return any(_change_score(turn) for turn in turns)
    return False


def _shift_segment(turn: Json) -> bool:
    for segment in turn["payload_segments"]:
        if segment["field"] == "routed_experts" and segment["rows"] > 2:
            first = {**segment, "row": segment["row"] + 1, "rows": segment["rows"] - 1}
            rest = {**segment, "rows": 1, "pos": segment["pos"] + segment["rows"] - 1}
            turn["payload_segments"] = [
                other for other in turn["payload_segments"] if other is not segment
            ] + [first, rest]
            return True
    return False


def _flip_bit(generated: Generated, turn: Json) -> bool:
    assert generated.root is not None, "a way by handle has a root"
    for segment in turn["payload_segments"]:
        if segment["field"] == "routed_experts":
            with (generated.root / segment["file"]).open("r+b") as file:
                file.seek(segment["offset"] + 3)
                byte = file.read(1)[0]
                file.seek(segment["offset"] + 3)
                file.write(bytes([byte ^ 0x10]))
            return True
    return False


def _change_row(turn: Json) -> bool:
    text = turn.get("routed_experts")
    if text is None:
        return False
    rows = decode_npy_base64(text, bytes_max=len(text)).copy()
    if not len(rows):
        return False
    layer = rows[0].any(axis=1).argmax()  # a layer with a router
    # Two ids change places: still k distinct ids, so nothing but the order tells.
    rows[0, layer, [0, 1]] = rows[0, layer, [1, 0]]
    turn["routed_experts"] = encode_npy_base64(rows)
    return True


def _change_mask(turn: Json) -> bool:
    masks = turn.get("sampling_mask") or []
    scores = turn.get("sampling_mask_logprobs") or [[] for _ in masks]
    sampled_ids = turn["completion_token_ids"]
    for row, own_scores, sampled in zip(masks, scores, sampled_ids, strict=False):
        others = [place for place, token in enumerate(row) if token != sampled]
        if others:
            del row[others[0]]
            del own_scores[others[0] : others[0] + 1]
            return True
    return False


def _change_score(turn: Json) -> bool:
    for row in turn.get("sampling_mask_logprobs") or []:
        if row:
            row[0] -= 0.25
            return True
    return False
