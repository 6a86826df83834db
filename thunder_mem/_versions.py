"""A check, at import, that this package knows the installed versions of PyTorch and Thunder."""

from __future__ import annotations

import sys
import warnings
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

__all__ = ["check_versions", "mismatch"]

_KNOWN = ("torch", "lightning-thunder")
_WITH_COMPAT = SpecifierSet(">=2.12,<2.16")
"""The versions of PyTorch that `thunder_mem.compat` was tested with."""


def mismatch(wanted: Requirement, installed: str | None) -> str:
    """A sentence that says what to do about an installed version; "" if it is known to work.

    Args:
        wanted: this package's requirement.
        installed: the installed version, None if it is missing.

    Example:
        >>> mismatch(Requirement("torch>=2.8,<2.12"), "2.7.1+cu128")
        "thunder_mem works with torch>=2.8,<2.12, not with 2.7.1+cu128: pip install 'torch>=2.8,<2.12'"
        >>> mismatch(Requirement("torch>=2.8,<2.12"), "2.11.0")
        ''
    """
    known = wanted.name + ",".join(sorted(map(str, wanted.specifier), reverse=True))  # the lower bound first
    if installed is None:
        return f"thunder_mem needs {known}, which is not installed: pip install '{known}'"
    if wanted.specifier.contains(installed, prereleases=True):
        return ""
    way = f"pip install '{known}'"
    if wanted.name == "torch" and _WITH_COMPAT.contains(installed, prereleases=True):
        if "thunder_mem.compat" in sys.modules:
            return ""
        way += ", or import thunder_mem.compat before thunder"
    return f"thunder_mem works with {known}, not with {installed}: {way}"


def check_versions() -> None:
    """Warn of unknown versions.

    Raises:
        ImportError: PyTorch or Thunder is missing, or the two do not import together.
    """
    required = [Requirement(text) for text in _required()]
    problems = [mismatch(wanted, _installed(wanted.name)) for wanted in required if wanted.name in _KNOWN]
    told = "; ".join(filter(None, problems))
    try:
        import thunder  # noqa: F401
    except Exception as error:
        what = told or "PyTorch and Thunder are of versions that thunder_mem knows, but `import thunder` fails"
        raise ImportError(what) from error
    if told:
        warnings.warn(told, stacklevel=3)


def _required() -> list[str]:
    """The requirements in pyproject.toml; nothing for a checkout that is not installed."""
    try:
        return metadata.requires("thunder-mem") or []
    except metadata.PackageNotFoundError:
        return []


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


check_versions()
