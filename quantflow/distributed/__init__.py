"""Several processes that work on one model: started, named, and told what the others computed."""
