"""Numbers out of a service's page of metrics."""

import re


def metric(page: str, name: str) -> float:
    """One sample; 0 where there is none."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def bucket_of(page: str, name: str, fraction: float) -> float:
    """The bound of the bucket of histogram ``name`` in which this fraction of it ends."""
    pattern = rf'^{re.escape(name)}_bucket\{{le="(\S+)"\}} (\S+)$'
    buckets = [(float(le), float(count)) for le, count in re.findall(pattern, page, re.MULTILINE)]
    whole = buckets[-1][1]
    return next(le for le, count in buckets if count >= fraction * whole)
