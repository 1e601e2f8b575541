"""What the agent and the workers of one node share."""
