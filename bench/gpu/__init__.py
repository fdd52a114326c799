"""`make gpu`: everything that only a GPU machine can show, in one command of at most nine minutes.

`run` looks at the machine, builds, and starts each part as a process of its own; a part knows nothing of the
others.
"""
