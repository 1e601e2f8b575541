"""Draws a `Report`: Flyte's message, terminal, HTML page and deck, Markdown."""
