"""Is a machine, and its network to another node, fit for a job? `hyperpod doctor` prints what this package finds.

`gather_software`, `gather_machine` and the others return facts, and pure functions decide what they mean.
"""

from hyperpod_plugins.doctor.doctor_command import Facts, findings_of
from hyperpod_plugins.doctor.finding import Finding, JobSize

__all__ = ["Facts", "Finding", "JobSize", "findings_of"]
