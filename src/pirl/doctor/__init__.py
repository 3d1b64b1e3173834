"""`pirl doctor`: checks this machine and says how to fix what is missing."""

from pirl.doctor.examination import examine
from pirl.doctor.findings import Finding

__all__ = ["Finding", "examine"]
