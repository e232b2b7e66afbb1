"""All of a model over ranks: processes that start and meet, tensors that are cut over them and joined again."""
