"""Reading a report."""

from linvit.testing import Report, Verdict


def verdicts(report: Report, verdict: Verdict) -> set[str]:
    return {line.name for line in report.lines if line.verdict is verdict}
