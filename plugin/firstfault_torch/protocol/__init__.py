"""What the agents of a round agree on, as pure code: no torch, thread, socket, file or clock.

`Election.handle` and `StallProtocol.handle` take an event and the time, and return instructions; a
driver carries them out. So a simulator can play any schedule: `lab/simulated_jobs`.
"""
