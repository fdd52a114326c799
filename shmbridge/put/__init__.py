"""The parts of `put`: forms, conversion, the plan of a record, errors, and the lane that it goes to."""

__all__ = ["convert", "errors", "lane", "planner", "recorded", "relayed", "tickets"]
