"""The table of `top --cluster`: what is wrong stands below it."""

from shmbridge.relay.ray.directory import Report, table


def test_what_is_refused_is_named_with_its_reason():
    report = Report("learner", 1, refused={"gsm8k-1 on env-1": "[SB417] column 'mine'"})
    assert table(report, None, 1.0).splitlines()[-1] == "! gsm8k-1 on env-1: [SB417] column 'mine'"
