"""What pirl finds on this machine, and what to do about what it lacks: one room for `pirl doctor`."""

from pirl.doctor.examination import examine
from pirl.doctor.findings import Finding

__all__ = ["Finding", "examine"]
