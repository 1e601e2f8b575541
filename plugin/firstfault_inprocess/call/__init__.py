"""The parts of one call of a wrapped function: what it holds, its iterations, and its hooks."""
