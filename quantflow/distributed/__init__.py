"""A model over several ranks: processes that start and meet, tensors that are cut and joined."""
