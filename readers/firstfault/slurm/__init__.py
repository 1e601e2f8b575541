"""Carries out decisions on Slurm: ``firstfault requeue``. This folder can be deleted."""
