"""Where files lie below an output prefix, and what their names say."""
