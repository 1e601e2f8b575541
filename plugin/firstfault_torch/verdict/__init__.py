"""From a failed launch to a sealed verdict."""
