"""The saves of a run: all of them, and the flow, the cost and the log lines of one."""
