"""Cut a sample to a length: tokens, columns and rows in one operation."""

from dataclasses import replace

from sideband.batch.types import Sample
from sideband.errors import InvalidInput
from sideband.segments import cut


def truncate(sample: Sample, seq_len: int) -> Sample | None:
    """The first ``seq_len`` tokens with all that belongs to them; None when none of them trains.

    The same object comes back when nothing is cut. A cut sample's last routing row is a real one.
    """
    if seq_len < 1:
        raise InvalidInput("seq_len", seq_len, "must be at least 1")
    # The first token of a sequence cannot train: nothing precedes it.
    if not sample.loss_mask_T[1:seq_len].any():
        return None
    if len(sample) <= seq_len:
        return sample
    segments = tuple(cut(sample.segments, start=0, stop=seq_len))
    versions = sample.weight_versions
    return replace(
        sample,
        token_ids_T=sample.token_ids_T[:seq_len],
        loss_mask_T=sample.loss_mask_T[:seq_len],
        logprobs_T=sample.logprobs_T[:seq_len],
        advantages=sample.advantages.slice(0, seq_len),
        temperatures=sample.temperatures.slice(0, seq_len),
        weight_versions=None if versions is None else versions.slice(0, seq_len),
        segments=segments,
        form=sample.form if segments else None,
    )
