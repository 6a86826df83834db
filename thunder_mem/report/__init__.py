"""What holds the memory of a compiled function, and why: `explain` makes a `Report`."""

from thunder_mem.report.explain import explain
from thunder_mem.report.report import Moment, PhasePeak, Report, Tenant

__all__ = ["Moment", "PhasePeak", "Report", "Tenant", "explain"]
