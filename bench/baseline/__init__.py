"""The inline path as the field does it, written as fairly as we can: the side to compare with."""
