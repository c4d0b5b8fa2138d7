"""Simulation and capacity planning: the real scheduler and block manager on a virtual clock."""
