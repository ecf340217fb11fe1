"""What several workers say, made one answer: pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.inference_proxy.schemas import EngineView, SessionView


def merged_engines(views: Sequence[Sequence[EngineView]]) -> list[EngineView]:
    """Each engine once: requests and ejections of all workers, and the state of a worker in which
    it is out, if there is one, else the first worker's.
    """
    merged = []
    for one in zip(*views, strict=True):
        shown = next((view for view in one if not view.is_serving), one[0])
        counts = {
            "in_flight": sum(view.in_flight for view in one),
            "requests_total": sum(view.requests_total for view in one),
            "failures": max(view.failures for view in one),
            "ejections_total": sum(view.ejections_total for view in one),
        }
        merged.append(shown.model_copy(update=counts))
    return merged


def merged_sessions(views: Iterable[Sequence[SessionView]], limit: int) -> list[SessionView]:
    """At most ``limit``, the latest last. Nobody knows the order between workers: those that are
    equally late in theirs stand together.
    """
    ranks = zip_longest(*(reversed(each) for each in views))
    latest = [view for rank in ranks for view in rank if view is not None]
    return latest[:limit][::-1]


class _Families(Collector):
    """Families as they are."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All."""
        yield from self._families


def merged_metrics(texts: Sequence[tuple[int, bytes]]) -> bytes:
    """Every worker's samples under the label ``worker``."""
    families: dict[str, Metric] = {}
    for index, text in texts:
        for family in text_string_to_metric_families(text.decode()):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                labels = {**sample.labels, "worker": str(index)}
                known.samples.append(sample._replace(labels=labels))
    return generate_latest(_Families(families.values()))
