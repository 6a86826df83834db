"""What happens to a part of a program that this package could not change: it stays, with a warning."""

from __future__ import annotations

import warnings

__all__ = ["left"]


def left(what: str, error: Exception, *, strict: bool = False, by: str = "MemEfficient", stacklevel: int = 3) -> str:
    """Warn that something stays as it is.

    Args:
        what: stays, and how, as in "the loss head as it is".
        error: the cause.
        strict: raise the error instead.
        by: the transform whose work it was.
        stacklevel: as of `warnings.warn`: 1 is this function.

    Returns:
        the cause, for a refusal.
    """
    if strict:
        raise error
    cause = f"{type(error).__name__}: {error}"
    warnings.warn(f"{by} left {what}: {cause}", stacklevel=stacklevel)
    return cause
