"""Tries to break headprune: interruptions, faults, damaged files, attacks, strange numbers.

    python -m tests.campaign all --seeds 1 2 3        everything, and the report
    python -m tests.campaign fuzz --seed 1            one part
    python -m tests.campaign fuzz --seed 1 --reader plan --number 17     one case, as it was

A case is a pure function of part, seed, group (a reader, a command, a fault) and number. Every
command of headprune runs in a process of its own, forked from one that has everything imported.
"""
