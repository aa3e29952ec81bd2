"""Gives a row the same bits whatever else is in the batch: the mode, the check, the table of a model's layers."""
