"""The deck of a failed attempt."""
