"""Several processes that work on one model: started, named, and told what the others computed."""

MOST_RANKS = 1 << 16  # of a world; torch's own numbers of processes end there
