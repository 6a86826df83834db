"""The endings of the files that a report and a frontier are written to."""

from __future__ import annotations

__all__ = ["FRONTIER_ENDINGS", "REPORT_ENDINGS"]

REPORT_ENDINGS = (".html", ".txt", ".json", ".pickle", ".png", ".svg")
FRONTIER_ENDINGS = (".html", ".png", ".svg", ".pdf")
