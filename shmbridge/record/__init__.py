"""A leased record, a group of records, and their exports to Arrow and to Atropos."""

__all__ = [
    "attributes",
    "batch_arrow",
    "batch_numbers",
    "checked",
    "columns",
    "groups",
    "leases",
    "meta_types",
    "named_columns",
    "record",
    "relayed",
    "row_checks",
    "rows_without",
    "shown",
    "unreleased",
]
