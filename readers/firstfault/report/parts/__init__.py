"""The parts of a report as finished texts."""
