"""Gives a row the same bits whatever is in the batch beside it: the mode, the check, the table of a model's layers."""
