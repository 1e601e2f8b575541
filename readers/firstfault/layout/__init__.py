"""The paths below an output prefix and the grammar of names. Imports `model` and the URI functions of `store`."""
