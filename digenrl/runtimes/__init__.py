"""Runtimes: who carries out the scheduler's actions. In one process, or by processes of this machine."""
