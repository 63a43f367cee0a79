"""Importing this imports all that commands import."""

from tests.campaign import warm

warm.up()
