"""A decoder over ranks: each holds some rows of every linear, and they exchange what they computed."""
