"""Rewards in other processes, in other environments and on other machines."""
