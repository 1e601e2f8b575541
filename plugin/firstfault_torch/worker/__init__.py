"""What runs inside a training process: it records the exception that leaves the task function,
and answers the agent.

It may import `node`, never `agent`.
"""
