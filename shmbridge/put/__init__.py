"""What `put` takes: forms, conversion, the plan of a record, an open claim, refusals."""
