"""What a process tells people: lines about its steps, a log, and how it ends."""
