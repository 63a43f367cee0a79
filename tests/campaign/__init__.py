"""Tries to break headprune by interruptions and by faults of the machine.

    python -m tests.campaign all --seeds 1 2 3        everything, and the report
    python -m tests.campaign kill --seed 1            one part
    python -m tests.campaign kill --seed 1 --group prune --number 17   one case, as it was

A case is a pure function of part, seed, group (a command, a fault) and number. Every
command of headprune runs in a process of its own, forked from one that has everything imported.
"""
