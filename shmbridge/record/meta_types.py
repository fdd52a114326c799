"""The Arrow types of what a record says of itself, in tables of batches and in the files of recordings."""

import pyarrow as pa

META_TYPES: dict[str, pa.DataType] = {
    "producer_id": pa.utf8(),
    "sequence": pa.uint64(),
    "env_name": pa.utf8(),
    "env_id": pa.int32(),
    "group_id": pa.utf8(),
    "group_size": pa.int32(),
    "min_policy_version": pa.int64(),
    "max_policy_version": pa.int64(),
    "t_created_ns": pa.int64(),
    "t_publish_ns": pa.int64(),
    "split": pa.utf8(),
    "redelivered": pa.bool_(),
}
