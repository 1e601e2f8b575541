"""Keeps rank 0's decks, and writes the deck of a failed attempt. It may import flytekit; it imports no torch."""
