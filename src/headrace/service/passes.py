"""How a pass is called in messages: "pass 0"; "pass 0.2" where repetitions are nested."""

from __future__ import annotations

__all__ = ["pass_in_words"]


def pass_in_words(pass_number: tuple[int, ...]) -> str:
    """Return the name of a pass over a dataset.

    Args:
        pass_number: From the user's iteration inwards; empty: there is one pass alone.
    """
    return f"pass {'.'.join(map(str, pass_number)) or '0'}"
