"""headprune as torchrun starts it, of whose processes one may be made to die."""

import os
from pathlib import Path

from tests.campaign.trap import Trap

if __name__ == "__main__":
    rank, fatal = os.environ.get("CAMPAIGN_DIES", ":").split(":")
    if rank == os.environ.get("RANK"):
        Trap(Path.cwd(), int(fatal)).set()
    from headprune.app import main

    main()
