"""Reports: `explain` shows which values hold the memory of a compiled function, and why."""

from thunder_mem.report.explain import explain
from thunder_mem.report.report import Moment, PhasePeak, Report, Tenant

__all__ = ["Moment", "PhasePeak", "Report", "Tenant", "explain"]
