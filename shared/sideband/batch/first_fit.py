"""First fit: each size into the first bin with room for it."""

from collections.abc import Sequence


def first_fit(sizes: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Bins of indices into ``sizes``, in the order the bins were opened.

    Every size must be at most ``capacity``. A tree over the bins' free room finds the first
    that fits in log time: a linear scan would make 10^5 samples take minutes.
    """
    assert all(0 <= size <= capacity for size in sizes), "a size beyond the bin is a caller's bug"
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    # room[node] is the most free room among the bins below it; bins not yet opened are empty.
    room = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for index, size in enumerate(sizes):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= size
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return bins
