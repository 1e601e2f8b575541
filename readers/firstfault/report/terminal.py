"""Import path of release 0.1; the terminal is drawn by `firstfault.render.terminal`."""

from firstfault.render.terminal import terminal_text

__all__ = ["terminal_text"]
