"""Default fields of a commit, for tests that do not need others."""

FIELDS = {
    **dict.fromkeys(("rows", "group_size"), 1),
    **dict.fromkeys(("columns", "index_bytes", "group_id_bytes", "flags", "tokens", "t_created_ns"), 0),
    **dict.fromkeys(("min_policy_version", "max_policy_version", "env_id"), -1),
}
