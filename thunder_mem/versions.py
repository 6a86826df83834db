"""Which versions of PyTorch and Thunder this package knows, checked once, when it is imported."""

from __future__ import annotations

import importlib.util
import re
import warnings
from importlib import metadata

__all__ = ["check_versions", "mismatch"]

# (distribution, first version that is known, first that is not known any more); the same as in pyproject.toml.
KNOWN = (("torch", "2.8", "2.12"), ("lightning-thunder", "0.2.6", "0.3"))


def mismatch(distribution: str, installed: str | None) -> str:
    """What to do about an installed version, as a sentence; "" if it is known to work.

    Args:
        distribution: "torch" or "lightning-thunder".
        installed: its version, None if it is missing.

    Example:
        >>> mismatch("torch", "2.13.0+cu130")
        "thunder_mem works with torch>=2.8,<2.12, not with 2.13.0+cu130: pip install 'torch>=2.8,<2.12'"
        >>> mismatch("torch", "2.11.0")
        ''
    """
    first, end = next((low, high) for name, low, high in KNOWN if name == distribution)
    wanted = f"{distribution}>={first},<{end}"
    if installed is None:
        return f"thunder_mem needs {wanted}, which is not installed: pip install '{wanted}'"
    if _release(first) <= _release(installed) < _release(end):
        return ""
    return f"thunder_mem works with {wanted}, not with {installed}: pip install '{wanted}'"


def _release(version: str) -> tuple[int, ...]:
    """The numbers in front: 2.11.0a0+git1234 has what 2.11.0 has."""
    return tuple(map(int, re.match(r"[\d.]*", version)[0].strip(".").split(".")))  # type: ignore[index]


def check_versions() -> None:
    """Warn of versions that are not known.

    Raises:
        ImportError: PyTorch or Thunder is missing, or the two do not import together.
    """
    problems = [mismatch(name, _installed(name)) for name, _, _ in KNOWN]
    told = "; ".join(filter(None, problems))
    try:
        import thunder  # noqa: F401
    except Exception as error:
        what = told or "PyTorch and Thunder are of versions that thunder_mem knows, but `import thunder` fails"
        raise ImportError(what) from error
    if told:
        warnings.warn(told, stacklevel=3)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        module = "thunder" if distribution == "lightning-thunder" else distribution
        if importlib.util.find_spec(module) is None:
            return None
        found = __import__(module)  # from a checkout that is not installed
        return str(getattr(found, "__version__", "0"))


check_versions()
