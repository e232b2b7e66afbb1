"""Reports of a process to people: lines about its steps, a log, and its end."""
