"""``python -m headprune``, also under ``accelerate launch -m headprune``."""

from headprune.app import main

if __name__ == "__main__":
    main()
