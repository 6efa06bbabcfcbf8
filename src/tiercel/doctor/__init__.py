"""`tiercel doctor`: is this host fit for this configuration, is what runs there well? It repairs nothing."""

from tiercel.doctor.examine import Questions, examine
from tiercel.doctor.finding import Checked, Finding, Verdict

__all__ = ["Checked", "Finding", "Questions", "Verdict", "examine"]
