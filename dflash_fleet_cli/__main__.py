"""`python -m dflash_fleet_cli`, which a checkout needs no installation for."""

from . import main

main()
