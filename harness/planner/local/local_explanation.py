"""Says in words what is best on this machine, and why."""

from __future__ import annotations

from harness.planner.local.local_plan import CpuCandidate, CpuPlan, open_questions

PART_WORDS = {
    "compute": "the model's own arithmetic",
    "calls": "calling operators",
    "update": "the optimizer's update",
    "exchange": "collectives on this machine",
    "link": "exposed transfers over the link",
}
MOST_NAMED = 5


def explanation(plan: CpuPlan) -> list[str]:
    """Sentences about the answer, most important first."""
    sentences = []
    if plan.candidates:
        best = plan.candidates[0]
        sentences += [_first(best), _time(best), _apart(plan)]
    else:
        sentences.append("No cell of this setting trains exactly the same as one process.")
    if faster := _faster(plan):
        sentences.append(faster)
    sentences.append(
        f"Predicted from {plan.calibrated_on} measured cells of {', '.join(plan.workloads)}."
    )
    return [sentence for sentence in sentences if sentence]


def _first(best: CpuCandidate) -> str:
    how = "measured" if best.measured else "predicted"
    return (
        f"Use {best.label}: a step of {best.seconds * 1e3:.0f} ms ({how}), and"
        f" {best.peak_bytes / 1e6:.0f} MB on its fullest rank."
    )


def _time(best: CpuCandidate) -> str:
    """Which parts the predicted step has."""
    parts = {name: getattr(best.parts, name) for name in PART_WORDS}
    total = sum(parts.values())
    shares = sorted(parts.items(), key=lambda item: -item[1])
    listed = [f"{v / total:.0%} {PART_WORDS[name]}" for name, v in shares if v / total >= 0.01]
    return f"By the prediction its step is {', '.join(listed)}."


def _apart(plan: CpuPlan) -> str:
    same = open_questions(plan.candidates)
    if not same:
        return "All others are slower, beyond the intervals."
    names = [candidate.label for candidate in same[:MOST_NAMED]]
    if len(same) > MOST_NAMED:
        names.append(f"{len(same) - MOST_NAMED} more")
    missing = sum(not candidate.measured for candidate in (plan.candidates[0], *same))
    also = f"; {missing} of these were not measured" if missing else ""
    return f"Not told apart from it: {', '.join(names)}{also}."


def _faster(plan: CpuPlan) -> str:
    """What is faster at the price of another training."""
    if not plan.inexact or plan.goal != "throughput":
        return ""
    other = plan.inexact[0]
    if plan.candidates and other.seconds_high >= plan.candidates[0].seconds_low:
        return ""
    return (
        f"Faster at the price of another training: {other.label}, {other.seconds * 1e3:.0f} ms a"
        " step."
    )
