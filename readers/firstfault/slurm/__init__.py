"""Carries out decisions on Slurm: ``firstfault requeue``. Optional; nothing imports it."""
