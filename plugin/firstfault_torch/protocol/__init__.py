"""What the agents of a round agree on, as pure code: no torch, thread, socket, file or clock.

Each machine, such as `Election` or `NodeStop`, has a method `handle`: it takes an event and the
time, and returns instructions, which a driver carries out. So a simulator can play any schedule:
`lab/simulated_jobs`.
"""
