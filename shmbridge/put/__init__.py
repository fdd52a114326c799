"""The parts of `put`: forms, conversion, the plan of a record, an open claim, errors."""

__all__ = [
    "agreement",
    "claim",
    "convert",
    "counters",
    "new_lane",
    "planner",
    "producer_errors",
    "recorded",
    "relayed",
    "still_linked",
]
