"""headprune for MarianMT models whose decoders have SSRUs: ``python THIS COMMAND ...``."""

from ssru import ssru_decoders

from headprune.app import main

if __name__ == "__main__":
    with ssru_decoders():
        main()
