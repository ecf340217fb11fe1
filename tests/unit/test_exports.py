"""The public face of the library."""

import sideband


def test_the_public_names_are_sorted_and_there() -> None:
    assert sideband.__all__ == sorted(sideband.__all__)
    assert all(hasattr(sideband, name) for name in sideband.__all__)
    assert all(getattr(sideband, name).__doc__ for name in sideband.__all__)
