"""A small mixture-of-experts model trained from a real feed, and compared with plain training.

What a trainer does with a rank's arrays, in plain torch: it replays the experts that ran, takes
log-probabilities over the kept sets, cuts sequences over context-parallel ranks, and commits.
"""
