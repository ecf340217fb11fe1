"""What there is in a fuzzed run: requests that are made up know no lease, session or engine."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import httpx
from hypothesis import strategies as st

from sideband.feed.codec import STEP_CONTENT_TYPE, encode_step
from tests.fuzz.services import Urls
from tests.services.inference_proxy.harness import RUN, request_body
from tests.unit.feed.builders import make_step

NAMES: Final = {  # what a parameter or a field is called, and what it names
    "rollout_id": "rollout",
    "lease_id": "lease",
    "session_id": "rollout",
    "x-sideband-session": "rollout",
    "request_id": "request",
    "name": "engine",
    "engines": "engine",
    "file": "file",
    "sideband-feed-instance": "feed",
    "feed_instance": "feed",
}
KEPT_MAX: Final = 20  # of a kind; the oldest go first
ROLLOUTS: Final = 4
WAIT_S: Final = 20.0
TRAIN: Final = {"X-Sideband-Kind": "train"}
STEP: Final = encode_step(
    make_step(step=1, form=None, model=None, run_id=RUN, dp_size=1, cp_size=1)
)


class Known:
    """Ids that answers named; ``put_into`` a request now and then, in place of made up ones."""

    def __init__(self) -> None:
        self._values: dict[str, deque[str]] = {}
        self.answered: set[str] = set()  # operations that were, other than by a refusal

    def begin(self, urls: Urls) -> None:
        """Leases, and a turn for each, so that there is something to ask about."""
        with httpx.Client(timeout=WAIT_S, trust_env=False) as http:
            for number in range(ROLLOUTS):
                rollout = f"g7.r{number}"
                lease = {"rollout_id": rollout, "group_id": "g7", "group_size": ROLLOUTS}
                self.note(_json(http.post(f"{urls['orchestrator']}/v1/leases", json=lease)))
                headers = {**TRAIN, "X-Sideband-Session": rollout}
                body = request_body([1, 2, 3]) | {"request_id": f"{rollout}.t0"}
                path = f"{urls['inference_proxy']}/inference/v1/generate"
                self.note(_json(http.post(path, json=body, headers=headers)))
            self.note(_json(http.get(f"{urls['inference_proxy']}/v1/engines")))
            self.note(_json(http.get(f"{urls['trainer_feed']}/v1/steps")))

    def note(self, answer: Any) -> None:
        """Remember what a JSON answer names."""
        for key, value in _fields(answer):
            kind = NAMES.get(key.lower())
            if kind is not None and isinstance(value, str):
                kept = self._values.setdefault(kind, deque(maxlen=KEPT_MAX))
                if value not in kept:
                    kept.append(value)

    def put_into(self, case: Any, data: st.DataObject) -> None:
        """Let a made up request ask about what there is."""
        for named in (case.path_parameters, case.query, case.headers):
            if named:
                self._replace(named, data)
        if case.media_type == STEP_CONTENT_TYPE and data.draw(st.booleans(), "a sound step"):
            case.body, case.path_parameters["step"] = STEP, 1
        elif isinstance(case.body, dict | list):
            self._replace(case.body, data)

    def _replace(self, place: Any, data: st.DataObject) -> None:
        items = enumerate(place) if isinstance(place, list) else list(place.items())
        for key, value in items:
            kept = self._values.get(NAMES.get(str(key).lower(), ""))
            if isinstance(value, dict | list):
                self._replace(value, data)
            if kept and data.draw(st.booleans(), f"a known {key}"):
                found = data.draw(st.sampled_from(list(kept)), str(key))
                place[key] = [found] if isinstance(value, list) else found


def _json(answer: httpx.Response) -> Any:
    assert answer.status_code < 300, answer.text
    return answer.json()


def _fields(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every field of the objects in ``tree``."""
    if isinstance(tree, list):
        for item in tree:
            yield from _fields(item)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield key, value
            yield from _fields(value)
