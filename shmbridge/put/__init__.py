"""What `put` takes: forms, conversion, the plan of a record, an open claim, refusals."""

__all__ = ["claim", "planner", "refusals", "still_linked"]
