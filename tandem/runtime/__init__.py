"""Where workers run: N ranks, called as one."""
